"""Importing what a user names: it works, or it is one message that names the key."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tailrace.errors import ConfigError
from tailrace.importing import TRAINING, check_training, import_function, install, source


def test_a_function_of_a_module_and_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def double(x):\n    return 2 * x\n")
    assert import_function("json:dumps", "reward.function") is json.dumps
    assert import_function(f"{file}:double", "reward.function")(21) == 42


def test_a_file_may_define_dataclasses_with_postponed_annotations(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Weighing:\n    grams: int\n"
        "def weigh(grams):\n    return Weighing(grams).grams\n"
    )
    assert import_function(f"{file}:weigh", "reward.function")(3) == 3


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("json.dumps", "names no function"),
        (":dumps", "names no function"),
        ("json:", "names no function"),
        ("nowhere.at_all:f", "cannot be imported"),
        ("nowhere.py:f", "cannot be imported"),
        ("json:undumps", "has no function 'undumps'"),
        ("json:__name__", "has no function '__name__'"),
    ],
)
def test_what_cannot_be_imported_is_a_config_error(spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        import_function(spec, "reward.function")
    assert caught.value.key == "reward.function" and caught.value.value == spec


def test_a_file_imports_modules_of_its_folder_at_once_and_in_its_functions(tmp_path: Path) -> None:
    (tmp_path / "sibling_at_once.py").write_text("ONE = 1\n")
    (tmp_path / "sibling_later.py").write_text("TWO = 2\n")
    (tmp_path / "mine.py").write_text(
        "from sibling_at_once import ONE\n"
        "def three():\n    from sibling_later import TWO\n    return ONE + TWO\n"
    )
    assert import_function(f"{tmp_path}/mine.py:three", "reward.function")() == 3


def test_the_folder_of_a_file_replaces_no_module_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("mine = True\n")
    (tmp_path / "mine.py").write_text("def f():\n    pass\n")
    import_function(f"{tmp_path}/mine.py:f", "reward.function")
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("x = 1 / 0", r"ZeroDivisionError: division by zero; .*mine\.py, line 2: x = 1 / 0"),
        ("raise SystemExit('no')", r"SystemExit: no; .*mine\.py, line 2: raise SystemExit\('no'\)"),
        ("import nowhere_at_all", r"No module named 'nowhere_at_all'; .*mine\.py, line 2"),
    ],
)
def test_a_file_that_raises_is_a_config_error_with_the_line(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import math\n{line}\ndef f(): pass\n")
    with pytest.raises(ConfigError, match=problem):
        import_function(f"{file}:f", "reward.function")


def test_a_file_that_is_no_python_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def (:\n")
    with pytest.raises(ConfigError, match="cannot be imported"):
        import_function(f"{file}:f", "schedule.name")


CHECKOUT, WHEEL = "/home/me/my%20tailrace", "/home/me/tailrace-0.2.0-py3-none-any.whl"
FORMS = {
    "an index": (None, "pip", "", "pip install 'tailrace[lora]'"),
    "an index, by uv": (None, "uv", "", "uv pip install 'tailrace[lora]'"),
    "an index, as a tool of uv": (
        None,
        "uv",
        'uv-receipt.toml: tool.requirements = [{ name = "more" }, { name = "tailrace" }]',
        "uv tool install 'tailrace[lora]'",
    ),
    "an index, as a tool of uv that has extras": (
        None,
        "uv",
        'uv-receipt.toml: tool.requirements = [{ name = "tailrace", extras = ["view", "lora", "math"] }]',
        "uv tool install 'tailrace[view,lora,math]'",
    ),
    "an index, by pipx": (
        None,
        "pip",
        'pipx_metadata.json: {"main_package": {"package_or_url": "tailrace"}}',
        "pipx install --force 'tailrace[lora]'",
    ),
    "an index, by pipx, with extras": (
        None,
        "pip",
        'pipx_metadata.json: {"main_package": {"package_or_url": "/w/tailrace.whl[view,json]"}}',
        "pipx install --force 'tailrace[view,json,lora]'",
    ),
    "a wheel": (
        {"url": f"file://{WHEEL}", "archive_info": {}},
        "pip",
        "",
        f"pip install '{WHEEL}[lora]'",
    ),
    "a wheel at a server": (
        {"url": f"https://example.org{WHEEL}", "archive_info": {}},
        "pip",
        "",
        f"pip install 'tailrace[lora] @ https://example.org{WHEEL}'",
    ),
    "a checkout": (
        {"url": f"file://{CHECKOUT}", "dir_info": {}},
        "pip",
        "",
        "pip install '/home/me/my tailrace[lora]'",
    ),
    "a checkout, editable": (
        {"url": f"file://{CHECKOUT}", "dir_info": {"editable": True}},
        "pip",
        "",
        "pip install --editable '/home/me/my tailrace[lora]'",
    ),
    "a checkout, editable, as a tool of uv": (
        {"url": f"file://{CHECKOUT}", "dir_info": {"editable": True}},
        "uv",
        'uv-receipt.toml: tool.requirements = [{ name = "tailrace", editable = "/home/me/my tailrace" }]',
        "uv tool install --editable '/home/me/my tailrace[lora]'",
    ),
    "a repository": (
        {"url": "https://example.org/t.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
        "pip",
        "",
        "pip install 'tailrace[lora] @ git+https://example.org/t.git@c0ffee'",
    ),
}
"""direct_url.json, the installer, the receipt of a tool, and the command for an extra."""


def test_the_packages_of_a_model_are_those_of_the_extra_train() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert sorted(re.split("[>=]", each)[0] for each in extras["train"]) == sorted(TRAINING)
    with_them = [name for name, packages in extras.items() if "tailrace[train]" in packages]
    assert with_them == ["quickstart", "lora", "ray", "serve"]


def test_a_missing_package_of_a_model_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_training("model.path", "m")
    monkeypatch.setattr("tailrace.importing.TRAINING", ("json", "no_such_package"))
    with pytest.raises(ConfigError) as refused:
        check_training("model.path", "m", "quickstart")
    problem = "a model needs packages that are not installed: no_such_package"
    assert str(refused.value) == f"model.path = 'm': {problem}; {install('quickstart')}"


@pytest.mark.parametrize("form", FORMS)
def test_an_extra_is_installed_by_the_tool_and_from_the_source_of_the_package(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct_url, installer, receipt, command = FORMS[form]
    info = tmp_path / "tailrace-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: tailrace\nVersion: 0.2.0\n")
    (info / "INSTALLER").write_text(f"{installer}\n")
    if direct_url:
        (info / "direct_url.json").write_text(json.dumps(direct_url))
    if receipt:
        name, _, content = receipt.partition(": ")
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install("lora") == command
    assert source() in re.sub(r"\[[\w,]+\]", "", command)
