"""The audit of runs of episodes that are killed finds what is done twice."""

import json
from pathlib import Path

import pytest

from crash import KILLED
from episodes import CALLS, CALLS_VARIABLE, EpisodeVictim
from victims import REQUESTS


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
        victim._audit_life()
        return victim.turns_regenerated, victim.calls_repeated, victim.calls_lost

    assert life([["0.0/0", 0, 0], ["0.0/1", 0, 0]], [("0.0/0", 0), ("0.0/0", 10)]) == (0, 0, 0)
    victim._recorded, victim._ended = {("0.0/0", 0, 0)}, {"0.0/0": 10}  # as read from a ledger
    assert life([["0.0/1", 0, 0]], [("0.0/0", 10), ("0.0/1", 0)]) == (0, 0, 1)
    assert life([["0.0/0", 0, 0]], [("0.0/0", 9)]) == (1, 1, 1)
