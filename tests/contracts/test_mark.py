"""The mark of a folder says what this program owns in it."""

import json
import os
from pathlib import Path

import pytest

from tailrace.contracts.mark import MARK, claim, read_mark, remove
from tailrace.errors import ConfigError


def test_a_mark_owns_the_names_of_all_commands_that_wrote_there(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert claim(folder, "train", ["model", "logs"], ()).names == []
    assert claim(folder, "sft", ["model", "lock"], ()).names == ["logs", "model"]
    mark = {"command": "sft", "names": ["lock", "logs", "model"], "format": 1, "version": ""}
    assert json.loads((folder / MARK).read_bytes()) == mark
    assert os.listdir(folder) == [MARK]


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling"])
def test_what_is_there_without_being_owned_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, kind: str
) -> None:
    there = tmp_path / "model"
    match kind:
        case "file":
            there.write_text("mine")
        case "folder":
            there.mkdir()
        case _:
            there.symlink_to("/etc" if kind == "link" else "/nowhere")
    why = (
        r"^weights\.folder = .*: this command would replace what tailrace did not write there: model; choose"
    )
    with pytest.raises(ConfigError, match=why):
        claim(tmp_path, "train", ["model", "lock"], (), key="weights.folder")
    assert os.listdir(tmp_path) == ["model"]


def test_a_pattern_owns_what_comes_later(tmp_path: Path) -> None:
    claim(tmp_path, "train", ["version-[0-9]*"], ())
    for name in ("version-1", "version-mine", "version-22"):
        (tmp_path / name).mkdir()
    mark = read_mark(tmp_path)
    assert mark and [path.name for path in mark.owned_in(tmp_path)] == ["version-1", "version-22"]


def test_a_mark_has_the_release_that_wrote_it_and_one_of_an_earlier_release_none(tmp_path: Path) -> None:
    claim(tmp_path, "train", ["model"], (), version="0.3.0")
    assert (mark := read_mark(tmp_path)) and mark.version == "0.3.0"
    path = tmp_path / ".tailrace"
    path.write_text(path.read_text().replace('"version"', '"other"'))
    assert (mark := read_mark(tmp_path)) and mark.version == ""


def test_a_check_writes_nothing(tmp_path: Path) -> None:
    claim(tmp_path / "new", "train", ["model"], (), only_check=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("my notes", "no mark of tailrace"),
        ('{"command": "train", "names": [], "format": 2}', "has format 2, not 1"),
    ],
)
def test_a_mark_that_is_none_or_of_another_release_is_refused_and_stays(
    tmp_path: Path, content: str, problem: str
) -> None:
    (tmp_path / MARK).write_text(content)
    with pytest.raises(ConfigError, match=rf"--output-dir = .*{problem}"):
        claim(tmp_path, "train", ["model"], ["model"])
    assert (tmp_path / MARK).read_text() == content


def test_removing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    remove(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["mine"] and (tmp_path / "mine" / "file").read_text() == "mine"
    remove(tmp_path / "mine")
    assert os.listdir(tmp_path) == []
