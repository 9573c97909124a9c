"""`tailrace fit --profile` on the embedded engine."""

from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.rollout.profile import EngineProfile

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "quickstart.toml"


def test_the_engine_of_a_config_is_measured_and_the_file_is_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lengths beyond the model's answers, so that responses end before and go on."""
    file = tmp_path / "profile.json"
    words = ["fit", str(QUICKSTART), "--profile", str(file), "--batches", "1", "--batches", "4"]
    assert main([*words, "--lengths", "6", "--lengths", "3"]) == 0
    printed = capsys.readouterr().out
    assert "ProfileRow(tensor_parallel_size=1, batch=4, length=6, step_s=" in printed
    profile = EngineProfile.read(file)
    profile.check([1])
    assert 0 < profile.rollout_s(1, 1, 1) < 60


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--lengths", "100000"], "--lengths = (100000,): each is from 1 to"),
        (["--batches", "0"], "--batches = (0,): each is from 1 to"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(QUICKSTART), "--profile", str(tmp_path / "profile.json"), *words]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "profile.json").exists()


def test_settings_of_a_run_that_was_made_cannot_be_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(tmp_path), "--run.rounds", "3"]) == 2
    assert "--run.rounds = '3': fit has no config to override without --profile" in capsys.readouterr().err
