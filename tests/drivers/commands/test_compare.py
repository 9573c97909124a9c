"""A comparison in virtual time, its trials, their order, and the workers that candidates share."""

import json
import shutil
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from helpers.small_run import EXAMPLES, write_small_run
from tailrace import clock
from tailrace.cli import main
from tailrace.config import load_config
from tailrace.drivers.assembly.folder import RunFolder, recorder_of
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.drivers.assembly.trials import BoundRun, run_trial
from tailrace.drivers.commands.compare import LAG_COSTS, Comparison, in_turn
from tailrace.drivers.commands.compare_runs import figures_of, verdict
from tailrace.drivers.commands.intervals import recorded_estimate
from tailrace.drivers.commands.tables import print_table
from tailrace.errors import ConfigError, RewardBroken, RewardFailed
from tailrace.extras.view.run import open_runs
from tailrace.record.events import Row
from tailrace.record.figures import BIASES, TRIAL_FIGURES, steps_of
from tailrace.record.metrics import read_rows
from tailrace.record.summary import Summary
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import SimSettings
from tailrace.types import Sample


def trial(main_s: float, *, samples: int = 1000, **figures: float) -> Row:
    given = {name: 0.5 for name, figure in TRIAL_FIGURES.items() if figure.total and name not in BIASES} | {
        "bound_s": 0.0
    }
    given |= {"main_time_s": main_s, "main_s_per_1000_samples": 1000 * main_s / samples}
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


@pytest.mark.parametrize("cell", ["8.00 s [7.00 - 9.00]", "-37.5%"])
def test_the_table_has_medians_with_their_range_and_the_gain_over_serial(cell: str) -> None:
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
    assert serial.keys() >= KEYS and numbers.keys() == {"schedules", "bound_s", "verdict"}
    assert serial["reward"] == rolloutpipe["reward"]
    assert serial["trainer_compute_s"] == pytest.approx(rolloutpipe["trainer_compute_s"])
    assert numbers["bound_s"] <= rolloutpipe["main_time_s"] < serial["main_time_s"]
    first, second = serial["laps"]
    assert first["main_time_s"] != second["main_time_s"], "each repetition has a seed of its own"
    assert {path.name for path in (tmp_path / "race").iterdir()} >= {"compare.json", "serial"}
    shown = open_runs([tmp_path / "race"])
    assert [run.name for run in shown] == ["rolloutpipe", "serial"]
    for run in shown:
        figures, record = run.figures(), run.record()
        assert (figures["state"]["kind"], figures["defects"], record["defects"]) == ("finished", [], [])
        assert figures["x"]["step"] and record["rounds"]


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
    own = (
        "tailrace: groups_in_flight = 4, staleness = 1, for equal samples and steps; "
        "[schedules.tailrace] sets"
    )
    assert f"tailrace: {own} others" in said
    april = (
        "tailrace: april: groups_per_round = 2, for equal samples and steps; [schedules.april] sets others"
    )
    assert april in said and not any(line.startswith("tailrace: serial:") for line in said)
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


def candidate(folder: Path, **overrides: str) -> BoundRun:
    config = write_small_run(folder)
    return BoundRun(
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

    async def trial_of(candidate: BoundRun) -> None:
        parts = replace(simulated_parts(SimSettings(), 0), rewards=DeadEndpoint())
        await run_trial(candidate, parts, recorder_of(None, Summary()), rounds=2)

    size = candidate(tmp_path).config.run.group_size
    for overrides, limit in (({}, 2 * size), ({"reward__max_failures": "5"}, 5)):
        with pytest.raises(RewardBroken, match=f"the last {limit} samples .* unreachable"):
            clock.run(trial_of(candidate(tmp_path, **overrides)), virtual=True)


def rates(*samples_per_s: float, lag: float = 0.0, most: float = 0.0, length: float = 100.0) -> list[Row]:
    figures = {"lag_mean": lag, "lag_max": most, "length_mean": length}
    return [trial(1.0, samples_per_s=each, **figures) for each in samples_per_s]


OLD = "optimizer steps old in the mean"


@pytest.mark.parametrize(
    ("trials", "said"),
    [
        (
            {"serial": rates(10.0, 8.0), "pipelinerl": rates(15.0, 16.0, lag=7.5, most=30.0)},
            "pipelinerl trains 1.75 times as many samples a second as serial (1.50 to 2.00 over 2 trials): "
            f"15.5 samples/s. A token of pipelinerl is 7.5 {OLD}, 30 at most; 4,096 sums at such a lag had "
            "8 to 13% less reward.",
        ),
        (
            {"serial": rates(10.0, 8.0), "rolloutpipe": rates(9.9, 8.8, lag=3.0, most=3.0)},
            "rolloutpipe and serial cannot be told apart: 1.04 times (0.99 to 1.10 over 2 trials). A "
            "token of "
            f"rolloutpipe is 3.0 {OLD}, 3 at most; 4,096 sums at such a lag had 1 to 8% less reward.",
        ),
        (
            {"serial": rates(4.0), "dora": rates(5.0, lag=40.0, most=50.0)},
            "dora trains 1.25 times as many samples a second as serial: 5 samples/s; it was one trial, "
            "so its "
            f"spread is not known. A token of dora is 40.0 {OLD}, 50 at most; 4,096 sums at such a lag had "
            "an unmeasured reward.",
        ),
        (
            {"serial": rates(4.0, 4.0), "a": rates(6.0, 6.0, length=40.0), "c": rates(6.1, 5.9)},
            "a trains 1.50 times as many samples a second as serial (1.50 to 1.50 over 2 trials): 6 "
            "samples/s; "
            "nor can a be told from c. Its samples are shorter (40 tokens against 100): compare over "
            "more rounds. "
            f"A token of a is 0.0 {OLD}, 0 at most.",
        ),
        (
            {"serial": rates(4.0), "seer": rates(4.001)},
            "seer and serial train equally many samples a second: 4 samples/s; it was one trial, so its "
            f"spread is not known. A token of seer is 0.0 {OLD}, 0 at most.",
        ),
        ({"serial": rates(4.0)}, "serial alone: 4 samples/s; name another one to compare it with"),
    ],
)
def test_the_first_sentence_says_who_wins_by_how_much_and_at_which_lag(
    trials: dict[str, list[Row]], said: str
) -> None:
    assert Comparison(trials).verdict() == said


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ((0.5, 0.6), " b has the highest mean reward, 0.550; a 0.350."),
        ((0.4, 0.3), " a and b have the same mean reward, 0.350."),
        ((0.3, 0.6), " b has the highest mean reward, 0.450; a 0.350, which may be chance."),
    ],
)
def test_a_live_comparison_says_who_learns_more(rewards: tuple[float, float], said: str) -> None:
    trials = {"a": [trial(1.0, reward=0.3), trial(1.0, reward=0.4)]}
    trials |= {"b": [trial(1.0, reward=each) for each in rewards]}
    assert Comparison(trials, learns=True).verdict().endswith(said)
    assert "mean reward" not in Comparison(trials).verdict()


def test_what_a_lag_costs_is_what_the_study_measured() -> None:
    """Mean reward of 4,096 samples, less that without lag, as a share of it."""
    page = (Path(__file__).parents[3] / "benchmarks" / "results" / "learning.md").read_text()
    table = page.partition("\n## lagcurve\n")[2].partition("| schedule | less |")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    means = {float(row[11].split()[0]): float(row[7].split()[0]) for row in rows}
    without = means.pop(0.0)
    assert len(means) == 14
    by_cost: dict[str, list[float]] = {}
    for lag, mean in means.items():
        cost = next(cost for most, cost in LAG_COSTS.items() if lag <= most)
        by_cost.setdefault(cost, []).append(1 - mean / without)
    measured = [f"{100 * min(found):.0f} to {max(found):.0%} less reward" for found in by_cost.values()]
    assert sorted(measured) == sorted(LAG_COSTS.values()) == sorted(by_cost)


def trained_in(folder: Path) -> tuple[int, int]:
    """Optimizer steps, and trained samples."""
    rows = steps_of(read_rows(folder / "metrics.jsonl"))
    return len(rows), int(sum(row["samples/trained"] for row in rows))


def test_every_schedule_makes_as_many_steps_on_as_many_samples(tmp_path: Path) -> None:
    path = tmp_path / "sim.toml"
    path.write_text(SIMULATED.replace("rounds = 1", "rounds = 3"))
    names = ["serial", "april", "tailrace", "conventional", "pipelinerl", "periodic_asynchrony"]
    words = ["--schedules", ",".join(names), "--repeats", "1", "--output-dir", str(tmp_path / "race")]
    assert main(["compare", str(path), "--virtual", *words]) == 0
    assert {name: trained_in(tmp_path / "race" / name) for name in names} == dict.fromkeys(names, (12, 96))


def test_values_of_settings_are_raced_under_each_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run with the faster trainer is the faster one."""
    path, result = tmp_path / "sim.toml", tmp_path / "race.json"
    path.write_text(SIMULATED)
    words = ["--vary", "sim.trainer.tokens_per_s=100,1e6", "--repeats", "2", "--json", str(result)]
    assert main(["compare", str(path), "--virtual", *words]) == 0
    numbers = json.loads(result.read_text())
    assert list(numbers["schedules"]) == ["tokens_per_s=100", "tokens_per_s=1e6"]
    assert numbers["verdict"].startswith("tokens_per_s=1e6 trains ")
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == numbers["verdict"], "before the table"
    assert "virtual time does not see" not in err
    unseen = ["--vary", "trainer.learning_rate=1e-6,1e-5", "--repeats", "1"]
    assert main(["compare", str(path), "--virtual", *unseen]) == 0
    said = "virtual time does not see each value of trainer.learning_rate: some candidates are equal"
    assert said in capsys.readouterr().err
    more = ["--vary", "run.seed=1,2", "--schedules", "serial,rolloutpipe"]
    assert main(["compare", str(path), "--virtual", *words, *more]) == 0
    assert len(json.loads(result.read_text())["schedules"]) == 8
    for wrong in ("staleness=1,2", "schedule.staleness", "schedule.staleness="):
        assert main(["compare", str(path), "--virtual", "--vary", wrong]) == 2
        assert "write section.key=A,B" in capsys.readouterr().err


def test_the_date_of_all_compared_runs_is_chosen_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(EXAMPLES / "quickstart" / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ strftime_now('%d') }}")
    checked = ConfigError("compare", "", "the configs were checked", "go on")
    monkeypatch.setattr("tailrace.drivers.commands.compare.compare_live", Mock(side_effect=checked))
    words = ["--schedules", "serial,rolloutpipe", "--vary", "run.seed=1,2", "--model.path", str(model)]
    assert main(["compare", str(write_small_run(tmp_path)), *words]) == 2
    assert capsys.readouterr().err.count("the chat template can ask for the date") == 1


def test_a_terminal_of_forty_columns_shows_the_whole_comparison() -> None:
    out = StringIO()
    console = Console(file=out, width=40, force_terminal=True, color_system=None, soft_wrap=True)
    console.print(RESULTS.verdict(), soft_wrap=False)
    print_table(console, RESULTS.table("comparison"))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert "serial and rolloutpipe cannot be told" in " ".join(lines).replace("  ", " ")


def run_row(**figures: float) -> Row:
    return {"reward": 0.5, "step_s": 2.0} | figures


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (
            {
                "a": run_row(held_out=0.2, low=0.1, high=0.3),
                "b": run_row(held_out=0.8, low=0.7, high=0.9, step_s=3.0),
            },
            "b has the higher held-out reward: 0.800, a 0.200. A step of a took the least time, 2.00 "
            "s; the "
            "most 1.50 times that.",
        ),
        (
            {
                "a": run_row(held_out=0.79, low=0.7, high=0.852),
                "b": run_row(held_out=0.8, low=0.722, high=0.9),
            },
            "b has the higher held-out reward: 0.800, a 0.790, which may be chance: their 95% "
            "intervals go from "
            "0.722 and to 0.852. A step took equally long, 2.00 s.",
        ),
        (
            {"a": run_row(held_out=0.2), "b": run_row(held_out=0.8, low=0.7, high=0.9)},
            "b has the higher held-out reward: 0.800, a 0.200, whose spread is not known. A step took "
            "equally long, 2.00 s.",
        ),
        (
            {"a": run_row(reward=0.25), "b": run_row(held_out=0.8)},
            "b has the higher reward, last round: 0.500, a 0.250, whose spread is not known. A step took "
            "equally long, 2.00 s.",
        ),
        (
            {"a": run_row(held_out=0.8), "b": run_row(held_out=0.8002)},
            "b and a have the same held-out reward: 0.800. A step took equally long, 2.00 s.",
        ),
        (
            {"a": run_row(), "b": run_row(step_s=3.0)},
            "a and b have the same reward, last round: 0.500. A step of a took the "
            "least time, 2.00 s; the most 1.50 times that.",
        ),
    ],
)
def test_finished_runs_are_told_apart_by_held_out_reward_then_by_reward(
    runs: dict[str, Row], said: str
) -> None:
    assert verdict(runs) == said


def test_a_finished_run_has_the_interval_of_its_last_evaluation(trained: Path) -> None:
    folder = RunFolder(trained)
    figures, estimate = figures_of(folder), recorded_estimate(folder.samples, 1)
    assert estimate and estimate.mean == pytest.approx(figures["held_out"])
    assert (figures["low"], figures["high"]) == estimate.interval


def test_finished_runs_of_one_name_are_compared_with_the_keys_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "sim.toml", tmp_path / "runs.json"
    path.write_text(SIMULATED)
    folders = [tmp_path / name / "run" for name in ("one", "other")]
    for folder, rate in zip(folders, ("1e4", "1e2"), strict=True):
        words = ["--output-dir", str(folder), "--sim.trainer.tokens_per_s", rate]
        assert main(["simulate", str(path), *words]) == 0
    capsys.readouterr()
    assert main(["compare", *map(str, folders), "--json", str(result)]) == 0
    numbers, out = json.loads(result.read_text()), capsys.readouterr().out
    assert list(numbers["runs"]) == [str(folder) for folder in folders]
    (keys,) = (line for line in out.splitlines() if "tokens_per_s" in line)
    assert [cell.strip() for cell in keys.split("│")[1:-1]] == [
        "sim.trainer.tokens_per_s",
        "10000.0",
        "100.0",
    ]
    assert out.splitlines()[0] == numbers["verdict"]
    assert f"A step of {folders[0]} took the least time" in out
    own = Summary(earlier=read_rows(folders[0] / "metrics.jsonl"))
    assert numbers["runs"][str(folders[0])]["samples_per_s"] == own.figures()["samples_per_s"]
    assert main(["compare", str(folders[0])]) == 2
    assert main(["compare", str(folders[0]), str(path)]) == 2
    assert main(["compare", str(tmp_path), str(folders[0])]) == 2
    said = capsys.readouterr().err.splitlines()
    two = "name two or more output directories of runs with optimizer steps"
    assert [line.rpartition("; ")[2] for line in said] == [two, "name one config", two]
