"""Each command, in an environment that has the files of the package's own dependencies and no others."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import without_torch
from helpers.small_run import train_here, write_small_run
from tailrace.cli import COMMANDS
from tailrace.importing import TRAINING

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
Called = dict[str, tuple[int, str]]


def link_packages(folder: Path) -> set[str]:
    """Link what `pip install` of the package without extras brings, and return the names."""
    left, linked = [*PROJECT["dependencies"]], set[str]()
    while left:
        needed = Requirement(left.pop())
        if needed.name in linked or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        linked.add(needed.name)
        package = metadata.distribution(needed.name)
        left += package.requires or []
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(str(package.locate_file(name))))
    return linked


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """What came of each command."""
    site, work = (tmp_path_factory.mktemp(name) for name in ("site", "work"))
    linked = link_packages(site)
    assert linked.isdisjoint({*TRAINING, "scipy"}) and "numpy" in linked
    assert train_here(write_small_run(work)) == 0
    # -S: the packages of the tests' own environment cannot be imported.
    command = [sys.executable, "-S", without_torch.__file__, str(work / "files"), str(work / "out")]
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {words: (code, last) for words, code, last in map(json.loads, done.stdout.splitlines())}


def test_what_needs_no_model_works(called: Called) -> None:
    num = len(without_torch.WORKS) + len(without_torch.WORKS_ON_A_RUN)
    assert [code for code, _ in called.values()][:num] == [0] * num
    assert len(called) == num + len(without_torch.REFUSED) + 3


def test_every_command_is_called(called: Called) -> None:
    assert COMMANDS.keys() <= {words.partition(" ")[0] for words in called}


@pytest.mark.parametrize(("words", "extra"), without_torch.REFUSED.items())
def test_what_needs_a_model_says_in_one_line_what_to_install(called: Called, words: str, extra: str) -> None:
    code, said = called[words]
    assert (code, said.rpartition("; ")[2]) == (2, f"pip install 'tailrace[{extra}]'")


def test_training_from_python_says_it_too(called: Called) -> None:
    _, said = called["tailrace.train"]
    assert said.endswith(
        "a model needs packages that are not installed: torch, transformers, huggingface_hub, cloudpickle; "
        "pip install 'tailrace[train]'"
    )
    assert called["imported"][1] == called["written"][1] == ""
