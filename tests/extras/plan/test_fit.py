"""A fit of a simulated run, whose costs are known, and the files that it refuses."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from simulated_run import (
    ENGINES,
    LENGTHS,
    OVERLAPPED,
    REWARDS,
    TRAINER,
    main_times,
    run_config,
    write_run,
)

from tailrace.cli import main
from tailrace.errors import ConfigError
from tailrace.extras.plan.fit import Fit
from tailrace.extras.plan.fit_command import fit_run, fitted_run

HOST = {"engine_slowdown": 1.3, "trainer_slowdown": 1.2}


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("serial"), run_config())


@pytest.fixture(scope="module")
def fitted(serial: Path) -> Fit:
    return fitted_run(serial)


def copied(run: Path, folder: Path, **changed: str) -> Path:
    """A copy of a run's files, with other text in some of them."""
    (folder / "samples").mkdir(parents=True)
    for file in (
        "config.toml",
        "metrics.jsonl",
        "events.jsonl",
        *(f"samples/round_{n:06d}.jsonl" for n in range(3)),
    ):
        (folder / file).write_text(changed.get(file.partition(".")[0], (run / file).read_text()))
    return folder


def relative_errors(found: Any, true: dict[str, float]) -> dict[str, float]:
    return {name: getattr(found, name) / value - 1 for name, value in true.items() if value}


def test_the_costs_of_a_decode_step_of_prefills_and_of_loads_are_recovered(fitted: Fit) -> None:
    true = {name: value for name, value in ENGINES.items() if name not in ("count", "slots")}
    assert relative_errors(fitted.sim.engines, true) == pytest.approx(dict.fromkeys(true, 0), abs=0.01)
    assert fitted.parts[0].explained == pytest.approx(1, abs=1e-4)


def test_the_costs_of_the_trainer_are_exact(fitted: Fit) -> None:
    assert relative_errors(fitted.sim.trainer, TRAINER) == pytest.approx(dict.fromkeys(TRAINER, 0), abs=1e-6)


def test_the_distribution_of_reward_times_is_that_of_the_draws(fitted: Fit) -> None:
    rewards = fitted.sim.rewards
    assert rewards.workers == 64
    assert (rewards.median_s, rewards.sigma) == pytest.approx(
        (REWARDS["median_s"], REWARDS["sigma"]), rel=0.05
    )


def test_lengths_are_the_recorded_ones_with_the_correlation_of_the_groups(fitted: Fit, serial: Path) -> None:
    lengths = fitted.tree["sim"]["lengths"]
    assert lengths["distribution"] == {"kind": "recorded", "path": str(serial / "samples")}
    assert lengths["prompt_tokens"] == LENGTHS["prompt_tokens"]
    assert lengths["correlation"] == pytest.approx(LENGTHS["correlation"], abs=0.05)


def test_what_the_run_cannot_tell_is_said_and_stays_open(fitted: Fit) -> None:
    notes = " ".join(note for part in fitted.parts for note in part.notes)
    assert "never worked at the same time" in notes and fitted.sim.host is None
    assert "no request was cancelled" in notes and "abort_s" not in fitted.tree["sim"]["engines"]


def test_the_slow_down_of_a_shared_host_is_fitted_where_both_worked(tmp_path: Path) -> None:
    schedule = {**OVERLAPPED, "groups_per_step": 4}
    run = write_run(tmp_path, run_config(schedule, host=HOST, lengths=LENGTHS | {"sigma": 1.2}))
    found = fitted_run(run).sim
    assert found.host is not None
    assert found.host.engine_slowdown == pytest.approx(1.3, abs=0.03)
    assert found.engines.base_s == pytest.approx(6e-3, rel=0.03)


def test_two_passes_of_one_size_do_not_tell_their_fixed_part(tmp_path: Path) -> None:
    april = {"name": "april", "groups_per_round": 16, "groups_launched": 16}
    passes = next(
        part for part in fitted_run(write_run(tmp_path, run_config(april))).parts if part.name == "passes"
    )
    assert passes.values["sim.trainer.pass_s"] == 0
    assert "too few or too much alike" in passes.notes[0]


def test_aborts_are_measured_from_the_reward_that_ends_the_rollout(tmp_path: Path) -> None:
    april = {"name": "april", "groups_per_round": 16, "groups_launched": 24}
    run = write_run(tmp_path, run_config(april, engines=ENGINES | {"abort_s": 0.12}))
    found = fitted_run(run)
    assert found.sim.engines.abort_s == pytest.approx(0.12, abs=1e-5)
    assert any("8 of 56 prompts were begun and not trained" in note for note in found.parts[-1].notes)


def test_a_fit_of_one_schedule_predicts_another(serial: Path, tmp_path: Path) -> None:
    live = main_times(write_run(tmp_path / "live", run_config(OVERLAPPED)))
    other = run_config(OVERLAPPED, engines={"count": 2, "slots": 32, "base_s": 1.0})
    found = other.changed(sim=fitted_run(serial).sim)
    engines = found.sim.engines.changed(count=2, slots=32)
    predicted = found.changed(sim={"engines": engines})
    assert main_times(write_run(tmp_path / "predicted", predicted)) == pytest.approx(live, rel=0.01)


def test_simulate_like_a_run_and_the_written_section_agree(
    serial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "other.toml"
    schedule = "\n".join(f"{key} = {value!r}" for key, value in OVERLAPPED.items())
    config.write_text(f"[run]\nrounds = 1\ngroup_size = 8\n[engine]\nreplicas = 2\n[schedule]\n{schedule}\n")
    fitted_toml = tmp_path / "fitted.toml"
    assert main(["fit", str(serial), "--output", str(fitted_toml)]) == 0
    config.with_name("both.toml").write_text(config.read_text() + fitted_toml.read_text())
    for words in ([str(config), "--like", str(serial)], [str(tmp_path / "both.toml")]):
        assert main(["simulate", *words, "--json", f"{words[0]}.json"]) == 0
    one, other = (json.loads((tmp_path / f"{name}.toml.json").read_text()) for name in ("other", "both"))
    assert one == other
    assert tomllib.loads(fitted_toml.read_text()) == fitted_run(serial).tree
    assert "engines.base_s" in capsys.readouterr().out


def test_without_an_output_the_section_is_printed(serial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_run(serial, overrides={})
    assert "[sim.lengths.distribution]" in capsys.readouterr().out


def test_a_bad_line_of_the_run_log_is_refused_with_its_number(serial: Path, tmp_path: Path) -> None:
    lines = (serial / "events.jsonl").read_text().splitlines()
    torn = copied(serial, tmp_path / "torn", events="\n".join([*lines[:49], lines[49][:30], *lines[50:], ""]))
    with pytest.raises(ConfigError, match=r"line 50 of events\.jsonl"):
        fitted_run(torn)
    swapped = [*lines[:49], lines[-1], *lines[49:-1], ""]
    unordered = copied(serial, tmp_path / "unordered", events="\n".join(swapped))
    with pytest.raises(ConfigError, match=r"line 51 of events\.jsonl: its time is before that"):
        fitted_run(unordered)


def test_a_run_log_that_is_torn_at_its_end_is_fitted(serial: Path, fitted: Fit, tmp_path: Path) -> None:
    text = (serial / "events.jsonl").read_text()
    found = fitted_run(copied(serial, tmp_path / "killed", events=text[:-30]))
    assert found.parts[0] == fitted.parts[0]


def test_a_run_log_of_another_version_is_refused(serial: Path, tmp_path: Path) -> None:
    text = (serial / "events.jsonl").read_text()
    newer = copied(serial, tmp_path / "newer", events=text.replace('"format":1', '"format":9'))
    with pytest.raises(ConfigError, match=r"line 1 of events\.jsonl: the log has format 9"):
        fitted_run(newer)
    older = copied(serial, tmp_path / "older", events=text.replace('"num_tokens"', '"tokens"'))
    with pytest.raises(ConfigError, match="of this version"):
        fitted_run(older)


def test_a_resumed_run_is_fitted_by_all_its_processes(serial: Path, fitted: Fit, tmp_path: Path) -> None:
    """The second process has the same events, on the clock of another."""
    text = (serial / "events.jsonl").read_text()
    again = text.replace('"life":1', '"life":2')
    found = fitted_run(copied(serial, tmp_path / "resumed", events=text + again))
    assert found.parts[0].observations == 2 * fitted.parts[0].observations
    engines, once = found.sim.engines, fitted.sim.engines
    assert (engines.base_s, engines.load_s) == pytest.approx((once.base_s, once.load_s))


def test_drafts_of_a_run_are_fitted_by_their_mean_depth_and_gain(serial: Path, tmp_path: Path) -> None:
    """0.6 of the requests have drafts of 3 tokens, with 0.9 + 0.7 + 0.5 right ones. The chance c of a token
    with c + c^2 + c^3 = 2.1 is 0.832. Rows cost little, so that all three pay."""
    drafting = {"acceptance": [0.9, 0.7, 0.5], "draft_share": 0.6, "slope_s": 2e-5}
    found = fitted_run(write_run(tmp_path / "drafts", run_config(engines=ENGINES | drafting))).sim.engines
    assert found.acceptance == pytest.approx([0.832**depth for depth in (1, 2, 3)], abs=2e-3)
    assert found.draft_share == pytest.approx(0.6, abs=1e-3)
    assert found.gained(3) == pytest.approx(1 + 0.6 * 2.1, abs=2e-3)
    assert (found.base_s, found.slope_s) == pytest.approx((ENGINES["base_s"], 2e-5), rel=0.05)
    assert fitted_run(serial).sim.engines.acceptance == ()


def test_the_cost_of_a_verification_is_fitted_beside_that_of_its_prefill(tmp_path: Path) -> None:
    schedule = {"name": "tailrace", "groups_per_step": 8, "groups_in_flight": 24, "staleness": 0}
    engines = ENGINES | {"verify_positions": 0.7, "survival": 0.999}
    config = run_config(schedule | {"stale": "verify"}, engines=engines)
    found = fitted_run(write_run(tmp_path / "verified", config)).sim.engines
    assert found.verify_positions == pytest.approx(0.7, rel=0.01)
    assert found.prefill_tokens_per_s == pytest.approx(ENGINES["prefill_tokens_per_s"], rel=0.01)


@pytest.mark.parametrize("recorded", [r"(?m)^.*\"event\":\"Decoded\".*\n", r'(?<="steps":)\d+'])
def test_of_engines_that_record_no_steps_the_mean_step_is_fitted(
    serial: Path, tmp_path: Path, recorded: str
) -> None:
    """As servers, which record nothing or their drafts alone. A step of this run takes 6 ms and 0.1 ms for
    each of at most 32 requests, and more by the cache."""
    events, num = re.subn(recorded, "0" if "steps" in recorded else "", (serial / "events.jsonl").read_text())
    assert num > 10
    found = fitted_run(copied(serial, tmp_path / "served", events=events))
    assert found.parts[0].observations == 3 * 32 * 8 and "record no decode steps" in found.parts[0].notes[0]
    assert 6e-3 < found.sim.engines.base_s < 20e-3 and found.sim.engines.slope_s == 0


def test_a_run_without_events_is_refused(serial: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"events\.jsonl has no request"):
        fitted_run(copied(serial, tmp_path / "empty", events=""))


def test_torn_metrics_are_refused_with_their_line(serial: Path, tmp_path: Path) -> None:
    run = copied(serial, tmp_path / "torn", metrics=(serial / "metrics.jsonl").read_text()[:-30])
    with pytest.raises(ConfigError, match=r"line 13 of metrics\.jsonl is torn"):
        fitted_run(run)


def test_a_run_that_has_not_trained_is_refused(serial: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no optimizer step"):
        fitted_run(copied(serial, tmp_path / "empty", metrics=""))


def test_a_run_without_samples_is_refused(serial: Path, tmp_path: Path) -> None:
    run = copied(serial, tmp_path / "unsampled")
    for path in (run / "samples").glob("*"):
        path.unlink()
    with pytest.raises(ConfigError, match="it has no lengths"):
        fitted_run(run)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(tmp_path)]) == 2
    assert "there is no run in it" in capsys.readouterr().err


def test_a_setting_that_the_fitted_section_would_replace_is_refused(
    serial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[run]\nrounds = 1\ngroup_size = 8\n[schedule]\nname = 'serial'\n")
    assert main(["simulate", str(config), "--like", str(serial), "--sim.engines.count", "4"]) == 2
    assert "--sim.engines.count = '4': --like replaces all of [sim]" in capsys.readouterr().err
