"""The races of schedules: all of them, with parameters that work; and within a bound on lag."""

import json
from pathlib import Path

import pytest

import common
from schedules import RESULTS, on_raced_clusters
from tailrace.config import load_config
from tailrace.drivers.assembly.schedule import resolve, shared_parameters
from tailrace.schedules import SCHEDULES


def test_every_schedule_races_with_parameters_that_work() -> None:
    config = load_config(common.EXAMPLES.parent / "benchmarks" / "race.toml")
    assert set(config.compare.schedules) == set(SCHEDULES) == set(config.schedules)
    for name in config.compare.schedules:
        resolve(config.model_copy(update={"schedule": shared_parameters(config, name)}))


def test_a_race_refuses_a_schedule_that_is_not_there_and_a_file_of_other_set_ups(tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    with pytest.raises(SystemExit, match="--only nix: there is no such schedule"):
        on_raced_clusters(1, 0, ["april", "nix"], path)
    path.write_text('[{"cluster": "8 x H100"}]', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"race.json: set-up 0 is 8 x H100, not 4 x H200, Qwen3-8B"):
        on_raced_clusters(1, 0, ["april"], path)
    assert path.read_text(encoding="utf-8") == '[{"cluster": "8 x H100"}]'


def test_a_race_goes_on_from_what_its_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "race.json"
    first = json.loads((RESULTS / "race-0.json").read_text(encoding="utf-8"))[0]
    first["lag 3"]["april"] |= {"step_s": 1e6, "token_s": 1e6}  # nothing would measure this
    path.write_text(text := json.dumps([first]), encoding="utf-8")
    on_raced_clusters(1, 0, ["april", "dora"], path)
    assert path.read_text(encoding="utf-8") == text
    assert "april                           1" in capsys.readouterr().out
