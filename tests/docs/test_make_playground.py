"""The playground's set-ups and its lock. Nothing is downloaded."""

from hashlib import sha256
from pathlib import Path

import pytest

from make_playground import FIRST, LOCK, download, is_whole, locked, make, presets
from tailrace.extras.playground.simulation import Question, SimulationAnswer, answer


def test_every_set_up_runs_the_schedules_that_it_shows() -> None:
    found = presets()
    assert found["tail"].schedules == FIRST
    for name in ("rolloutpipe", "april", "cluster_plan"):
        each = found[name]
        few = {"run.rounds": 1, "run.group_size": 2}
        for schedule in each.schedules:
            answered = answer(Question(each.config, few, schedule))
            assert isinstance(answered, SimulationAnswer), (name, schedule, answered)
            assert answered.samples == each.values["schedule.groups_per_round"] * 2


def test_the_lock_names_python_and_every_package_by_its_hash() -> None:
    names = {name.partition("-")[0] for name in locked()}
    assert {"pyodide", "msgspec", "pydantic", "pydantic_core"} < names
    assert all(len(digest) == 64 for digest in locked().values()) and LOCK.name == "playground.lock"


def test_a_file_that_is_there_and_another_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.zip").write_bytes(b"good")
    download(tmp_path, {"a.zip": sha256(b"good").hexdigest()})
    assert not is_whole(tmp_path / "a.zip", "0" * 64)
    with pytest.raises(SystemExit, match=r"a.zip: it is not the file of playground.lock"):
        download(tmp_path, {"a.zip": "0" * 64})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="npm: this program is not installed"):
        download(tmp_path, {"pyodide-1.0.tgz": "0" * 64})


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SystemExit, match="it has other files; name an empty folder"):
        make(tmp_path, tmp_path / "downloads")
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]
