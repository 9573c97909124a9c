"""What is the second core worth? A lap alone, then two of the same lap at once, in turn.

    python benchmarks/two_cores.py [--schedule conventional] [--repeats N] [--json F]

A schedule that overlaps rollout and training does at the same time what `conventional` does in turn, on one
core and then on the other. Two runs of `conventional` that know nothing of one another keep both cores busy,
too, and neither waits for the other: so their samples a second, together, over those of one that runs alone
are what doing the same work side by side wins on this machine. Two cores of a virtual machine are seldom
worth twice one: they share caches, memory and power, with each other and with strangers.
"""

import argparse
import json
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from race import interval, race


def lap(config: Path, schedule: str, seed: int) -> float:
    """Samples a second of one lap in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "lap.json"
        race(config, result, seed, [schedule], output=subprocess.DEVNULL)
        samples_per_s: float = json.loads(result.read_text())["schedules"][schedule]["samples_per_s"]
    return samples_per_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("examples/race.toml"))
    parser.add_argument("--schedule", default="conventional")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    worth: list[float] = []
    for seed in range(arguments.repeats):
        alone = lap(arguments.config, arguments.schedule, seed)
        with ThreadPoolExecutor(2) as both:
            one, other = both.map(partial(lap, arguments.config, arguments.schedule), [seed, seed])
        worth.append((one + other) / alone)
        print(
            f"seed {seed}: {alone:.0f} alone, {one:.0f} + {other:.0f} together: {worth[-1]:.2f}", flush=True
        )
    print(f"two cores are worth {interval(worth)} of one for {arguments.schedule}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"worth": worth}))


if __name__ == "__main__":
    main()
