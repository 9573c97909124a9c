"""Sinks of a user's own."""

from pathlib import Path

import pytest

from helpers.record_story import pipelined_round, play
from tailrace.config import changed_keys, load_config, may_change
from tailrace.errors import ConfigError
from tailrace.record.sinks import open_sinks

SINKS = """
class Writer:
    def __init__(self, folder, until=10**9):
        self.path, self.until, self.names = folder / "events.txt", until, []
    def on(self, event):
        if len(self.names) == self.until:
            raise RuntimeError("full")
        self.names.append(type(event).__name__)
    def close(self):
        self.path.write_text(" ".join(self.names))

def good(folder): return Writer(folder)
def breaks(folder): return Writer(folder, until=2)
def broken(folder): raise KeyError("token")
def none(folder): return None
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SINKS)
    return tmp_path / "mine.py"


def test_a_users_sink_receives_events_and_rows(file: Path, tmp_path: Path) -> None:
    play(pipelined_round().events, *open_sinks([f"{file}:good"], tmp_path, print))
    names = (tmp_path / "events.txt").read_text().split()
    assert names[0] == "RoundStarted" and names[-3:] == ["RoundEnded", "RoundBound", "dict"]
    assert [names[n + 1] for n, name in enumerate(names) if name == "Stepped"] == ["dict"] * 2


def test_a_sink_that_raises_is_disabled_with_one_line_and_the_others_go_on(
    file: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    sinks = open_sinks([f"{file}:breaks", f"{file}:good"], tmp_path, said.append)
    play(pipelined_round().events, *sinks)
    assert said == [f"Sink {file}:breaks is disabled | on(GroupDrawn) raised RuntimeError: full"]
    assert "RoundBound dict" in (tmp_path / "events.txt").read_text()


def test_a_sink_that_cannot_close_says_so(file: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (sink,) = open_sinks([f"{file}:good"], tmp_path / "missing", said.append)
    play([], sink)
    assert len(said) == 1 and "close() raised FileNotFoundError" in said[0]


@pytest.mark.parametrize(
    "name, problem",
    [
        ("broken", "it raised KeyError: 'token'"),
        ("none", "it returned a NoneType, which is no sink"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_what_makes_no_sink_is_refused(name: str, problem: str, file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        open_sinks([f"{file}:{name}"], tmp_path, print)
    assert problem in str(refused.value) and "record.sinks" in str(refused.value)


def test_a_path_in_the_config_is_relative_to_the_config(file: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = 'serial'\n"
        "[record]\nsinks = ['mine.py:good', 'package.module:sink']\n"
    )
    config = load_config(tmp_path / "run.toml")
    assert config.record.sinks == (f"{file}:good", "package.module:sink")


def test_what_is_recorded_may_change_when_a_run_goes_on(file: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = 'serial'\n")
    config = load_config(tmp_path / "run.toml")
    changed = load_config(tmp_path / "run.toml", {"record.alarm_kl": "0.5", "record.sinks": "['a:b']"})
    keys = changed_keys(config.to_json(), changed).keys()
    assert keys == {"record.alarm_kl", "record.sinks"} and all(map(may_change, keys))
