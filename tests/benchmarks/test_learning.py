"""The comparison of what schedules learn: curves by hand, files that accumulate, settings that are taken."""

import json
from pathlib import Path
from typing import Any

import pytest

import learning_report
from learning import POINTS, curve_of, file_of, head, is_measured, learn, main, result_of
from learning_report import interval, read_all, read_result, samples_to, shown, summary, verdict
from studies import STUDIES, Study
from tailrace.config import load_config
from tailrace.drivers.assembly.schedule import resolve

STEP = {"loss": 0.1, "ess": 0.5, "mismatch_kl": 0.2, "lag/max": 3.0, "lag/mean": 1.5, "time/step": 1.0}
MADE = {"made": {"commit": "abc"}, "machine": {"quiet": False, "others": 0.5}}
IN_FLIGHT = ("pipelinerl", "pipelinerl, 0 verified")
TAILRACE = [name for name, study in STUDIES.items() if study.runner == "tailrace"]


def step(time: float, reward: float, samples: int, tokens: int, **others: float) -> dict[str, float]:
    trained = {"samples/trained": samples, "tokens/trained": tokens}
    return {**STEP, "time": time, "reward": reward, **trained, "tokens/generated": 50.0, **others}


def result(study: str, schedule: str, seed: int, rewards: list[float], **others: Any) -> dict[str, Any]:
    """A file of results whose run has a point for each reward."""
    number = len(rewards)
    curve: dict[str, list[float]] = {"samples": [64.0 * place for place in range(1, number + 1)]}
    curve |= {"generated": [80.0 * place for place in range(1, number + 1)], "reward": rewards}
    curve |= {key: [0.5] * number for key in ("ess", "kl", "lag")}
    curve |= {"lag_max": [3.0] * number, "length": [10.0] * number, "seconds": curve["samples"]}
    tokens = {"generated": 200, "trained": 150, "parked": 0, "wasted": {"ready_overflow": 30, "stale": 20}}
    found = {**head(study, schedule, 64 * number, seed), **MADE, "curve": curve, "tokens": tokens}
    return {**found, "evaluations": [[0, 0.25], [64 * number, 0.75]], **others}


def written(folder: Path, *results: dict[str, Any]) -> Path:
    for each in results:
        path = file_of(folder, each["study"], each["schedule"], each["seed"])
        path.write_text(json.dumps(each), encoding="utf-8")
    return folder


def test_a_curve_has_the_means_of_its_parts_and_the_sums_until_their_ends() -> None:
    rows = [step(1.0, 0.0, 8, 40), {"eval/reward": 0.5}, step(3.0, 1.0, 24, 60, **{"lag/max": 7.0})]
    rows += [step(3.0 + place, 0.5, 32, 64) for place in range(1, 2 * POINTS)]
    curve = curve_of(rows, [0.5, 0.9, 1.5, 3.0, 99.0])
    assert len(curve["samples"]) == POINTS
    assert (curve["samples"][0], curve["samples"][-1]) == (64, 64 * POINTS)
    assert curve["reward"][0] == pytest.approx((24 * 1.0 + 32 * 0.5) / 64)
    assert curve["length"][0] == pytest.approx((40 + 60 + 64) / 64, rel=1e-3)
    assert (curve["lag_max"][0], curve["lag_max"][1]) == (7.0, 3.0)
    assert (curve["generated"][0], curve["generated"][-1]) == (4, 4)
    assert (curve["generated_tokens"][0], curve["seconds"][0]) == (150.0, 3.0)


def test_a_short_run_has_a_point_for_each_step() -> None:
    curve = curve_of([step(1.0, 0.25, 8, 40), step(2.0, 0.75, 8, 80)], [])
    assert (curve["samples"], curve["reward"], curve["length"]) == ([8, 16], [0.25, 0.75], [5.0, 10.0])


def test_the_figures_of_a_run_are_those_of_its_curve() -> None:
    found = summary(result("order", "serial", 0, [0.0, 0.4, 0.6, 1.0]))
    assert found["accuracy"] == 0.75
    assert (found["reward, first quarter"], found["all"]) == (0.0, pytest.approx(0.5))
    assert (found["wasted"], found["generated a trained sample"]) == (0.25, 1.25)
    first = summary(
        result("order", "serial", 0, [0.0, 0.4, 0.6, 1.0], evaluations=[[0, 0.2], [256, 0.9]]), 128
    )
    assert (first["accuracy"], first["all"]) == (0.2, pytest.approx(0.2))
    part = summary(result("order", "serial", 0, [0.0, 0.4, 0.6, 1.0]), 160)  # half of the third point
    assert part["all"] == pytest.approx((64 * 0.4 + 32 * 0.6) / 160)


def test_the_samples_until_a_reward_are_those_of_a_mean_of_512() -> None:
    curve = result("order", "serial", 0, [0.0] * 4 + [1.0] * 12)["curve"]  # points of 64 samples
    assert samples_to(curve, 0.5) == 64 * 8
    assert samples_to(curve, 0.75) == 64 * 10
    assert samples_to(curve, 1.0) == 64 * 12
    assert samples_to(curve, 1.1) is None
    assert samples_to({**curve, "samples": [1024.0 * place for place in range(1, 17)]}, 1.0) == 1024 * 5


def test_an_interval_is_that_of_students_t() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(2.4841, abs=1e-4)
    assert interval([1.0]) == 0.0
    assert shown([0.25, 0.35]) == "0.300 ±0.635"


def test_a_verdict_says_no_more_than_its_interval() -> None:
    assert verdict([0.01, 0.0104], 0.02) == "agrees within 0.02"  # although it excludes zero
    assert [verdict([sign * 0.3, sign * 0.31], 0.02) for sign in (1, -1)] == ["more", "less"]
    assert verdict([-0.1, 0.1], 0.02) == "no difference seen; a loss of up to 1.271 is not excluded"
    assert verdict([0.3], 0.02) == "fewer than two seeds: none"


def compared(page: str) -> list[tuple[str, str, str]]:
    """Each run of the second table of a page, the other one, and their seeds."""
    rows = [line.split("|") for line in page.partition("| schedule | less | seeds |")[2].splitlines()]
    return [(row[1].strip(" `"), row[2].strip(" `"), row[3].strip()) for row in rows if len(row) == 12][1:]


def test_every_run_of_a_study_has_a_verdict_also_when_seeds_are_missing(tmp_path: Path) -> None:
    whole = [result("masked", "tailrace 1 masked", seed, [0.5 + seed / 9]) for seed in range(3)]
    others = [result("lagcurve", "tailrace 1", seed, [0.25]) for seed in (1, 2)]
    others.append(result("masked", "pipelinerl, 8 masked", 5, [0.25]))
    page = learning_report.text(read_all(written(tmp_path, *whole, *others)))
    rows = [("tailrace 1 masked", "tailrace 1", "2"), ("pipelinerl, 8 masked", "tailrace 1", "0")]
    assert compared(page.partition("## masked")[2]) == rows
    regime = "64 samples in 4 optimizer steps at a learning rate of 2e-4"
    assert f"{regime}; untuned; margin 0.02 chosen after the runs" in page


def test_runs_are_compared_at_equal_settings_and_at_equal_mean_lag(tmp_path: Path) -> None:
    lags = {("lag", "G=16"): 7.5, ("lag", "pipelinerl"): 7.8, ("diverge", "G=1 4e-4"): 0.0}
    runs = [result(*name, 0, [0.5]) for name in [*lags, ("diverge", "G=64 4e-4")]]
    for run, lag in zip(runs, [*lags.values(), 31.0], strict=True):
        run["curve"]["lag"] = [lag]
    page = learning_report.text(read_all(written(tmp_path, *runs)))
    assert compared(page.partition("## diverge")[0]) == [
        ("G=16", "pipelinerl", "1"),
        ("pipelinerl", "G=16", "1"),
    ]
    rows = [("G=1 4e-4", "pipelinerl", "1"), ("G=64 4e-4", "G=1 4e-4", "1")]
    assert compared(page.partition("## diverge")[2]) == rows


def test_a_run_that_has_a_file_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = [result("order", name, 0, [0.5] * 4) for name in ("serial", "rolloutpipe")]
    monkeypatch.setattr("learning.measure", lambda *_: {"curve": {"samples": [1]}, "evaluations": []})
    main("order", seeds=2, samples=256, results=written(tmp_path, *done), folder=tmp_path / "runs")
    made = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert made == ["order-serial-1.json", "order-rolloutpipe-1.json"]
    found = read_result(tmp_path / made[0])
    assert (found["seed"], found["curve"]) == (1, {"samples": [1]})
    assert set(found["machine"]) >= {"processor", "cores", "others", "quiet"}
    assert set(found["made"]) >= {"commit", "src", "python", "torch"}


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learning.HELD_OUT", 8)
    schedule = {"name": "serial", "groups_per_round": 2, "groups_per_step": 2}
    study = Study("None", {}, {"serial": schedule}, evaluations=1, checkpoints=1)
    for samples in (16, 48):  # as if it had been stopped after its first round
        learn(study, "serial", samples, 0, tmp_path / "run")
    found = result_of(tmp_path / "run")
    assert found["curve"]["samples"] == [16, 32, 48]
    assert found["curve"]["generated"] == [16, 32, 48]
    assert found["evaluations"][-1][0] == 48
    assert found["tokens"]["generated"] == found["curve"]["generated_tokens"][-1]
    events = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert events.count('"event":"RunStarted"') == 2


def test_a_run_that_was_measured_otherwise_is_not_replaced(tmp_path: Path) -> None:
    written(tmp_path, result("order", "serial", 0, [0.5] * 4))
    path, wanted = file_of(tmp_path, "order", "serial", 0), head("order", "serial", 512, 0)
    with pytest.raises(SystemExit, match=r"measured with samples = 256, not 512; name other --results"):
        is_measured(path, wanted)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"format": 2}, "format 2; this is a program of format 1: measure it anew"),
        ({"study": "nix"}, "study 'nix': there is no such study; choose from lag"),
        ({"schedule": "nix"}, "schedule 'nix': not in order; it has serial, rolloutpipe"),
    ],
)
def test_a_file_that_is_of_no_study_is_refused_in_one_message(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "order-serial-0.json"
    path.write_text(json.dumps(result("order", "serial", 0, [0.5]) | changed), encoding="utf-8")
    with pytest.raises(SystemExit) as why:
        main(report=True, results=tmp_path, page=tmp_path / "page.md", figures=tmp_path)
    assert problem in str(why.value)


def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "order-serial-0.json").write_text('{"format": 1', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"order-serial-0.json: it is not a file of learning.py"):
        main(report=True, results=tmp_path, page=tmp_path / "page.md", figures=tmp_path)


def test_a_study_or_a_schedule_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="STUDY 'nix': there is no such study; choose from lag, diverge"):
        main("nix")
    with pytest.raises(SystemExit, match="--only nix: not in order; it has serial, rolloutpipe"):
        main("order", only="serial,nix")


def test_a_report_has_a_section_for_each_study_with_results_and_the_figures_that_are_shown(
    tmp_path: Path,
) -> None:
    names = [("order", "serial"), ("order", "rolloutpipe"), ("lag", "G=8")]
    runs = [result(*name, seed, [0.2, 0.4 + seed / 5]) for name in names for seed in (0, 1)]
    page, figures = tmp_path / "page.md", tmp_path / "figures"
    figures.mkdir()
    runs += [result("verified", name, seed, [0.5, 0.6 + seed / 5]) for name in IN_FLIGHT for seed in (0, 1)]
    runs += [result("verified", "serial", seed, [0.7, 0.9]) for seed in (0, 1)]
    for name, tables in learning_report.TABLES.items():
        marked = "Before\n{}{}After\n".format(*learning_report.MARKS) * len(tables)
        (tmp_path / name).write_text(marked, encoding="utf-8")
    learning_report.write(written(tmp_path, *runs), page, figures, tmp_path)
    claims = (tmp_path / "results.md").read_text(encoding="utf-8")
    claim = "| RolloutPipe, 5.3: it converges as `serial` | accuracy: `rolloutpipe` less `serial` | +0.000"
    assert claim in claims
    once = "- `verified`: 2 seeds, 128 samples in 8 optimizer steps at a learning rate of 2e-4; margin 0.02, "
    assert claims.count(f"{once}chosen before the runs.\n") == 1
    staleness = (tmp_path / "staleness.md").read_text(encoding="utf-8")
    assert staleness.count("Before\n") == staleness.count("After\n") == 2
    row = "| `pipelinerl, 0 verified` | 0.5 | -0.200 ±0.635 | +0.000 ±0.000 | +0.000 ±0.000 | 25% |"
    assert row in staleness and "Live, 0.4M, 2 seeds, 128 samples" in staleness
    assert "## order\n" in page.read_text(encoding="utf-8") and "## april\n" not in page.read_text(
        encoding="utf-8"
    )
    assert (
        "| `serial` | 2 | 0.750 ±0.000 |  | 0.200 ±0.000 | 0.500 ±1.271 | 0.350 ±0.635 |  |"
        in page.read_text(encoding="utf-8")
    )
    assert [path.name for path in figures.iterdir()] == ["learning_lag.png"]


def test_runs_of_another_study_are_shown_where_they_are_shared(tmp_path: Path) -> None:
    evaluations = {"evaluations": [[0, 0.1], [4096, 0.8]]}
    one = result("lag", "G=8", 0, [0.5] * 64, **evaluations)
    found = read_all(written(tmp_path, one, result("lagcurve", "april", 0, [0.25] * 64, **evaluations)))
    assert list(learning_report.runs_of(found, "lagcurve")) == ["G=8", "april"]
    assert "| `april` | 1 | 0.800 |" in learning_report.text(found)


@pytest.mark.parametrize("name", TAILRACE)
def test_each_schedule_of_a_study_is_one_of_the_registry(name: str) -> None:
    study = STUDIES[name]
    for run, schedule in study.schedules.items():
        settings = study.settings_of(run)
        if settings.get("algorithm.name") == "distillation":
            settings["teacher.path"] = "model"  # a run of the study makes it
        config = load_config(study.config, settings)
        resolve(config.model_copy(update={"schedule": schedule}))


@pytest.mark.parametrize("name", STUDIES)
def test_runs_that_a_study_shares_have_its_settings(name: str) -> None:
    study = STUDIES[name]
    for other, schedules in study.shared.items():
        assert set(schedules) <= set(STUDIES[other].schedules)
        assert study.config == STUDIES[other].config
        if name == "lagcurve":
            assert study.settings == STUDIES[other].settings
