"""The crash benchmark: a live run that loses engines ends by itself, and its audit finds nothing."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

import crash
from crash import (
    ADAPTERS,
    ASLEEP,
    CALLS,
    CALLS_VARIABLE,
    ENGINES,
    HEALTHY,
    KILLED,
    LOSING,
    OPTIONS,
    PINNED,
    REQUESTS,
    WITH_REQUESTS,
    EpisodeVictim,
    Found,
    FrozenVictim,
    Victim,
    found_of_probes,
    regenerated_tokens,
)
from tailrace.record.figures import counts_of, family
from tailrace.record.metrics import read_rows
from tailrace.record.timeline import RunTimelines


def test_a_run_that_loses_engines_ends_with_nothing_lost_and_nothing_regenerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash, "ROUNDS_PER_KILL", 2)
    monkeypatch.setattr(crash, "LAST_ROUNDS", 2)
    options = OPTIONS | WITH_REQUESTS | {"engine.replicas": "2", "run.eval_every": "0"}
    victim = Victim("tailrace", LOSING["tailrace"], tmp_path, options)
    victim.lose(kills=1, kind="native", chance=random.Random(0), roles=ENGINES)
    assert victim.audit() == Found(tokens_unaccounted=0, trained_twice=0, lost=0)
    assert regenerated_tokens(victim.requests()) == 0
    counts = counts_of(read_rows(victim.folder / "metrics.jsonl"))
    assert sum(family(counts, "engines/died/").values()) == 1
    timelines = RunTimelines(victim.folder / "events.jsonl")
    timelines.update()
    dead = [each for process in timelines.all for each in process.states if each.state == "dead"]
    assert ["signal SIGKILL" in each.why for each in dead] == [True]


def test_a_run_that_loses_its_trainer_and_an_engine_at_once_goes_on_with_versions_that_were_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash, "ROUNDS_PER_KILL", 2)
    options = OPTIONS | WITH_REQUESTS | ADAPTERS | {"run.eval_every": "0", "trainer.restarts": "1"}
    victim = Victim("laminar", PINNED["laminar"], tmp_path, options)
    victim.lose(kills=1, kind="native", chance=random.Random(0), roles=[["trainer", "engine"]])
    assert victim.audit() == Found(tokens_unaccounted=0, trained_twice=0, lost=0)
    found = found_of_probes(victim)
    assert found["probes"] > 0 and +found == {"restarts": 1, "probes": found["probes"]}


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


PLACED = {"engine.replicas": "2", "trainer.replicas": "2", "placement.kind": "elastic"}
PLACED |= {"placement.engines": "[[0], [1]]", "placement.trainer": "[[1], [0]]"}


def test_an_elastic_run_moves_requests_in_mid_round_and_regenerates_nothing(tmp_path: Path) -> None:
    options = WITH_REQUESTS | PLACED | ASLEEP | {"run.eval_every": "0", "run.checkpoint_every": "0"}
    victim = Victim("rollpacker", {"groups_per_round": 24}, tmp_path, options)
    victim.live(rounds=3)  # a round may end before its device changes hands
    assert any(each.get("outcome") == "evicted" for each in victim.requests())
    assert regenerated_tokens(victim.requests()) == 0
    assert victim.audit() == Found(tokens_unaccounted=0, trained_twice=0, lost=0)


def test_kills_of_a_run_whose_trainer_sleeps_on_the_disk_lose_nothing(tmp_path: Path) -> None:
    """It is resumed, and its checkpoints are begun by a trainer that was woken."""
    options = OPTIONS | WITH_REQUESTS | ASLEEP | {"placement.kind": "colocated"}
    victim = Victim("april", KILLED["april"], tmp_path, options)
    victim.live_and_die(random.Random(1))
    victim.live_to_the_end()
    assert victim.audit() == Found(tokens_unaccounted=0, trained_twice=0, lost=0)


def test_a_run_whose_engine_is_frozen_and_whose_trainer_is_killed_ends_by_name_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = iter(["engine-0", "trainer"])
    monkeypatch.setattr(crash, "chosen", lambda of, *_, **__: named(of, next(roles)))
    victim = FrozenVictim("april", KILLED["april"], tmp_path, OPTIONS | HEALTHY | WITH_REQUESTS)
    words = victim.freeze(random.Random(3))
    assert words.startswith(
        "april: SIGSTOP engine-0, 2.2 s, SIGKILL trainer: ended tailrace: WorkerDied: trainer"
    )
    assert +victim.found == {"ended": 1}
    victim.live_to_the_end()
    assert victim.audit() == Found(tokens_unaccounted=0, trained_twice=0, lost=0)


def named(roles: Mapping[int, str], name: str) -> int:
    return next(pid for pid, role in roles.items() if role == name)


def test_turns_and_calls_that_come_twice_are_counted_by_what_the_ledger_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CALLS_VARIABLE, "")
    victim = EpisodeVictim("april", KILLED["april"], tmp_path, {}, "tools.toml")
    victim.folder.mkdir()

    def life(calls: list[list[object]], starts: list[tuple[str, int]]) -> tuple[int, int, int]:
        with (victim.folder / CALLS).open("a") as file:
            file.writelines(json.dumps(call) + "\n" for call in calls)
        with (victim.folder / REQUESTS).open("a") as file:
            file.writelines(json.dumps({"sample": id, "tokens": tokens}) + "\n" for id, tokens in starts)
        victim._compare()
        return victim.turns_regenerated, victim.calls_repeated, victim.calls_lost

    assert life([["0.0/0", 0, 0], ["0.0/1", 0, 0]], [("0.0/0", 0), ("0.0/0", 10)]) == (0, 0, 0)
    victim._recorded, victim._ended = {("0.0/0", 0, 0)}, {"0.0/0": 10}  # as read from a ledger
    assert life([["0.0/1", 0, 0]], [("0.0/0", 10), ("0.0/1", 0)]) == (0, 0, 1)
    assert life([["0.0/0", 0, 0]], [("0.0/0", 9)]) == (1, 1, 1)
