"""Samples a second with what a run takes from the machine, against one thread a process in float32.

    python benchmarks/both_cores.py MODEL [--rounds N] [--repeats N] [--json FILE]

MODEL: the folder that examples/smollm2/convert.py wrote. Trains examples/smollm2/first_run.toml (`serial`, no
setting but model, data, reward, length and schedule) twice, and alternates the two in one session. The first
round of each run is not counted. Needs 8 GiB, and an otherwise idle machine.

    samples_s    trained samples a second, of both; their ratio
"""

import argparse
import json
from pathlib import Path

import first_run

FIXED = [
    word
    for section in ("engine", "trainer")
    for key, value in (("dtype", "float32"), ("threads", "1"))
    for word in (f"--{section}.{key}", value)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"fixed": [], "chosen": []}
    for _ in range(arguments.repeats):
        for name, words in (("fixed", FIXED), ("chosen", [])):
            length = ["--run.rounds", str(arguments.rounds + 1)]
            rates[name].append(first_run.measure(arguments.model, [*words, *length])["samples_s"])
    ratio = sum(rates["chosen"]) / sum(rates["fixed"])
    print(f"{rates}: {ratio:.2f} x")
    if arguments.json:
        arguments.json.write_text(json.dumps({"samples_s": rates, "ratio": ratio}, indent=2))


if __name__ == "__main__":
    main()
