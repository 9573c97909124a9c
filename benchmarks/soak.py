"""How much does the controller of a long run grow?

    python benchmarks/soak.py [--rounds N] [--every N] [--json F] [--section.key VALUE ...]

Trains the quickstart's model by LoRA under trl_async, in rounds of one step of four short samples: a probe
follows each publication, and every record is written. The resident memory of the controller and of the other
processes is looked at after every so many rounds. Linux only.

    controller_mb_per_1000  by least squares over the last nine tenths of the rounds; the exit code is 1 if it
                            is more than 1
    workers_mb_per_1000     the same of all other processes together
"""

import json as jsons
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from statistics import linear_regression
from typing import Annotated, Any

import tomli_w
from cyclopts import Parameter

from common import EXAMPLES, run, tree, write

MAX_MB_PER_1000 = 1.0
LORA = EXAMPLES / "lora.toml"
CHANGES: dict[str, dict[str, Any]] = {
    "run": {"group_size": 2, "eval_every": 500, "eval_prompts": 8, "checkpoint_every": 500},
    "schedule": {"name": "trl_async", "groups_per_step": 2, "groups_in_flight": 4, "staleness": 1},
    "model": {"path": str(EXAMPLES / "quickstart" / "model")},
    "data": {"kind": "rows", "path": "rows.jsonl"},
    "reward": {"function": "digits.py:digits"},
    "sampling": {"max_completion_tokens": 8},
}
REWARD = """
def digits(completion):
    return float(sum(letter.isdigit() for letter in completion))
"""


def write_config(folder: Path, rounds: int) -> Path:
    """Write the config of the run, with its data and its reward beside it."""
    config = tomllib.loads(LORA.read_text(encoding="utf-8"))
    del config["data"], config["schedule"]
    for section, changes in CHANGES.items():
        config[section] = config.get(section, {}) | changes
    config["run"]["rounds"] = rounds
    config["trainer"]["lora"]["versions"] = CHANGES["schedule"]["staleness"] + 1
    rows = [jsons.dumps({"prompt": f"{n % 10} + {n % 7} =\n"}) + "\n" for n in range(70)]
    (folder / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "digits.py").write_text(REWARD, encoding="utf-8")
    path = folder / "soak.toml"
    path.write_text(tomli_w.dumps(config), encoding="utf-8")
    return path


def resident_mb(pid: int) -> float:
    """The resident memory of a process; 0: it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0.0
    return pages * 4096 / 1e6


def measure(rounds: int, every: int, words: tuple[str, ...] = ()) -> list[tuple[int, float, float]]:
    """Train. Returns rounds, memory of the controller and of all other processes at each look, in MB; exits
    with the status of a run that fails."""
    looks = []
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), rounds)
        command = [sys.executable, "-m", "tailrace.cli", "train", str(config), *words]
        command += ["--output-dir", f"{folder}/run"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
            assert process.stdout
            for line in process.stdout:
                if not line.startswith("Step "):
                    print(line, end="", flush=True)
                    continue
                round = int(line.split("Round ")[1].split("/")[0])
                if round % every == 0:
                    controller, *others = map(resident_mb, tree(process.pid))
                    looks.append((round, controller, sum(others)))
                    print("round {}: controller {:.1f} MB, others {:.1f} MB".format(*looks[-1]), flush=True)
        if process.returncode:
            sys.exit(process.returncode)
    return looks


def growth(looks: list[tuple[int, float, float]]) -> dict[str, float]:
    """Slopes of the two memories, in MB per 1,000 rounds."""
    begun = [look for look in looks if look[0] >= looks[-1][0] / 10]
    numbers, *memories = zip(*begun, strict=True)
    slopes = [1000 * linear_regression(numbers, each).slope for each in memories]
    return dict(zip(("controller_mb_per_1000", "workers_mb_per_1000"), slopes, strict=True))


def main(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True, help="settings of the run")],
    rounds: int = 10_000,
    every: Annotated[int, Parameter(help="rounds between two looks")] = 100,
    json: Path | None = None,
) -> None:
    looks = measure(rounds, every, words)
    found = growth(looks)
    print(found)
    write(json, {"rounds": rounds, **found, "looks": looks})
    sys.exit(found["controller_mb_per_1000"] > MAX_MB_PER_1000)


if __name__ == "__main__":
    run(main)
