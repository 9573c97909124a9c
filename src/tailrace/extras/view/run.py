"""A run as the page shows it: read from its files, and derived again when one of them has grown."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tailrace import clock
from tailrace.contracts.engine import COUNTS_FOLDER
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.errors import ConfigError
from tailrace.extras.view.idle import covered, idle_shares, idle_times
from tailrace.extras.view.samples import Defect, SampleBook, whole_lines
from tailrace.extras.view.status import Pace, advisories, open_work, state_of
from tailrace.record.timeline import RunTimelines, ServedRequest, Timeline

TORN = "the file ends within this line"


class Straggler(NamedTuple):
    """The sample that ended last in a round, of those that were generated in it."""

    round: str
    sample: str
    engine: str
    slot: int
    end_s: float
    tokens: int
    alone_s: float
    """Seconds after the one before it."""


class RunView:
    """Reads the files of one run, and changes nothing."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._folder = name, folder
        self._log = RunTimelines(folder / "events.jsonl")
        self._samples = SampleBook(folder)
        self._pace = Pace(folder / COUNTS_FOLDER)
        self._rows: list[dict[str, float | None]] = []
        self._row_defects: list[Defect] = []

    def update(self) -> None:
        """Read what is new. Raises a ConfigError if the run log has a bad line."""
        self._log.update()
        self._read_rows()
        self._samples.update()
        if self._log.all:
            self._pace.update(self._log.all[-1])

    def payload(self) -> dict[str, Any]:
        """Return the contents of the page, as JSON."""
        newest = self._log.all[-1] if self._log.all else None
        state = state_of(self._folder, clock.wall_time(), is_closed=newest is not None and newest.is_closed)
        work = open_work(newest, self._pace.pauses(newest)) if newest and state.kind != "finished" else []
        found = advisories([row for row in self._rows if "loss" in row], newest, state, work)
        return self._derived() | {
            "name": self.name,
            "rows": self._rows,
            "samples": self._samples.listed,
            "defects": [defect._asdict() for defect in self._defects()],
            "state": state._asdict(),
            "cost": self._cost(),
            "doing": [] if any(each.is_late for each in work) else [each.what for each in work],
            "advisories": [each._asdict() for each in found],
        }

    def sample(self, id: str) -> dict[str, Any]:
        """One sample, with its requests."""
        mine = [
            dict(zip(COLUMNS, _cells(request), strict=True))
            for timeline in self._log.all
            for request in (*timeline.requests, *timeline.open_requests)
            if str(request.sample) == id
        ]
        return msgspec.structs.asdict(self._samples.find(id)) | {"requests": mine}

    def ids_with_samples(self) -> Sequence[str]:
        """The ids of the listed samples, the newest first."""
        return [str(sample["id"]) for sample in reversed(self._samples.listed)]

    def _read_rows(self) -> None:
        """The rows of metrics.jsonl that are good, and the defects of the file."""
        lines, is_torn = whole_lines(self._folder / "metrics.jsonl")
        self._rows, bad = [], list[tuple[int, str]]()
        for number, line in enumerate(lines, 1):
            try:
                row = msgspec.json.decode(line, type=dict[str, float | None])
            except (msgspec.DecodeError, UnicodeDecodeError):
                row = {}
            step = row.get("step")
            if step is None or row.get("wall_time") is None:
                bad.append((number, "it is no row of figures"))
            elif self._rows and step < (self._rows[-1]["step"] or 0.0):
                bad.append((number, "its step is before that of the line above"))
            else:
                self._rows.append(row)
        self._row_defects = [Defect("metrics.jsonl", *bad[0], num_lines=len(bad))] if bad else []
        if is_torn:
            self._row_defects.append(Defect("metrics.jsonl", len(lines) + 1, TORN))

    def _cost(self) -> str:
        """Describe the cost of the run so far and the rest of its budget; empty without prices."""
        costs = [cost for row in self._rows if (cost := row.get("cost/total")) is not None]
        folder = RunFolder(self._folder)
        prices = folder.read_config().prices if costs and folder.config.exists() else None
        return prices.words(costs[-1]) if prices else ""

    def _defects(self) -> Iterator[Defect]:
        if self._log.reader.is_torn:
            yield Defect("events.jsonl", self._log.reader.num_lines + 1, TORN)
        yield from (*self._row_defects, *self._samples.defects)

    def _derived(self) -> dict[str, Any]:
        """Return the contents that follow from the run log."""
        lives = self._log.all
        idle = [each for life in lives for each in idle_times(life)]
        recorded_s = sum(life.end_s - life.first_round_s for life in lives)
        slots: dict[str, int] = {}
        for life in lives:
            slots |= {name: max(slot, slots.get(name, 0)) for name, slot in life.slots.items()}
        rounds = [each for life in lives for each in (*life.rounds, *life.open_rounds)]
        rewards = [covered([*life.scorings, *life.open_scorings]).tolist() for life in lives]
        return {
            "engines": [{"name": name, "slots": slots[name]} for name in sorted(slots, key=_natural)],
            "end_s": lives[-1].end_s if lives else 0.0,
            "lives": [life.start_s for life in lives],
            "requests": _columns([each for life in lives for each in life.requests]),
            "unfinished": _columns([each for life in lives for each in life.open_requests]),
            "idle_times": [list(column) for column in zip(*idle, strict=True)] or [[], [], [], []],
            "idle": [row._asdict() for row in idle_shares(recorded_s, idle)],
            "stragglers": [each._asdict() for life in lives for each in _stragglers(life)],
            "rounds": [(each.name, each.start_s, each.end_s) for each in rounds],
            "passes": _times(lives, "passes", "accumulate"),
            "steps": _times(lives, "steps", "step"),
            "publications": _times(lives, "publications", "publish"),
            "probes": [(p.start_s, p.end_s, p.arrival.cause) for life in lives for p in life.probes],
            "rewards": [*chain.from_iterable(rewards)],
            "states": [msgspec.structs.asdict(each) for life in lives for each in life.states],
        }


def open_runs(folders: Sequence[Path]) -> list[RunView]:
    """The runs in some folders, with short names that differ. A folder is that of a run, or has such folders
    in it, as that of a comparison. Raises a ConfigError for one that holds no files of a run."""
    found: list[Path] = []
    for folder in folders:
        inner = [] if _is_run(folder) or not folder.is_dir() else sorted(filter(_is_run, folder.iterdir()))
        if not inner and not _is_run(folder):
            problem = "it has neither events.jsonl nor metrics.jsonl"
            remedy = "name the output directory of a run, of a simulation or of a comparison"
            raise ConfigError("RUN", str(folder), problem, remedy)
        found += inner or [folder]
    names = [folder.resolve().name for folder in found]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in found]
    return [RunView(folder, name) for folder, name in zip(found, names, strict=True)]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("events.jsonl", "metrics.jsonl", "config.toml"))


COLUMNS = ("engine", "slot", "start_s", "end_s", "outcome", "sample", "tokens", "had")


def _cells(request: ServedRequest) -> tuple[object, ...]:
    outcome = "evaluation" if request.is_evaluation else request.outcome
    place = (request.engine, request.slot, request.start_s, request.end_s)
    return (*place, outcome, str(request.sample), request.num_tokens, request.had)


def _columns(requests: Sequence[ServedRequest]) -> dict[str, Sequence[object]]:
    columns = list(zip(*map(_cells, requests), strict=True)) or [()] * len(COLUMNS)
    return dict(zip(COLUMNS, columns, strict=True))


def _times(lives: Sequence[Timeline], kind: str, verb: str) -> list[tuple[float, float]]:
    """Start and end of the work of a kind; of what is open, by what the run asked its workers for."""
    works = [each for life in lives for each in (*getattr(life, kind), *life.open_calls(verb))]
    return [(each.start_s, each.end_s) for each in works]


def _stragglers(timeline: Timeline) -> Iterator[Straggler]:
    """Yield the straggler of each round in which at least two samples began and ended."""
    responses = [each for each in timeline.requests if each.is_response]
    ends = [each.end_s for each in responses]
    for round in timeline.rounds:
        ended = responses[bisect_right(ends, round.start_s) : bisect_right(ends, round.end_s)]
        mine = [each for each in ended if each.start_s >= round.start_s]
        if len(mine) > 1:
            before, last = mine[-2:]
            place = (last.engine, last.slot, last.end_s, last.num_tokens, last.end_s - before.end_s)
            yield Straggler(round.name, str(last.sample), *place)


def _natural(name: str) -> tuple[str, int]:
    """Return a key by which engine-10 comes after engine-9."""
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0)
