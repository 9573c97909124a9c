"""The first run of examples/smollm2 with no setting but model, data, reward, length and schedule.

    python benchmarks/first_run.py MODEL [--json FILE] [--section.key VALUE ...]
    python benchmarks/first_run.py MODEL --both-cores [--repeats N] [--json FILE] [--run.rounds 4 ...]
    python benchmarks/first_run.py MODEL --start [--repeats N] [--json FILE]

MODEL: the folder that examples/smollm2/convert.py wrote. Trains in a temporary folder, and measures the
memory of all processes of the run together, ten times a second. Linux only.

    peak_bytes   the largest sum of the proportional set sizes (PSS: memory that n processes share counts as
                 1/n for each) of the run's processes
    reward       mean reward of each step's samples
    samples_s    trained samples a second after the first step

--both-cores trains twice and alternates the two: with what a run takes from the machine, and with one thread
a process in float32. It writes samples_s of both and their ratio, and needs 8 GiB and an idle machine.

--start measures the seconds from the command to each phase, for the quickstart and for MODEL with a first
round of four samples of at most 32 tokens: `checked` (the table of memory), `ready` (all workers), `step`
(the first optimizer step). It needs an idle machine.
"""

import json as jsons
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from common import EXAMPLES, peak_pss, run, write

FIXED = "--engine.dtype float32 --engine.threads 1 --trainer.dtype float32 --trainer.threads 1"


def measure(model: Path, words: Sequence[str]) -> dict[str, Any]:
    """Train in a temporary folder. Returns the figures."""
    subprocess.run([sys.executable, EXAMPLES / "smollm2" / "make_sums.py"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tailrace.cli", "train", str(EXAMPLES / "smollm2/first_run.toml")]
        command += ["--output-dir", f"{folder}/run", "--model.path", str(model.resolve()), *words]
        peak = peak_pss(command)
        rows = [
            jsons.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    steps = [row for row in rows if "loss" in row]
    seconds = steps[-1]["time"] - steps[0]["time"]
    rate = sum(row["samples/trained"] for row in steps[1:]) / seconds
    return {"peak_bytes": peak, "reward": [round(row["reward"], 3) for row in steps], "samples_s": rate}


PHASES = {"process ": "checked", "tailrace: the workers are ready": "ready", "Step 1 ": "step"}
SMALL = "--schedule.groups_per_round 1 --schedule.groups_per_step 1 --run.group_size 4 --run.rounds 1"


def start(words: Sequence[str]) -> dict[str, float]:
    """Train in a temporary folder. Returns the seconds from the command to each phase."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tailrace.cli", "train", *words, "--output-dir", f"{folder}/run"]
        begun = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
        ) as run:
            assert run.stdout is not None
            for line in run.stdout:
                for head, phase in PHASES.items():
                    if line.startswith(head):
                        found.setdefault(phase, round(time.monotonic() - begun, 2))
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}")
    return found


def main(
    model: Path,
    *words: Annotated[str, Parameter(allow_leading_hyphen=True, help="settings of the run")],
    both_cores: bool = False,
    start_only: Annotated[bool, Parameter("--start")] = False,
    repeats: int = 1,
    json: Path | None = None,
) -> None:
    found: dict[str, Any]
    if start_only:
        small = [
            str(EXAMPLES / "smollm2/first_run.toml"),
            "--model.path",
            str(model.resolve()),
            *SMALL.split(),
        ]
        small += ["--sampling.max_completion_tokens", "32", *words]
        subprocess.run([sys.executable, EXAMPLES / "smollm2" / "make_sums.py"], check=True)
        quickstart = [str(EXAMPLES / "quickstart/quickstart.toml")]
        found = {"quickstart": [], model.name: []}
        for _ in range(repeats):
            found["quickstart"].append(start(quickstart))
            found[model.name].append(start(small))
        print(found)
    elif not both_cores:
        found = measure(model, words)
        print(found)
    else:
        rates: dict[str, list[float]] = {"fixed": [], "chosen": []}
        for _ in range(repeats):
            rates["fixed"].append(measure(model, [*FIXED.split(), *words])["samples_s"])
            rates["chosen"].append(measure(model, words)["samples_s"])
        found = {"samples_s": rates, "ratio": sum(rates["chosen"]) / sum(rates["fixed"])}
        print(f"{rates}: {found['ratio']:.2f} x")
    write(json, found)


if __name__ == "__main__":
    run(main)
