"""The first run of examples/smollm2 with no setting but model, data, reward, length and schedule.

    python benchmarks/first_run.py MODEL [--json FILE] [--section.key VALUE ...]

MODEL: the folder that examples/smollm2/convert.py wrote. Trains in a temporary folder, and measures the
memory of all processes of the run together, ten times a second. Linux only.

    peak_bytes   the largest sum of the proportional set sizes (PSS: memory that n processes share counts as
                 1/n for each) of the run's processes
    reward       mean reward of each step's samples
    samples_s    trained samples a second after the first step
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2"


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def pss(pid: int) -> int:
    """The proportional set size of a process; 0: it has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0


def run(model: Path, folder: Path, words: list[str]) -> int:
    """Train in `folder`. Returns the peak memory of all processes."""
    subprocess.run([sys.executable, EXAMPLE / "make_sums.py"], check=True)
    config = EXAMPLE / "first_run.toml"
    command = [sys.executable, "-m", "tailrace.cli", "train", str(config), "--output-dir", str(folder)]
    process = subprocess.Popen([*command, "--model.path", str(model.resolve()), *words])
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, sum(map(pss, tree(process.pid))))
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    watcher.join()
    if process.returncode:
        sys.exit(process.returncode)
    return peak


def measure(model: Path, words: list[str]) -> dict[str, Any]:
    """Train in a temporary folder. Returns the figures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        peak = run(model, folder, words)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    seconds = steps[-1]["time"] - steps[0]["time"]
    rate = sum(row["samples/trained"] for row in steps[1:]) / seconds
    return {"peak_bytes": peak, "reward": [round(row["reward"], 3) for row in steps], "samples_s": rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments, words = parser.parse_known_args()
    found = measure(arguments.model, words)
    peak, rate = found["peak_bytes"] / 2**30, found["samples_s"]
    print(f"peak of all processes {peak:.2f} GiB, {rate:.2f} samples/s, reward by step {found['reward']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
