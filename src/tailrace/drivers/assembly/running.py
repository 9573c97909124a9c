"""Runs a schedule on live workers: `tailrace train`, and the Python API."""

import asyncio
import faulthandler
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from tailrace import clock
from tailrace.algo.advantages import ComputeAdvantages
from tailrace.config import LiveConfig, RunConfig
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.execution import RunResult, execute
from tailrace.controller.interruption import Interruption
from tailrace.controller.watchdog import end_at_last, watch_controller_lag
from tailrace.drivers.assembly.check import begin_start, check_live
from tailrace.drivers.assembly.folder import RunFolder, recorder_of
from tailrace.drivers.assembly.machine import Fitted
from tailrace.drivers.assembly.notebook import open_display
from tailrace.drivers.assembly.open import open_parts
from tailrace.drivers.assembly.report import report
from tailrace.drivers.assembly.resumption import (
    as_begun,
    best_evaluation,
    dated,
    ended,
    go_on,
    opened,
    rewind,
)
from tailrace.drivers.assembly.schedule import (
    BoundSchedule,
    resolve,
    steps_of_a_round,
    with_decay_steps,
    with_published_defaults,
)
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.assembly.simulated import failure_limit
from tailrace.drivers.kinds.tracker import TrackedRun, open_trackers
from tailrace.errors import Interrupted, WorkerDied, say
from tailrace.importing import saved_function
from tailrace.kinds import kind_of
from tailrace.ledger.journal import Journal, commits_on_thread
from tailrace.ledger.ledger import NullJournal
from tailrace.ledger.recovery import StartingPoint
from tailrace.ledger.store import Store
from tailrace.record.events import Evaluated, Event, Recorder, Row
from tailrace.record.figures import evaluations_of
from tailrace.record.metrics import read_rows
from tailrace.record.sinks import FunctionSink, GuardedSink, open_sinks
from tailrace.record.summary import RunSummary, Summary

STOPPING = "{}: saving a checkpoint; Ctrl-C again ends at once"
RESUME = "ended at once, and nothing more is saved; --resume continues from the newest checkpoint"


def train(
    config: RunConfig,
    output_dir: Path,
    *,
    resume: bool = False,
    schedule: BoundSchedule | None = None,
    reward: Callable[..., Any] | None = None,
    rows: bytes | None = None,
    on: Callable[[Event], None] | None = None,
    interruption: Interruption | None = None,
    command: str = "train",
) -> RunSummary:
    """Train to the last round, from the start or from the newest checkpoint, as `api.train`.

    If a worker dies that cannot be replaced alone, the run is resumed from its newest checkpoint, at most
    `host.restarts` times. A later SIGINT or SIGHUP ends the process at once.

    Args:
        schedule: in place of the schedule that the config names; checked by the caller.
        rows: content of the folder's rows.jsonl, which the config names.
        interruption: lets another thread end the run in order.
        command: the one that the user gave. Another than `train` replaces its own earlier run.
    """
    folder = RunFolder(
        output_dir,
        has_reward=reward is not None,
        has_rows=rows is not None,
        has_ledger=config.ledger.is_stored,
    )
    interruption = interruption or Interruption()
    folder.claim(command, only_check=True)
    config.weights.in_run_folder(output_dir)  # raises if versions of others are there
    config = as_begun(config, folder) if resume else config
    config = LiveConfig.of(with_published_defaults(config))
    config = dated(config, folder) if resume else config
    config = with_decay_steps(config, schedule)
    recording = recorded_run(config)
    schedule = recording.schedule if recording else schedule or resolve(config)
    saved = b"" if reward is None else saved_function(reward, "reward")
    begin_start(config)
    with TemporaryDirectory() as scratch:  # nothing is written into a folder that may hold another run
        checked = Path(scratch) / "reward.pkl"
        checked.write_bytes(saved)
        live = _with_reward(config, reward, checked)
        if rows is not None:
            (there := Path(scratch) / folder.rows.name).write_bytes(rows)
            live = live.changed(data={"path": there})
        fitted = recording.check(config) if recording else check_live(live, schedule)
    if fitted.table:
        print(fitted.table, file=sys.stderr)
    config = _with_reward(fitted.config, reward, folder.reward).changed(data=config.data)
    received = signals_received(interruption.request, RESUME)
    with folder.locked(command) as earlier, folder.shortage_explained(), received:
        if earlier.command == command != "train":
            folder.clear(keep=("lock",))
        attempt = _Attempt(config, schedule, folder, command, saved, rows, on, interruption, recording)
        num_restarts = 0
        while True:
            try:
                summary = attempt.run(resume)
                for each in fitted.remarks:  # the bound takes the threads as given
                    say(f"warning: {each}")
                return summary
            except WorkerDied as died:
                limit = config.host.restarts
                if num_restarts == limit or interruption.signal is not None:
                    raise
                num_restarts, resume = num_restarts + 1, True
                say(str(died))
                say(f"restart {num_restarts} of {limit}")


def _with_reward(config: LiveConfig, reward: Callable[..., Any] | None, path: Path) -> LiveConfig:
    """The config with a reward function that is saved in a file."""
    if reward is None:
        return config
    name = getattr(reward, "__name__", "reward")
    return config.changed(reward={"function": f"{path.resolve()}:{name}", "functions": ()})


class RecordedRun(Protocol):
    """The trained samples of a run, which another run trains again."""

    @property
    def schedule(self) -> BoundSchedule:
        """The schedule that repeats their order."""

    def check(self, config: LiveConfig) -> Fitted[LiveConfig]:
        """Check a config before anything starts, and fit it to the samples and the machine. Raises a
        ConfigError."""

    def open(self, config: LiveConfig, folder: Path) -> AbstractAsyncContextManager[RunComponents]:
        """Start the trainer alone. Raises as `open_trainer`."""

    def begin(self, start: StartingPoint, config: LiveConfig, folder: RunFolder) -> BoundSchedule:
        """Give a run what was recorded. Returns its schedule."""


class Replays(Protocol):
    """Hook run.replay: runs with `run.replay`."""

    def read(self, config: LiveConfig) -> RecordedRun:
        """Read the run that `run.replay` names. Raises a ConfigError if it has no samples, lacks those of
        some steps, or they are not samples of this config."""


def recorded_run(config: LiveConfig) -> RecordedRun | None:
    """Return the run that `run.replay` names, as `Replays.read`; None: there is none."""
    if not config.run.replay:
        return None
    replays: Replays = kind_of("run", "replay")
    return replays.read(config)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A run until it ends or a worker dies. `reward`: a function that is saved as reward.pkl, or empty."""

    config: LiveConfig
    schedule: BoundSchedule
    folder: RunFolder
    command: str
    reward: bytes
    rows: bytes | None
    on: Callable[[Event], None] | None
    interruption: Interruption
    recording: RecordedRun | None

    def run(self, resume: bool) -> RunSummary:
        """Train to the end. Raises WorkerDied, and Interrupted if a signal ended the run in order."""
        config, folder, schedule = self.config, self.folder, self.schedule
        folder.lock.touch()  # for `tailrace view`: the events that are there are of an earlier process
        with opened(folder.kept(config), folder, resume, self.rows) as (store, start):
            folder.claim(self.command)  # only here, because a run that was refused is not this command's
            checkpoint = start.base.checkpoint
            if start.base.round >= config.run.rounds and (summary := ended(config, folder)):
                folder.export(folder.checkpoints / checkpoint)
                say(f"the run has ended after round {config.run.rounds}; raise run.rounds to go on")
                return summary
            if self.reward:
                folder.reward.write_bytes(self.reward)
            if self.recording:
                schedule = self.recording.begin(start, config, folder)
            elif start.base.cut_steps:
                start.steps_per_round = steps_of_a_round(config, schedule)
            try:
                outcome, summary = clock.run(self._train(schedule, store, start), virtual=False)
            except asyncio.CancelledError:
                state = " before training began: there is nothing to save; start the run again"
                if checkpoint:
                    state = f" before training went on; --resume continues from {checkpoint}, as before"
                raise self._interrupted(state) from None
            finally:
                faulthandler.cancel_dump_traceback_later()  # that of `end_at_last`
            if outcome.checkpoint:
                folder.export(outcome.checkpoint)
            if store and not Path(store.name).exists():
                loss = "was deleted meanwhile: the run can be neither resumed nor inspected"
                say(f"warning: {store.name} {loss}")
            report(summary, folder, config)
        if not outcome.interrupted:
            return summary
        if self.interruption.signal is None:
            remedy = f"raise {self.interruption.limit}, then --resume"
            say(f"{self.interruption.reason}; saved {outcome.checkpoint}; {remedy}")
            return summary
        state = " before the first optimizer step: no weights to save; start again, or --resume"
        if outcome.checkpoint:
            saved = f"saved {outcome.checkpoint}, its model in {folder.model}"
            state = f": {saved}; --resume continues from there"
        raise self._interrupted(state)

    async def _train(
        self, schedule: BoundSchedule, store: Store | None, start: StartingPoint
    ) -> tuple[RunResult, RunSummary]:
        config, folder = self.config, self.folder
        self.interruption.begin()
        start.began_s = clock.now()
        opening = self.recording.open if self.recording else partial(open_parts, life=start.life)
        async with opening(config, folder.path) as parts:
            say(f"the workers are ready after {clock.now() - start.began_s:.1f} s")
            if start.base.checkpoint:
                await rewind(parts, folder.checkpoints / start.base.checkpoint, start.base.version)
            go_on(folder.kept(config), folder, store, start)
            recorder, summary = self._recorder(start)
            with commits_on_thread(store) if store else nullcontext() as commit:
                journal = Journal(commit, start, flush_s=config.ledger.flush_s) if commit else NullJournal()
                journal.keep_tokens = config.ledger.keep_tokens
                outcome = await execute(
                    schedule,
                    replace(parts, max_failures=failure_limit(config, schedule)),
                    config.run,
                    recorder,
                    compute_advantages=ComputeAdvantages(config.algorithm, config.sampling),
                    folder=folder.checkpoints,
                    starting_point=start,
                    journal=journal,
                    interruption=self.interruption,
                    beside=[watch_controller_lag(recorder), end_at_last(config.run.step_timeout_s)],
                )
        return outcome, summary.summary()

    def _recorder(self, start: StartingPoint) -> tuple[Recorder, Summary]:
        config, folder, interruption = self.config, self.folder, self.interruption
        earlier = read_rows(folder.metrics)
        start.best = best_evaluation(earlier, folder)
        summary = Summary(folder.summary, earlier=earlier)
        waits = partial(clock.who_waits, asyncio.get_running_loop())  # it asks from a thread of its own
        display = open_display(config.run.rounds, waits, config.record, start_s=start.began_s)
        interruption.on_request = lambda: display.stopping(STOPPING.format(interruption.name))
        tracked = TrackedRun(config.record.project, folder.path, config.shared(), start.life, start.base.step)
        recorder = recorder_of(
            folder,
            summary,
            display,
            StopWithoutGain(config.run, earlier, interruption),
            *open_sinks(config.record.sinks, folder.path, display.say),
            *([GuardedSink(FunctionSink(self.on), "on", display.say)] if self.on else []),
            *open_trackers(config.record.trackers, tracked, display.say, config.record.tracker_samples),
            start=start,
            earlier=earlier,
            token_samples=config.record.token_samples,
            waits=clock.open_waits,
        )
        return recorder, summary

    def _interrupted(self, state: str) -> Interrupted:
        return Interrupted(f"{self.interruption.name}{state}", self.interruption.signal or 0)


class StopWithoutGain:
    """Sink: ends the run in order after `run.stop_after_evaluations` evaluations without a better one."""

    def __init__(self, run: RunSettings, earlier: Sequence[Row], interruption: Interruption) -> None:
        self._run, self._interruption = run, interruption
        self._rewards = [row["eval/reward"] for row in evaluations_of(earlier)]

    def on(self, event: Event) -> None:
        if not isinstance(event, Evaluated) or event.round >= self._run.rounds:
            return
        self._rewards.append(event.reward)
        best, num = max(self._rewards), self._run.stop_after_evaluations
        without_gain = len(self._rewards) - 1 - self._rewards.index(best)
        if 0 < num <= without_gain:
            what = "evaluation is" if without_gain == 1 else f"{without_gain} evaluations are"
            reason = f"the last {what} no better than {best:.3f}"
            self._interruption.stop(reason, "run.stop_after_evaluations")

    def close(self) -> None: ...
