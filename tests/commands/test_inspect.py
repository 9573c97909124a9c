"""What inspect says of an episode."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.commands.inspect import inspect
from tailrace.config import RunConfig
from tailrace.ledger.base import FORMAT, Cut, GroupRow, LedgerSettings, LifeRow, RunRow, SampleRow
from tailrace.ledger.sqlite import LEDGER_FILE, SqliteStore

TURNS = (
    '[{"num_tokens":3,"finish_reason":"stop","results":["7",null],"observation_ids":[8,9],'
    '"begins_branch":true},'
    '{"num_tokens":5,"finish_reason":"stop"}]'
)


@pytest.mark.parametrize(("in_episode", "ended"), [(True, None), (False, "stop")])
def test_the_turns_of_a_sample_are_shown_and_it_has_ended_with_its_episode(
    in_episode: bool, ended: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = SampleRow(0, 0, 0, "[[1,0,5]]", "stop", "", None, None, None, turns=TURNS, in_episode=in_episode)
    group = GroupRow(0, 1, 0, 1, 1, 0, 0, "[]", None)
    with closing(SqliteStore.create(tmp_path / LEDGER_FILE)) as store:
        store.commit(Cut([RunRow(FORMAT, 1, 0), LifeRow(1, 0, 0, 0, 0, 0), group, row]))
    config = RunConfig.model_construct(ledger=LedgerSettings())
    inspect(config, tmp_path, prompt=0, as_json=True)
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["finish_reason"] == ended
    assert [turn["num_tokens"] for turn in sample["turns"]] == [3, 5]
    inspect(config, tmp_path, prompt=0, as_json=False)
    assert "3 (2, 2)*, 2 (0, 0)" in capsys.readouterr().out
