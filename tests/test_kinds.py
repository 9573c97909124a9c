"""Kinds are found by name, those of other packages through entry points; what is wrong is one message."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace import kinds
from tailrace.cli import main
from tailrace.errors import ConfigError
from tailrace.kinds import INTERFACE, kind_of


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Packages of a test are installed in a folder that only it sees."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    forget()
    yield
    forget()
    for name in set(sys.modules) - before:
        if not name.startswith("tailrace."):
            del sys.modules[name]


def forget() -> None:
    kind_of.cache_clear()
    kinds.entries.cache_clear()


def installed(folder: Path, package: str, entry: str, code: str, group: str = "tailrace.kinds") -> None:
    """Install a package as pip does: a module, and its metadata."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    information = folder / f"{module}-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{entry} = {module}:Mine\n")


MINE = f"class Mine:\n    interface = {INTERFACE}\n    settings = dict\n"


def refusal(name: str, key: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        kind_of("engine", name, key)
    return str(caught.value)


def test_a_kind_of_another_package_is_imported_when_it_is_named(tmp_path: Path) -> None:
    installed(tmp_path, "own-engine", "engine.own", MINE)
    kinds.entries("tailrace.kinds")
    assert "own_engine" not in sys.modules
    kind = kind_of("engine", "own")
    assert kind.settings is dict and kind_of("engine", "own") is kind


def test_a_name_that_nobody_has_is_refused_with_those_that_are_like_it(tmp_path: Path) -> None:
    installed(tmp_path, "own-engine", "engine.ngram", MINE)
    wrong = "nothing that is installed has such a kind"
    assert refusal("ngran") == f"engine.kind = 'ngran': {wrong}; did you mean 'ngram'?"
    assert refusal("ngran", "engine.what").startswith("engine.what = 'ngran': ")


def test_two_packages_with_one_kind_are_named(tmp_path: Path) -> None:
    installed(tmp_path, "one", "engine.own", MINE)
    installed(tmp_path, "other", "engine.own", MINE)
    said = "engine.kind = 'own': one 1.2 and other 1.2 register it; uninstall one of them"
    assert refusal("own") == said


def test_a_package_takes_the_place_of_no_kind_that_is_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "BUILT_IN", {"engine.fast": "nowhere:Fast"})
    installed(tmp_path, "one", "engine.fast", MINE)
    said = "engine.kind = 'fast': one 1.2 and tailrace register it; uninstall one of them"
    assert refusal("fast") == said


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nowhere\n", "No module named 'nowhere'"),
        ("raise SystemExit('no GPU')\n", "SystemExit: no GPU"),
        ("class Other: ...\n", "has no attribute 'Mine'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_and_the_others_work(
    tmp_path: Path, code: str, why: str
) -> None:
    installed(tmp_path, "broken", "engine.broken", code)
    installed(tmp_path, "good", "engine.good", MINE)
    said = refusal("broken")
    assert said.startswith("engine.kind = 'broken': broken 1.2 registers it, and cannot be imported (")
    assert why in said and said.endswith("; install another version of it, or uninstall it")
    assert kind_of("engine", "good").settings is dict


@pytest.mark.parametrize("line", ["", f"interface = {INTERFACE + 1}"])
def test_a_package_for_another_interface_is_named(tmp_path: Path, line: str) -> None:
    installed(tmp_path, "later", "engine.later", f"class Mine:\n    settings = dict\n    {line}\n")
    given = INTERFACE + 1 if line else None
    assert refusal("later") == (
        f"engine.kind = 'later': later 1.2 has it for interface {given} of kinds, here is "
        f"{INTERFACE}; install another version of one of them"
    )


def test_a_kind_that_needs_an_extra_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^engine\.kind = 'tinker': tinker is not installed; .*pip install"
    ):
        kind_of("engine", "tinker").check(None)


COMMAND = "def Mine(name: str) -> None:\n    print(f'hello {name}')\n"


def test_a_command_of_another_package_runs_and_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(tmp_path, "own-command", "greet", COMMAND, "tailrace.commands")
    assert main(["greet", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"
    assert main(["--help"]) == 0
    assert "of own-command 1.2" in capsys.readouterr().out


def test_what_is_wrong_with_a_command_of_another_package_is_said_by_that_command_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(tmp_path, "own-command", "greet", "import nothing_at_all\n", "tailrace.commands")
    installed(tmp_path, "other-command", "eval", COMMAND, "tailrace.commands")
    assert main(["greet", "you"]) == 2
    assert "own-command 1.2 registers it, and cannot be imported" in capsys.readouterr().err
    assert main(["eval", "no_run"]) == 2
    assert "other-command 1.2 and tailrace register it" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "no.toml")]) == 2
    assert "no.toml" in capsys.readouterr().err
