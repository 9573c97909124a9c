"""A run as the page shows it: read from its files, and derived again when one of them has grown."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from statistics import fmean
from threading import RLock
from typing import Any, TypeVar

import msgspec

from tailrace import clock
from tailrace.config import NOT_TOML, leaves
from tailrace.contracts.engine import COUNTS_FOLDER
from tailrace.drivers.assembly.folder import RunFolder, runs_in
from tailrace.errors import ConfigError
from tailrace.extras.view.causes import shares_of
from tailrace.extras.view.faster import fastest
from tailrace.extras.view.figures import Curves, meanings, totals, trial_figures
from tailrace.extras.view.lanes import MAX_MARKS, RunLanes
from tailrace.extras.view.samples import Defect, SampleBook, whole_lines
from tailrace.extras.view.status import Pace, RunStatus, advisories, open_work, state_of
from tailrace.record.advisories import Advisor, Advisory, advisories_of_steps
from tailrace.record.events import Row
from tailrace.record.figures import evaluations_of, steps_of
from tailrace.record.metrics import read_row
from tailrace.record.summary import Summary
from tailrace.record.timeline import RunTimelines

TORN = "the file ends within this line"
CHARTED = (
    *("reward", "reward_std", "frac_reward_zero_std", "loss", "value_loss", "entropy", "kl", "mismatch_kl"),
    *("engine_mismatch_kl", "grad_norm", "learning_rate", "completions/mean_length", "ess", "lag/mean"),
    *("completions/p50_length", "completions/p90_length", "completions/max_length", "lag/max", "time/step"),
    "round/reward",
    *("completions/clipped_ratio", "perf/tokens_per_s", "time/wait", "round/waiting_ratio", "round/time_s"),
)
"""Figures that the page draws before it is asked for others."""
FOLLOWED_ROUNDS = 5
FIRST_SECTIONS = ("run", "schedule", "model", "data", "sampling", "algorithm", "trainer")
"""Sections of a config that a person looks at first."""
T = TypeVar("T")


class RunView:
    """Reads the files of one run, and changes nothing. Threads of a server may share it."""

    def __init__(self, folder: Path, name: str, *, trust: bool = False) -> None:
        self.name, self._folder, self._trust = name, folder, trust
        self._samples, self._pace = SampleBook(folder), Pace(folder / COUNTS_FOLDER)
        self._log, self._log_problem = RunTimelines(folder / "events.jsonl"), ""
        self._log_lock, self._rows_lock, self._faster_lock = RLock(), RLock(), RLock()
        self._known: dict[str, tuple[object, Any]] = {}
        """Derived values by name, each with the state of the files that it was derived from."""

    # -- metrics.jsonl, config.toml --

    def figures(self) -> dict[str, Any]:
        """Return what the metrics and the config tell. The run log is not read, which may take long."""
        with self._rows_lock:
            rows, defects = self._rows()
            curves = self._curves()
            shown = {name: curves.of(name) for name in CHARTED if name in curves.names}
            return {
                "name": self.name,
                "state": self._state()._asdict(),
                "x": curves.x,
                "y": shown,
                "names": curves.names,
                "evaluations": curves.evaluations,
                "advisories": [each._asdict() for each in advisories_of_steps(steps_of(rows))],
                "meanings": meanings(curves.names),
                "simulated": curves.is_simulated,
                "cost": self._cost(),
                "config": self.config(),
                "about": self._about(),
                "defects": [each._asdict() for each in defects],
            }

    def figure(self, name: str) -> Sequence[Sequence[float | None]]:
        """The points of one figure (`Curves.of`)."""
        with self._rows_lock:
            return self._curves().of(name)

    def _rows(self) -> tuple[list[Row], list[Defect]]:
        """The rows of metrics.jsonl that are good, and the defects of the file."""
        path = self._folder / "metrics.jsonl"
        return self._derived("rows", _stamp(path), lambda: _good_rows(path))

    def _curves(self) -> Curves:
        rows, _ = self._rows()
        return self._derived("curves", (len(rows), id(rows)), lambda: Curves(rows, self._folder / "samples"))

    def _summary(self) -> Summary:
        return Summary(earlier=self._rows()[0])

    def _figures(self) -> list[dict[str, Any]]:
        return self._derived("figures", id(self._rows()[0]), self._compared)

    def _compared(self) -> list[dict[str, Any]]:
        """The figures for a comparison with other runs; none of rows of another version."""
        measured = [row["eval/reward"] for row in evaluations_of(self._rows()[0])]
        try:
            simulated = self._curves().is_simulated
            return trial_figures(self._summary(), measured[-1] if measured else None, simulated=simulated)
        except LookupError:
            return []

    def _cost(self) -> str:
        """Describe the cost of the run so far and the rest of its budget; empty without prices."""
        costs = [cost for row in self._rows()[0] if (cost := row.get("cost/total")) is not None]
        try:
            prices = RunFolder(self._folder).read_config().prices if costs else None
        except ConfigError:
            prices = None
        return prices.words(costs[-1]) if prices else f"{costs[-1]:,.4f}" if costs else ""

    def config(self, *, shared: bool = False) -> dict[str, object]:
        """The keys of config.toml with their sections, all or those of `RunConfig.shared`; empty if it cannot
        be read."""
        try:
            text = "" if shared else (self._folder / "config.toml").read_text(encoding="utf-8")
            return dict(
                leaves(RunFolder(self._folder).read_config().shared() if shared else tomllib.loads(text))
            )
        except (OSError, ConfigError, *NOT_TOML):
            return {}

    def _about(self) -> dict[str, Any]:
        """The command and the release that wrote the run, and its config as far as it may leave the machine:
        the keys that differ from their defaults come first."""
        folder = RunFolder(self._folder)
        shared, changed = self.config(shared=True), set[str]()
        with suppress(ConfigError):
            changed |= dict(
                leaves(folder.read_config().model_dump(mode="json", exclude_defaults=True))
            ).keys()
        keys = sorted(
            shared, key=lambda key: (key not in changed, key.split(".")[0] not in FIRST_SECTIONS, key)
        )
        config = [(key, shared[key], key in changed) for key in keys]
        return {"command": folder.command, "version": folder.version, "config": config}

    def _state(self) -> RunStatus:
        if not any((self._folder / name).exists() for name in ("events.jsonl", "metrics.jsonl")):
            return RunStatus("awaited", f"waits for the first record of {self.name}")
        newest = self._log.all[-1] if self._log.all else None
        if (
            self._is_sft
            and (self._folder / "model").exists()
            and not (self._folder / "summary.json").exists()
        ):
            return RunStatus("finished", "finished")  # a release that wrote no summary of it
        return state_of(self._folder, clock.wall_time(), is_closed=newest is not None and newest.is_closed)

    # -- events.jsonl --

    def record(self) -> dict[str, Any]:
        """Return what the run log tells."""
        with self._log_lock:
            lanes, lives, newest = self._lanes(), self._log.all, self._log.all[-1] if self._log.all else None
            if newest:
                self._pace.update(newest)
            state = self._state()
            work = open_work(newest, self._pace.pauses(newest)) if newest and state.kind != "finished" else []
            with self._rows_lock:
                rows = self._rows()[0]
            recorded_s = sum(life.end_s - life.start_s for life in lives)
            shares = self._derived("shares", self._num_read(), lambda: shares_of(lanes.causes, recorded_s))
            found = advisories(steps_of(rows), newest, state, work)
            return {
                "state": state._asdict(),
                "end_s": lanes.end_s,
                "lives": lanes.lives,
                "engines": [{"name": name, "slots": slots} for name, slots in lanes.engines.items()],
                "follow_s": lanes.last_rounds(FOLLOWED_ROUNDS),
                "rounds": len(lanes.rounds),
                "shares": [each._asdict() for each in shares],
                "recorded_s": recorded_s,
                "summary": self._figures(),
                "run_bound": self._run_bound(),
                "stragglers": [each._asdict() for each in lanes.stragglers],
                "doing": [] if any(each.is_late for each in work) else [each.what for each in work],
                "advisories": [each._asdict() for each in found],
                "marks": self._derived("marks", (id(rows), self._num_read()), self._marks),
                "totals": self._derived("totals", (id(rows), self._num_read()), self._totals),
                "defects": [each._asdict() for each in self._log_defects()],
            }

    def faster(self) -> dict[str, Any]:
        """Another schedule that would be faster (`Faster`), once the run has ended; else nothing."""
        ended = _stamp(self._folder / "summary.json")
        if not ended or not (steps := steps_of(self._rows()[0])):
            return {}
        if not (samples := fmean(row.get("samples/trained", 0.0) for row in steps)):
            return {}
        with self._faster_lock:  # it takes seconds, and is done once for all who ask
            found = self._derived("faster", ended, lambda: fastest(self._folder, samples, trust=self._trust))
        return found._asdict() if found else {}

    def _marks(self) -> list[dict[str, Any]]:
        """The advisories, each at the time of the step with which it arose, and the run's alarms."""
        ended = {step.number: step.end_s for life in self._log.all for step in life.steps}
        advisor = Advisor()
        found = [
            (ended.get(int(row["step"])), each)
            for row in steps_of(self._rows()[0])
            for each in advisor.add(row)
        ]
        alarms = [
            (each.time_s, Advisory("stalled", each.what)) for life in self._log.all for each in life.alarms
        ]
        return [
            {"time_s": at, **each._asdict()} for at, each in (*found, *alarms[:MAX_MARKS]) if at is not None
        ]

    def window(self, start_s: float, end_s: float, bins: int) -> dict[str, Any]:
        """The lanes in a range of time (`RunLanes.window`)."""
        with self._log_lock:
            return self._lanes().window(start_s, end_s, bins)

    def _lanes(self) -> RunLanes:
        """Read what is new of the run log. A bad line ends what is shown of it."""
        try:
            if not self._log_problem or self._log.reader.was_replaced():
                self._log_problem = ""
                self._log.update()
        except ConfigError as why:
            self._log_problem = why.problem
        return self._derived("lanes", self._num_read(), lambda: RunLanes(self._log.all))

    def _num_read(self) -> tuple[int, int]:
        return id(self._log.reader), self._log.reader.num_lines

    def _log_defects(self) -> Iterator[Defect]:
        if self._log_problem:
            yield Defect("events.jsonl", 0, self._log_problem)
        elif self._log.reader.is_torn:
            yield Defect("events.jsonl", self._log.reader.num_lines + 1, TORN)
        elif not self._log.all and (self._folder / "metrics.jsonl").exists() and not self._is_sft:
            yield Defect("events.jsonl", 0, "it is not there, so there is no timeline")

    @property
    def _is_sft(self) -> bool:
        """Whether there are given responses, and no events."""
        return RunFolder(self._folder).command == "sft"

    def _totals(self) -> dict[str, Any]:
        """The totals of the run; none of rows of another version."""
        with self._rows_lock:
            try:
                return totals(self._summary(), self._log.all)
            except LookupError:
                return {}

    def _run_bound(self) -> tuple[float, float] | None:
        """The lower bound on the run's time, and that time, in seconds."""
        try:
            bound = msgspec.json.decode((self._folder / "summary.json").read_bytes())["bound"]
            return (bound["run_share"] * bound["run_time_s"], bound["run_time_s"]) if bound else None
        except (OSError, ValueError, RecursionError, LookupError, TypeError):
            return None

    # -- samples --

    def samples(self, kind: str, last_round: int | None = None, search: str = "") -> dict[str, Any]:
        """The newest samples: "trained", "held-out", or "failed", which have no reward."""
        with self._log_lock:
            self._lanes()
            failed = {
                str(each.sample): each.outcome
                for life in self._log.all
                for each in life.scorings
                if each.reward is None and each.outcome != "next turn"
            }
            if kind == "failed":
                found = [
                    {"id": id, "failure": why, "round": None, "reward": None, "prompt": "", "text": ""}
                    for id, why in reversed(failed.items())
                    if search in id or search in why
                ]
                return {"samples": found, "defects": []}
            listed = self._samples.listed(held_out=kind == "held-out", last_round=last_round, search=search)
            return {"samples": listed, "defects": [each._asdict() for each in self._samples.defects]}

    def sample(self, id: str) -> dict[str, Any]:
        """One sample, with its requests."""
        with self._log_lock:
            self._lanes()
            names = ("engine", "start_s", "end_s", "outcome", "had", "num_tokens")
            mine = [
                {name: getattr(r, name) for name in names}
                for timeline in self._log.all
                for r in (*timeline.requests, *timeline.open_requests)
                if str(r.sample) == id
            ]
            return msgspec.structs.asdict(self._samples.find(id)) | {"requests": mine}

    def _derived(self, name: str, of: object, derive: Callable[[], T]) -> T:
        """Return the value that was derived before, unless the files have changed."""
        if name not in self._known or self._known[name][0] != of:
            self._known[name] = of, derive()
        found: T = self._known[name][1]
        return found


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _good_rows(path: Path) -> tuple[list[Row], list[Defect]]:
    lines, is_torn = whole_lines(path)
    rows, bad = list[Row](), list[tuple[int, str]]()
    for number, line in enumerate(lines, 1):
        try:
            row = read_row(line)
        except (ValueError, LookupError):
            row = {}
        if "eval/loss" in row:
            row.setdefault("wall_time", nan)  # a release that wrote none
        if "wall_time" not in row:
            bad.append((number, "it is no row of figures"))
        elif rows and row["step"] < rows[-1]["step"]:
            bad.append((number, "its step is before that of the line above"))
        else:
            rows.append(row)
    defects = [Defect("metrics.jsonl", *bad[0], num_lines=len(bad))] if bad else []
    return rows, defects + ([Defect("metrics.jsonl", len(lines) + 1, TORN)] if is_torn else [])


def open_runs(folders: Sequence[Path], *, wait: bool = False, trust: bool = False) -> list[RunView]:
    """The runs in some folders (`runs_in`). Raises a ConfigError for one that holds no files of a run.

    Args:
        wait: a folder that is not there yet, or in which a run starts, is a run without records.
        trust: whether a schedule that a folder's config names may be imported.
    """
    found = runs_in(folders, _is_run)
    for _, folder in found:
        if not _is_run(folder) and not (wait and _may_become_a_run(folder)):
            problem = "it has neither events.jsonl nor metrics.jsonl"
            remedy = "name the output directory of a run, of a simulation or of a comparison"
            raise ConfigError("RUN", str(folder), problem, remedy)
    return [RunView(folder, name, trust=trust) for name, folder in found]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("events.jsonl", "metrics.jsonl", "config.toml"))


def _may_become_a_run(folder: Path) -> bool:
    """Whether there is nothing in the folder, or a run has locked it and starts its workers."""
    if not folder.exists():
        return True
    return folder.is_dir() and ((folder / "lock").exists() or not any(folder.iterdir()))
