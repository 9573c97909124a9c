"""Print the held-out reward of a run over its rounds, and three held-out answers before and after.

python examples/smollm2/before_and_after.py runs/real
"""

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, ANSWERS = 60, 3


def evaluations(run: Path) -> dict[int, list[dict[str, Any]]]:
    """The held-out samples of each evaluation, by its round."""
    files = sorted((run / "samples" / "eval").glob("round_*.jsonl"))
    if not files:
        sys.exit(f"{run} has no evaluation; set run.eval_every")
    return {
        int(f.stem[6:]): [json.loads(line) for line in f.read_text(encoding="utf-8").splitlines()]
        for f in files
    }


def main(run: Path) -> None:
    found = evaluations(run)
    for row in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if (reward := row.get("eval/reward")) is not None:
            print(f"round {row['round']:3}  {reward:.3f} {'█' * int(WIDTH * reward)}")
    first, last = ({each["prompt"]: each for each in found[round]} for round in (min(found), max(found)))
    for prompt in list(first)[:ANSWERS]:
        print(f"\n{prompt!r}")
        for when, each in (("before", first[prompt]), ("after", last[prompt])):
            print(f"  {when:6} (reward {each['reward']:.0f}) {each['text']!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
