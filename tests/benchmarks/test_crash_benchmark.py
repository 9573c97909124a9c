"""The crash benchmark: a live run that loses engines ends by itself, and its audit finds nothing."""

import json
import random
from pathlib import Path

import pytest

import victims
from crash import LOSING, OPTIONS
from tailrace.record.figures import counts_of, family
from tailrace.record.metrics import read_rows
from tailrace.record.timeline import RunTimelines
from victims import Found, Victim, regenerated_tokens


def test_a_run_that_loses_engines_ends_with_nothing_lost_and_nothing_regenerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(victims, "ROUNDS_PER_KILL", 2)
    monkeypatch.setattr(victims, "LAST_ROUNDS", 2)
    options = OPTIONS | {
        "engine.replicas": "2",
        "run.eval_every": "0",
        "record.sinks": json.dumps([f"{victims.__file__}:requests_sink"]),
    }
    victim = Victim("tailrace", LOSING["tailrace"], tmp_path, options)
    victim.lose_engines(kills=1, kind="native", chance=random.Random(0))
    assert victim.audit() == Found(tokens_unaccounted=0, trained_twice=0, lost=0)
    assert regenerated_tokens(victim.requests()) == 0
    counts = counts_of(read_rows(victim.folder / "metrics.jsonl"))
    assert sum(family(counts, "engines/died/").values()) == 1
    timelines = RunTimelines(victim.folder / "events.jsonl")
    timelines.update()
    dead = [each for process in timelines.all for each in process.states if each.state == "dead"]
    assert [each.why for each in dead] == ["signal SIGKILL"]


def test_tokens_are_regenerated_if_a_request_begins_before_the_last_token_of_its_sample() -> None:
    def start(sample: str, tokens: int) -> dict[str, object]:
        return {"sample": sample, "tokens": tokens}

    def end(sample: str, tokens: int, outcome: str) -> dict[str, object]:
        return start(sample, tokens) | {"outcome": outcome}

    evicted = [start("0.0/0", 0), end("0.0/0", 5, "evicted")]
    assert regenerated_tokens([*evicted, start("0.0/0", 5), end("0.0/0", 9, "stop")]) == 0
    assert regenerated_tokens([*evicted, start("0.0/0", 3)]) == 2
    assert regenerated_tokens([*evicted, start("0.1/0", 0)]) == 0  # restarted as another sample
    assert regenerated_tokens([start("0.0/0", 0), end("0.0/0", 9, "stop"), start("0.0/0", 9)]) == 9
