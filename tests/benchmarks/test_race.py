"""The races of schedules: all of them, with parameters that work; and within a bound on lag."""

import json
import re
from pathlib import Path
from statistics import fmean, median

import pytest

import common
from schedules import RESULTS, first_of, on_raced_clusters, time_of
from tailrace.config import load_config, shared_parameters
from tailrace.drivers.assembly.schedule import resolve
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
    (line, *_) = re.findall(r"^april                           1.*$", capsys.readouterr().out, re.M)
    assert line.endswith("%        -        -"), "rows of an earlier release have no bias meter"


PAGE = RESULTS.parents[1] / "docs" / "why" / "results.md"
CLASSES = {"on-policy": "lag 0", "lag 1": "lag 1", "no bound": "lag inf"}


def row_of(name: str, schedule: str) -> tuple[str, ...]:
    """Median and worst time of a step over the fastest of the class that masks nothing; lag, and waste."""
    of_class = [found[CLASSES[name]] for found in json.loads((RESULTS / "race-0.json").read_text("utf-8"))]
    races = [{each: race[each] for each in race if "masked" not in each} for race in of_class]
    raced = [race for race in races if schedule in race]
    over = [time_of(race[schedule]) / first_of(race, time_of) for race in raced]
    lag, wasted = (fmean(race[schedule][key] for race in raced) for key in ("lag_mean", "waste_share"))
    return f"{median(over):.2f}", f"{max(over):.2f}", f"{lag:.1f}" if lag else "0", f"{wasted:.0%}"


def test_results_md_prints_the_race_of_twenty_set_ups() -> None:
    text = PAGE.read_text(encoding="utf-8")
    cells = re.findall(r"^\| (on-policy|lag 1|no bound) \| `(\w+)`.*? \| (.*) \| simulated \|$", text, re.M)
    printed = {(name, schedule): tuple(rest.split(" | ")) for name, schedule, rest in cells}
    assert len(printed) == 7
    assert printed == {key: row_of(*key) for key in printed}
    assert f"`serial` takes {printed['on-policy', 'serial'][0]} times" in text
    dora, april = (float(printed["lag 1", name][0]) for name in ("dora", "april"))
    assert april == 1.0 and f"`dora` takes {dora:.2f} times the step of `april`" in text
