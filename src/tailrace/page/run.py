"""A run as the page shows it. It reads what was written since the last look, and changes nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tailrace import clock
from tailrace.engine.base import COUNTS_FOLDER
from tailrace.errors import ConfigError
from tailrace.page.advisories import advisories
from tailrace.page.bubbles import idle_times
from tailrace.page.doing import Pace, doing
from tailrace.page.grown import GrownBubbles
from tailrace.page.life import Life, Request, Work
from tailrace.page.samples import SampleBook, SampleView
from tailrace.page.state import state_of
from tailrace.record.trace_file import first_files
from tailrace.record.trace_reader import Defect, LineFile


class Have(msgspec.Struct):
    """What a page has already. It is sent only the rest."""

    generation: int = -1
    """Of its records; another one means that the files were replaced, and all is sent."""
    requests: int = 0
    rows: int = 0


class RunView:
    """Reads the files of one run."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._folder = name, folder
        self._generation = self._revision = 0
        self._begin()

    def _begin(self) -> None:
        self._lives: list[Life] = []
        self._bubbles: list[GrownBubbles] = []
        self._pace = Pace(self._folder / COUNTS_FOLDER)
        self._metrics = LineFile(self._folder / "metrics.jsonl")
        self._rows: list[dict[str, float | None]] = []
        self._bad_row: Defect | None = None
        self._torn_row: Defect | None = None
        self._samples = SampleBook(self._folder)
        self._derived: dict[str, Any] = {}

    def update(self) -> None:
        """Read what is new."""
        replaced = any(life.was_replaced() or not life.path.exists() for life in self._lives)
        if replaced or self._metrics.was_replaced():
            self._generation += 1
            self._begin()
        has_new = self._read_rows()
        for number, path in enumerate(first_files(self._folder)):
            if number == len(self._lives):
                self._lives.append(Life(path, self._lives[-1].end_s if self._lives else 0.0))
                self._pace = Pace(self._folder / COUNTS_FOLDER)
                self._bubbles.append(GrownBubbles(self._lives[-1]))
            if self._lives[number].update():
                self._bubbles[number].update()
                has_new = True
        has_new |= self._samples.update()
        if self._lives:
            self._pace.update(self._lives[-1])
        if has_new or not self._derived:
            self._revision += 1
            self._derived = self._derive()

    def payload(self, have: Have) -> dict[str, Any]:
        """What the page shows, as JSON; of requests and rows only those that it has not."""
        requests, rows = have.requests, have.rows
        if have.generation != self._generation:
            requests = rows = 0
        newest = self._lives[-1] if self._lives else None
        is_closed = newest is not None and newest.is_closed
        state = state_of(self._folder, clock.wall_time(), is_closed=is_closed)
        does = doing(newest, self._pace.pauses(newest)) if newest and state.kind != "finished" else []
        found = advisories([row for row in self._rows if "loss" in row], newest, state, does)
        finished = [request for life in self._lives for request in life.requests]
        return self._derived | {
            "name": self.name,
            "generation": self._generation,
            "requests_from": requests,
            "requests": _columns(finished[requests:]),
            "rows_from": rows,
            "rows": self._rows[rows:],
            "revision": self._revision,
            "state": state._asdict(),
            "doing": [] if any(each.is_late for each in does) else [each.what for each in does],
            "advisories": [each._asdict() for each in found],
        }

    def sample(self, id: str) -> dict[str, Any]:
        """One sample, with its requests."""
        view: SampleView = self._samples.find(id)
        mine = [
            request._asdict()
            for life in self._lives
            for request in [*life.requests, *life.unfinished]
            if request.sample == id
        ]
        return msgspec.structs.asdict(view) | {"requests": mine}

    def ids_with_samples(self) -> Sequence[str]:
        """The ids of the listed samples, the newest first."""
        return [str(sample["id"]) for sample in reversed(self._samples.listed)]

    def _read_rows(self) -> bool:
        num, self._torn_row = len(self._rows), None
        for line in self._metrics.lines():
            if not line.is_whole:
                self._torn_row = Defect("metrics.jsonl", line.number, "the file ends within this line")
                continue
            self._metrics.accept(line)
            try:
                row = msgspec.json.decode(line.content, type=dict[str, float | None])
            except (msgspec.DecodeError, UnicodeDecodeError):
                row = {}
            step = row.get("step")
            if step is None or row.get("wall_time") is None:
                self._add_bad_row(line.number, "it is no row of figures")
            elif self._rows and step < (self._rows[-1]["step"] or 0.0):
                self._add_bad_row(line.number, "its step is before that of the line above")
            else:
                self._rows.append(row)
        return len(self._rows) > num

    def _add_bad_row(self, line: int, problem: str) -> None:
        bad = self._bad_row or Defect("metrics.jsonl", line, problem, num_lines=0)
        self._bad_row = replace(bad, num_lines=bad.num_lines + 1)

    def _derive(self) -> dict[str, Any]:
        slots: dict[str, int] = {}
        for life in self._lives:
            slots |= {name: max(slot, slots.get(name, 0)) for name, slot in life.slots.items()}
        idle = [bubble for life in self._bubbles for bubble in life]
        recorded_s = sum(life.recorded_s for life in self._bubbles)
        return {
            "engines": [{"name": name, "slots": slots[name]} for name in sorted(slots, key=_natural)],
            "end_s": self._lives[-1].end_s if self._lives else 0.0,
            "lives": [life.offset_s for life in self._lives],
            "unfinished": _columns([request for life in self._lives for request in life.unfinished]),
            "bubbles": [list(column) for column in zip(*idle, strict=True)] or [[], [], [], []],
            "idle": [row._asdict() for row in idle_times(recorded_s, idle)],
            "stragglers": [each._asdict() for life in self._lives for each in life.stragglers],
            "rounds": self._works("rounds") + self._works("open_rounds"),
            "trainer": self._works("trainer") + self._works("open_trainer"),
            "publications": self._works("publications") + self._works("open_publications"),
            "rewards": [each[:3] for life in self._bubbles for each in life.scoring],
            "states": [state._asdict() for life in self._lives for state in life.states],
            "samples": self._samples.listed,
            "defects": [msgspec.structs.asdict(each) for each in self._defects()],
        }

    def _works(self, kind: str) -> list[Work]:
        return [work for life in self._lives for work in getattr(life, kind)]

    def _defects(self) -> list[Defect]:
        found = [defect for life in self._lives for defect in life.defects]
        bad_rows = [each for each in (self._bad_row, self._torn_row) if each]
        return [*found, *bad_rows, *self._samples.defects.values()]


def open_runs(folders: Sequence[Path]) -> list[RunView]:
    """The runs in some folders, with short names that differ.

    Args:
        folders: each the folder of a run, or one that has such folders in it, as that of a race.

    Raises:
        ConfigError: a folder holds no files of a run.
    """
    found: list[Path] = []
    for folder in folders:
        inner = [] if _is_run(folder) or not folder.is_dir() else sorted(filter(_is_run, folder.iterdir()))
        if not inner and not _is_run(folder):
            problem = "it has neither trace.json nor metrics.jsonl"
            remedy = "name the output directory of a run, of a simulation or of a race"
            raise ConfigError("RUN", str(folder), problem, remedy)
        found += inner or [folder]
    names = [folder.resolve().name for folder in found]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in found]
    return [RunView(folder, name) for folder, name in zip(found, names, strict=True)]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("trace.json", "metrics.jsonl", "config.toml"))


def _columns(requests: Sequence[Request]) -> Mapping[str, Sequence[object]]:
    columns = list(zip(*requests, strict=True)) or [()] * len(Request._fields)
    return dict(zip(Request._fields, columns, strict=True))


def _natural(name: str) -> tuple[str, int]:
    """So that engine-10 comes after engine-9."""
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0)
