"""RollPacker's schedule live on two cores, with three placements.

    python benchmarks/placement.py [--rounds 8] [--repeats 2] [--json F]

    disaggregated   an engine on core 0, the trainer on core 1
    colocated       an engine and a replica of the trainer on each core: both generate, then both train
    elastic         the same processes; in mid-round engine-1 gives its core to replica 0

The quickstart task, 64 groups of 8 a round. The placements take turns. The first two rounds are not counted.
Each run is audited as in crash.py: by the engines' own counts, by samples/, and by a sink that writes every
request down.

    round_s              seconds of a round, median
    samples_per_s        trained samples, over the counted rounds
    migrated             requests that an engine gave back in mid-round
    regenerated          tokens that had arrived and were generated again for the same sample
    tokens_unaccounted, trained_twice, lost   as in crash.py
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from statistics import median

from tailrace.record.figures import rounds_of
from tailrace.record.metrics import read_rows
from victims import Victim, regenerated_tokens

GROUPS, WARM_UP_ROUNDS = 64, 2
BOTH = {
    "engine.replicas": "2",
    "trainer.replicas": "2",
    "placement.engines": "[[0], [1]]",
    "placement.trainer": "[[1], [0]]",
}
PLACEMENTS: dict[str, dict[str, str]] = {
    "disaggregated": {"placement.engines": "[[0]]", "placement.trainer": "[[1]]"},
    "colocated": {"placement.kind": "colocated", **BOTH},
    "elastic": {"placement.kind": "elastic", **BOTH},
}
OPTIONS = {
    "run.eval_every": "0",
    "run.checkpoint_every": "0",
    "record.sinks": json.dumps([f"{Path(__file__).with_name('victims.py')}:requests_sink"]),
}


def one_run(kind: str, rounds: int, seed: int, folder: Path) -> dict[str, float]:
    """One live run from the quickstart's weights to its last round, and its audit."""
    folder.mkdir()
    options = OPTIONS | PLACEMENTS[kind] | {"run.seed": str(seed)}
    run = Victim("rollpacker", {"groups_per_round": GROUPS}, folder, options)
    run.live(rounds)
    rows = rounds_of(read_rows(run.folder / "metrics.jsonl"))
    counted, requests, found = rows[WARM_UP_ROUNDS:], run.requests(), run.audit()
    return {
        "round_s": median(row["round/time_s"] for row in counted),
        "samples_per_s": sum(row["round/num_samples"] for row in counted)
        / sum(row["round/time_s"] for row in counted),
        "migrated": sum(each.get("outcome") == "evicted" for each in requests),
        "regenerated": regenerated_tokens(requests),
        "tokens_unaccounted": abs(found.tokens_unaccounted),
        "trained_twice": found.trained_twice,
        "lost": found.lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in PLACEMENTS}
    with tempfile.TemporaryDirectory() as name:
        for repeat in range(arguments.repeats):
            for kind in random.Random(repeat).sample(list(PLACEMENTS), len(PLACEMENTS)):
                figures = one_run(kind, arguments.rounds, repeat, Path(name) / f"{kind}-{repeat}")
                runs[kind].append(figures)
                print(kind, {key: round(value, 2) for key, value in figures.items()}, flush=True)
    totals = {
        kind: {
            key: median(values) if key in ("round_s", "samples_per_s") else sum(values)
            for key in of_kind[0]
            for values in [[run[key] for run in of_kind]]
        }
        for kind, of_kind in runs.items()
    }
    for kind, figures in totals.items():
        print(f"{kind:<15}" + "  ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(totals, indent=1) + "\n")


if __name__ == "__main__":
    main()
