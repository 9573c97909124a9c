"""The package of examples/own_engine, installed beside this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "own_engine"
QUICKSTART = ROOT / "examples" / "quickstart" / "quickstart.toml"
SMALL = "--run.rounds 2 --run.eval_every 0 --sampling.max_completion_tokens 16"
SMALL += " --schedule.groups_per_round 4 --schedule.groups_per_step 4"


def tailrace(*words: str, installed: Path | None) -> subprocess.CompletedProcess[str]:
    """Run the command with a folder of packages."""
    path = os.pathsep.join(map(str, filter(None, [installed, *sys.path])))
    return subprocess.run(
        [sys.executable, "-m", "tailrace.cli", *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    source.mkdir()
    for file in ("pyproject.toml", "own_engine.py"):
        (source / file).write_bytes((PACKAGE / file).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run([*pip, "--target", folder / "site", source], check=True)
    return folder / "site"


@pytest.mark.slow  # cold starts
def test_an_engine_of_another_package_trains_and_its_wrong_setting_is_refused(
    installed: Path, tmp_path: Path
) -> None:
    words = ["train", str(QUICKSTART), "--engine.kind", "forward", *SMALL.split()]
    trained = tailrace(*words, "--output-dir", str(tmp_path / "run"), installed=installed)
    assert trained.returncode == 0, trained.stderr
    assert "Step 2 | Round 2/2" in trained.stdout
    refused = tailrace(
        *words, "--engine.dtype", "float16", "--output-dir", str(tmp_path / "other"), installed=installed
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        "tailrace: engine.dtype = 'float16': there is no such choice; choose from 'float32' or 'bfloat16'\n"
    )
    assert not (tmp_path / "other").exists()
    absent = tailrace(*words, "--output-dir", str(tmp_path / "other"), installed=None)
    assert absent.returncode == 2
    assert "engine.kind = 'forward': nothing that is installed has such a kind" in absent.stderr


def test_the_package_is_short() -> None:
    lines = [file.read_text(encoding="utf-8").splitlines() for file in PACKAGE.iterdir() if file.is_file()]
    assert sum(map(len, lines)) <= 100
