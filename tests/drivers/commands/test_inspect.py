"""What inspect says of an episode."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.commands.inspect import inspect
from tailrace.errors import ConfigError
from tailrace.ledger.base import FORMAT, GroupRow, LifeRow, Origin, RunRow, SampleRow, Transaction
from tailrace.ledger.store import LEDGER_FILE, Store
from tailrace.types import Turn

TURNS = [Turn(3, "stop", ["7", None], [8, 9], begins_branch=True), Turn(5, "stop")]


@pytest.mark.parametrize(("in_episode", "ended"), [(True, None), (False, "stop")])
def test_the_turns_of_a_sample_are_shown_and_it_has_ended_with_its_episode(
    in_episode: bool, ended: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = [Origin(1, 0, 5)]
    row = SampleRow(0, 0, 0, spans, "stop", "", None, None, None, turns=TURNS, in_episode=in_episode)
    group = GroupRow(0, 1, 0, 1, 1, 0, 0, [], None)
    with closing(Store.create(tmp_path / LEDGER_FILE)) as store:
        store.commit(Transaction([RunRow(FORMAT, 1, 0), LifeRow(1, 0, 0, 0, 0, 0), group, row]))
    folder = RunFolder(tmp_path)
    folder.config.write_text("run = { rounds = 1, group_size = 2 }\nschedule = { name = 'serial' }\n")
    inspect(tmp_path, group=0, as_json=True, overrides={})
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["finish_reason"] == ended
    assert [turn["num_tokens"] for turn in sample["turns"]] == [3, 5]
    inspect(tmp_path, group=0, overrides={})
    assert "3 (2, 2)*, 2 (0, 0)" in capsys.readouterr().out


def test_the_attempts_of_a_group_are_counted_with_those_of_its_members(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = SampleRow(0, 0, 0, [Origin(1, 0, 5)], None, "", None, None, "version gone", pruned=True)
    again = SampleRow(0, 1, 0, [], None, "", None, None, None)
    group = GroupRow(0, 1, 0, 1, 1, 0, 0, [], None)
    with closing(Store.create(tmp_path / LEDGER_FILE)) as store:
        store.commit(Transaction([RunRow(FORMAT, 1, 0), LifeRow(1, 0, 0, 0, 0, 0), group, gone, again]))
    RunFolder(tmp_path).config.write_text(
        "run = { rounds = 1, group_size = 2 }\nschedule = { name = 'serial' }\n"
    )
    inspect(tmp_path, group=0, as_json=True, overrides={})
    assert json.loads(capsys.readouterr().out)["attempts"] == 2


def test_a_damaged_config_of_a_run_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text("[algorithm]\nklip_high = 0.2\n")
    with pytest.raises(ConfigError) as error:
        folder.read_config()
    assert str(error.value).startswith(f"{folder.config}: ")
    assert "algorithm.klip_high = 0.2: there is no such key; did you mean 'clip_high'?" in str(error.value)
