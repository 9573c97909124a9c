"""A comparison in virtual time, its trials, their order, and the workers that candidates share."""

import json
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helpers.small_run import write_small_run
from tailrace import clock
from tailrace.cli import main
from tailrace.config import load_config
from tailrace.drivers.assembly.folder import recorder_of
from tailrace.drivers.assembly.running import ComparedSchedule, run_trial
from tailrace.drivers.assembly.simulation import simulated_parts
from tailrace.drivers.commands.compare import Comparison, in_turn
from tailrace.errors import RewardBroken, RewardFailed
from tailrace.extras.view.run import open_runs
from tailrace.record.figures import BIASES, TRIAL_FIGURES, Row
from tailrace.record.summary import Summary
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import SimSettings
from tailrace.types import Sample


def trial(main_s: float, *, samples: int = 1000, **figures: float) -> Row:
    given = {name: 0.5 for name, figure in TRIAL_FIGURES.items() if figure.total and name not in BIASES} | {
        "bound_s": 0.0
    }
    given |= {
        "main_time_s": main_s,
        "main_s_per_1000_samples": 1000 * main_s / samples,
    }
    return given | figures


RESULTS = Comparison(
    {
        "serial": [trial(9.0, bound_s=4.0), trial(8.0, bound_s=4.5), trial(7.0, bound_s=5.0)],
        "rolloutpipe": [trial(6.0), trial(4.9), trial(5.0)],
    }
)


def printed(comparison: Comparison) -> str:
    out = StringIO()
    Console(file=out, width=120).print(comparison.table("comparison"))
    return out.getvalue()


def test_the_bound_is_that_of_serial_s_rounds() -> None:
    assert RESULTS.bound_s == 4.5


def test_without_serial_there_is_no_bound() -> None:
    assert Comparison({"rolloutpipe": [trial(5.0)]}).bound_s is None


def test_numbers_are_medians_with_their_spread() -> None:
    numbers = RESULTS.numbers()
    assert numbers["bound_s"] == 4.5
    schedules: Any = numbers["schedules"]
    assert list(schedules) == ["serial", "rolloutpipe"]
    assert schedules["serial"]["main_time_s"] == 8.0
    assert schedules["serial"]["main_time_s_spread"] == [7.0, 9.0]


def test_lags_are_nested_and_a_figure_that_no_trial_has_is_null() -> None:
    trials = [
        trial(9.0, lag_mean=2.0, lag_max=3.0, staleness_max=1.0),
        trial(8.0, lag_mean=1.0, length_bias=0.25),
    ]
    schedules: Any = Comparison({"april": trials}).numbers()["schedules"]
    april = schedules["april"]
    assert april["lag"] == {"mean": 1.5, "max": 1.75}
    assert april["staleness"] == {"mean": 0.5, "max": 0.75}
    assert (april["length_bias"], april["time_to_reward_s"]) == (0.25, None)
    assert [each["main_time_s"] for each in april["laps"]] == [9.0, 8.0]


@pytest.mark.parametrize("cell", ["8.00 s [7.00 - 9.00]", "-37.5%", "86%", "+11.1%"])
def test_the_table_says_how_much_of_the_gap_is_closed(cell: str) -> None:
    assert cell in printed(RESULTS)


def test_schedules_are_compared_per_sample() -> None:
    """Half the time a round is no gain where a round has half the samples."""
    table = printed(Comparison({"serial": [trial(8.0)], "tailbatch": [trial(4.0, samples=500)]}))
    (line,) = (line for line in table.splitlines() if "against serial" in line)
    assert line.count("+0.0%") == 2


SIMULATED = """
[run]
rounds = 1
group_size = 4
[schedule]
name = "serial"
groups_per_round = 8
groups_per_step = 2
"""
KEYS = {
    "main_time_s", "waiting_ratio", "first_dispatch_s", "trainer_compute_s", "rollout_time_s", "reward",
    "samples_per_s", "tokens_per_s", "rollout_tokens_per_s", "staleness", "carried_tokens", "carried_samples",
    "waste_share", "deferrals_max", "mismatch_kl", "ess", "length_bias", "time_to_reward_s",
    "main_time_s_spread", "laps",
}  # fmt: skip
"""Scripts read these."""


def test_a_config_without_a_model_is_raced_in_virtual_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "sim.toml", tmp_path / "race.json"
    path.write_text(SIMULATED)
    words = ["compare", str(path), "--repeats", "2", "--json", str(result)]
    assert main([*words, "--output-dir", str(tmp_path / "race")]) == 0
    assert "the config has no [model]: the comparison is in virtual time" in capsys.readouterr().out
    numbers = json.loads(result.read_text())
    serial, rolloutpipe = numbers["schedules"]["serial"], numbers["schedules"]["rolloutpipe"]
    assert serial.keys() >= KEYS and numbers.keys() == {"schedules", "bound_s"}
    assert serial["reward"] == rolloutpipe["reward"]
    assert serial["trainer_compute_s"] == pytest.approx(rolloutpipe["trainer_compute_s"])
    assert numbers["bound_s"] <= rolloutpipe["main_time_s"] < serial["main_time_s"]
    first, second = serial["laps"]
    assert first["main_time_s"] != second["main_time_s"], "each repetition has a seed of its own"
    assert {path.name for path in (tmp_path / "race").iterdir()} >= {"compare.json", "serial"}
    shown = open_runs([tmp_path / "race"])
    assert [run.name for run in shown] == ["rolloutpipe", "serial"]
    for run in shown:
        run.update()
        payload = run.payload()
        assert (payload["state"]["kind"], payload["defects"]) == ("finished", [])
        assert payload["rows"] and payload["requests"]["sample"]


def test_a_serial_that_reaches_its_bound_leaves_no_gap() -> None:
    table = printed(Comparison({"serial": [trial(8.0, bound_s=8.0)], "april": [trial(6.0, bound_s=6.0)]}))
    assert table.count("gap closed") == 1, "only the caption has the words"


def test_a_parameter_that_none_of_the_compared_schedules_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sim.toml"
    path.write_text(SIMULATED + "groups_launched = 9\n")
    assert main(["compare", str(path), "--virtual", "--repeats", "1"]) == 2
    message = "schedule.groups_launched = 9: the schedule has no such parameter; it has: "
    assert message in capsys.readouterr().err


def test_a_schedule_gets_sensible_values_for_keys_of_its_own_and_they_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every schedule can be compared with a config that gives the groups of a round and of a step."""
    path, result = tmp_path / "sim.toml", tmp_path / "race.json"
    path.write_text("[sim.engines]\nversions = 2\n" + SIMULATED + "[schedules.april]\ngroups_launched = 9\n")
    words = ["--schedules", ",".join(SCHEDULES), "--repeats", "1", "--json", str(result)]
    assert main(["compare", str(path), "--virtual", *words]) == 0
    said = capsys.readouterr().err.splitlines()
    own = "tailrace: groups_in_flight = 4, staleness = 1, as the config has none; [schedules.tailrace] sets"
    assert f"tailrace: {own} others" in said
    assert not any(line.startswith(("tailrace: serial:", "tailrace: april:")) for line in said)
    assert list(json.loads(result.read_text())["schedules"]) == list(SCHEDULES)


def test_rewards_that_always_fail_end_a_race_in_virtual_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sim.toml"
    path.write_text(SIMULATED + "[sim.rewards]\nfailing = 1.0\n[reward]\nmax_failures = 30\n")
    assert main(["compare", str(path), "--virtual", "--repeats", "1"]) == 1
    said = "RewardBroken: the last 30 samples in sequence could not be rewarded (reward.max_failures)"
    assert said in capsys.readouterr().err


SERIAL = partial(SCHEDULES["serial"], groups_per_round=2, groups_per_step=1)


def candidate(folder: Path, **overrides: str) -> ComparedSchedule:
    config = write_small_run(folder)
    return ComparedSchedule(
        load_config(config, {key.replace("__", "."): value for key, value in overrides.items()}), SERIAL
    )


def test_workers_depend_on_the_settings_they_are_made_from_and_on_nothing_else(tmp_path: Path) -> None:
    plain = candidate(tmp_path)
    assert candidate(tmp_path, run__rounds="9", schedule__groups_per_step="1").setup == plain.setup
    assert candidate(tmp_path, engine__replicas="3").setup != plain.setup
    assert candidate(tmp_path, trainer__threads="2").setup != plain.setup


def test_every_schedule_goes_first_in_turn(tmp_path: Path) -> None:
    candidates = dict.fromkeys(("a", "b", "c"), candidate(tmp_path))
    assert [in_turn(candidates, repeat) for repeat in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_candidates_with_the_same_workers_run_side_by_side(tmp_path: Path) -> None:
    one, other = candidate(tmp_path), candidate(tmp_path, engine__replicas="3")
    candidates = {"a": one, "x": other, "b": one, "y": other}
    assert in_turn(candidates, 0) == ["a", "b", "x", "y"]
    assert in_turn(candidates, 1) == ["x", "y", "b", "a"]


class DeadEndpoint:
    async def score(self, sample: Sample) -> float:
        raise RewardFailed("unreachable")


def test_rewards_that_always_fail_end_a_trial_of_a_comparison_or_of_a_diagnosis(tmp_path: Path) -> None:
    """After as many failures as a round has samples, unless the config names another number."""

    async def trial_of(candidate: ComparedSchedule) -> None:
        parts = replace(simulated_parts(SimSettings(), 0), rewards=DeadEndpoint())
        await run_trial(candidate, parts, recorder_of(None, Summary()), rounds=2)

    size = candidate(tmp_path).config.run.group_size
    for overrides, limit in (({}, 2 * size), ({"reward__max_failures": "5"}, 5)):
        with pytest.raises(RewardBroken, match=f"the last {limit} samples .* unreachable"):
            clock.run(trial_of(candidate(tmp_path, **overrides)), virtual=True)
