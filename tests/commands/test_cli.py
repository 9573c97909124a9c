"""The command line: words in, an exit code out."""

import json
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.workers import local


def test_a_dry_run_prints_the_resolved_config_and_starts_nothing(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_path.parent / "out"
    assert main(["train", str(config_path), "--output-dir", str(folder), "--dry-run"]) == 0
    assert 'name = "rolloutpipe"' in capsys.readouterr().out
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.rund", "3"], "run.rund = 3: there is no such key; did you mean 'rounds'?"),
        (["--run.rounds", "0"], "run.rounds = 0: input should be greater than or equal to 1; change it"),
        (
            ["--schedule.U", "3"],
            "schedule.U = 3: R = 4 groups do not divide into steps of 3; choose from 1, 2, 4",
        ),
        (
            ["--schedule.name", "serie"],
            "schedule.name = 'serie': there is no such schedule; choose from serial",
        ),
        (["--model.path", "/nowhere"], "model.path = '/nowhere'"),
        (["--reward.function", "nowhere:f"], "reward.function = 'nowhere:f': it cannot be imported"),
    ],
)
def test_a_wrong_setting_ends_with_code_2_and_names_key_value_and_remedy(
    config_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["train", str(config_path), "--output-dir", str(config_path.parent / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (config_path.parent / "out").exists()


def test_a_missing_config_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "nowhere.toml"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err


def test_simulate_needs_no_model_and_writes_trace_and_summary(tmp_path: Path) -> None:
    path = tmp_path / "sim.toml"
    path.write_text('[run]\nrounds = 2\ngroup_size = 8\n[schedule]\nname = "rolloutpipe"\nR = 8\nB = 16\n')
    words = ["simulate", str(path), "--output-dir", str(tmp_path / "out"), "--json", str(tmp_path / "s.json")]
    assert main(words) == 0
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["groups"]["trained"] == 16
    assert summary["steps"] == 8
    first = (tmp_path / "out" / "trace.json").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "out" / "trace.json").read_bytes() == first


def test_compare_races_two_schedules_from_the_same_weights(config_path: Path, tmp_path: Path) -> None:
    result = tmp_path / "race.json"
    words = ["compare", str(config_path), "--repeats", "1", "--json", str(result), "--run.rounds", "1"]
    assert main([*words, "--output-dir", str(tmp_path / "race")]) == 0
    numbers = json.loads(result.read_text())
    serial, pipelined = numbers["schedules"]["serial"], numbers["schedules"]["rolloutpipe"]
    assert serial.keys() >= {
        "main_time_s", "waiting_ratio", "first_dispatch_s", "trainer_compute_s", "reward"
    }  # fmt: skip
    assert serial["reward"] == pytest.approx(pipelined["reward"], abs=1e-9)
    assert numbers["bound_s"] > 0
    assert (tmp_path / "race" / "timeline.png").exists()


def test_eval_scores_held_out_prompts_and_starts_no_reference(
    config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "eval.json"
    monkeypatch.setattr(local.RemoteReference, "spawn", None)
    assert main(["eval", str(config_path), "--json", str(result), "--algorithm.kl_coef", "0.1"]) == 0
    numbers = json.loads(result.read_text())
    assert numbers["num_samples"] == 8
    assert 0.0 <= numbers["accuracy"] <= 12.0
