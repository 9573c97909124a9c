"""The record of real schedules in virtual time agrees with the ledger and with itself."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.record_story import play
from helpers.virtual import MASKED, SCHEDULES_BY_NAME, simulate
from tailrace.extras.view.perfetto import write_perfetto
from tailrace.record.events import Stepped
from tailrace.record.figures import rounds_of
from tailrace.record.run_log import LogWriter
from tailrace.record.summary import Summary


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_the_record_agrees_with_the_ledger(name: str, tmp_path: Path) -> None:
    outcome = simulate(SCHEDULES_BY_NAME[name])
    sink, path = Summary(), tmp_path / "trace.json"
    play(outcome.events, sink, LogWriter(tmp_path / "events.jsonl"))
    write_perfetto(tmp_path / "events.jsonl", path)

    summary, totals = sink.summary(), outcome.totals
    parked = sum(group.num_tokens for group in outcome.run.parked.groups)
    assert summary.groups.trained == totals.groups["trained"]
    assert summary.tokens.trained == totals.trained_tokens
    assert sum(summary.tokens.wasted.values()) == totals.wasted_tokens.total()
    assert summary.tokens.masked == totals.masked_tokens
    assert summary.tokens.generated == totals.num_known_tokens + parked
    assert (totals.masked_tokens > 0) == (name in MASKED)
    tokens = summary.tokens.parked + summary.tokens.drafted
    assert (summary.groups.parked, tokens) == (len(outcome.run.parked), parked)
    assert summary.ages["staleness_max"] == max(
        lag for step in outcome.of(Stepped) for lag in step.lags.publications
    )

    assert [row["round"] for row in rounds_of(sink.rows)] == list(range(outcome.run.round))
    for row in rounds_of(sink.rows):
        both_s = row["round/wait_s"] + row["round/trainer_compute_s"]
        assert both_s == pytest.approx(row["round/main_time_s"])
        assert 0 <= row["round/start_ratio"] <= 1
        assert 0 <= row["round/waiting_ratio"] <= 1

    lanes = defaultdict(list)
    for record in json.loads(path.read_text()):
        if record["ph"] == "X":
            lanes[record["pid"], record["tid"]].append((record["ts"], record["ts"] + record["dur"]))
    for slices in lanes.values():
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(sorted(slices)))
