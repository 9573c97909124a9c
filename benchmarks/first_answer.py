"""From an empty environment to the answer of `tailrace advise` on a log of verl's shape.

    python benchmarks/first_answer.py --json benchmarks/results/first_answer.json

An environment is made, the wheel of this checkout is installed there with its dependencies, and advise reads
the log of tests/extras/plan/fixtures/verl. Each command is printed with its seconds, which hold for this
machine, its network and its load, and with the CPU seconds among them. The keys of the answer are looked up
in the config of verl's wheel in requirements/names.txt.

The exit code is 1 if a command fails, torch is installed, or verl's config lacks a key.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from zipfile import ZipFile

import yaml  # type: ignore[import-untyped]

from peer_names import ROOT, downloaded

LOG = ROOT / "tests" / "extras" / "plan" / "fixtures" / "verl"
DEVICES = ["--device", "H100", "--model", "Qwen3-0.6B", "--group-size", "4"]
CONFIG = "verl/trainer/config/_generated_ppo_trainer.yaml"


def keys_of(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config, of sections and of values."""
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{key}.")


def lacking(answer: Mapping[str, Any], known: set[str]) -> list[str]:
    """The keys of the settings of an answer that a config lacks."""
    settings = [setting for order in answer["orders"] for setting in order["settings"]]
    return sorted({setting.partition("=")[0] for setting in settings} - known)


def timed(command: Sequence[str], folder: Path) -> dict[str, object]:
    """Run a command in a folder; return it with the folder and the checkout left out, and its seconds. Raises
    a CalledProcessError if it fails."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    began, before_s = perf_counter(), _cpu_s()
    ended = subprocess.run(command, cwd=folder, env=clean, capture_output=True, encoding="utf-8", check=False)
    seconds, cpu_s = perf_counter() - began, _cpu_s() - before_s
    if ended.returncode:
        print(ended.stdout, ended.stderr)
    ended.check_returncode()
    words = (
        " ".join(command).replace(f"{folder}/", "").replace(f"{ROOT}/", "").replace(sys.executable, "python")
    )
    print(f"{seconds:6.1f} s, {cpu_s:5.1f} s of CPU  {words}", flush=True)
    times = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_s, 1)}
    return {"command": words, **times, "printed": ended.stdout.splitlines()}


def _cpu_s() -> float:
    """CPU seconds of the commands that have ended."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="F", help="a file for the result")
    words = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--wheel-dir",
                str(folder),
                str(ROOT),
            ],
            check=True,
        )
        (wheel,) = folder.glob("tailrace-*.whl")
        advise = ["env/bin/tailrace", "advise", str(LOG), *DEVICES, "--json", "answer.json"]
        steps = [
            timed([sys.executable, "-m", "venv", "env"], folder),
            timed(["env/bin/pip", "install", "--quiet", wheel.name], folder),
            timed(advise, folder),
        ]
        has_torch = any(folder.glob("env/lib/*/site-packages/torch"))
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        downloaded(folder, newest=False)
        (verl,) = folder.glob("verl-*.whl")
        with ZipFile(verl) as files:
            known = {*keys_of(yaml.safe_load(files.read(CONFIG)))}
    left, num = lacking(answer, known), sum(len(order["settings"]) for order in answer["orders"])
    result = {
        "commands": steps,
        **{
            name: round(sum(float(str(step[name])) for step in steps), 1)
            for name in ("seconds", "cpu_seconds")
        },
        "load_average": round(os.getloadavg()[0], 1),
        "cpus": os.cpu_count(),
        "torch_installed": has_torch,
        "orders": [order["mode"] for order in answer["orders"]],
        "settings": num,
        "lacking_in": {verl.name: left},
    }
    words.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{result['seconds']:6.1f} s  in all; {num} settings, {len(left)} of them not in {verl.name}: {left}"
    )
    return int(bool(left) or has_torch)


if __name__ == "__main__":
    sys.exit(main())
