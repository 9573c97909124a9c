"""Runs a schedule on live workers: the run of `tailrace train` or of the Python API, and the trials of
`compare` and `diagnose`."""

import asyncio
import faulthandler
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Any

from tailrace import clock
from tailrace.config import LiveConfig, RunConfig
from tailrace.controller.base import RunComponents
from tailrace.controller.checkpoints import checkpoint_name
from tailrace.controller.execution import RunResult, execute
from tailrace.controller.interruption import Interruption
from tailrace.controller.watchdog import end_at_last, watch_controller_lag
from tailrace.drivers.assembly.folder import RunFolder, recorder_of
from tailrace.drivers.assembly.live import (
    advantages_of,
    begin_start,
    check_live,
    dated,
    on_devices_of_trainer,
    open_parts,
    rewind,
)
from tailrace.drivers.assembly.replay import Recording, check_replay, open_replay, replayed
from tailrace.drivers.assembly.resumption import best_evaluation, opened
from tailrace.drivers.assembly.schedule import (
    BoundSchedule,
    resolve,
    steps_of_a_round,
    with_published_defaults,
)
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.assembly.simulation import failure_limit
from tailrace.drivers.kinds.tracker import TrackedRun, open_trackers
from tailrace.errors import Interrupted, WorkerDied, say
from tailrace.importing import saved_function
from tailrace.ledger.journal import Journal, commits_on_thread
from tailrace.ledger.ledger import NullJournal
from tailrace.ledger.recovery import StartingPoint
from tailrace.ledger.store import Store
from tailrace.record.display import NUM_REWARDS, Display, sparkline
from tailrace.record.events import Evaluated, Event, Recorder, Row
from tailrace.record.figures import evaluations_of, steps_of
from tailrace.record.metrics import read_rows
from tailrace.record.rewind import rewind_records
from tailrace.record.sinks import open_sinks
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
    interruption: Interruption | None = None,
    command: str = "train",
) -> RunSummary:
    """Train to the last round, from the start or from the newest checkpoint. Raises as `api.train`.

    If a worker dies that cannot be replaced alone, the run is resumed from its newest checkpoint, at most
    `host.restarts` times.

    SIGINT, SIGTERM and SIGHUP end the run in order; a later SIGINT or SIGHUP ends the process at once.

    Args:
        resume: continue the run in the output directory, if one has begun there.
        schedule: in place of the schedule that the config names; checked by the caller.
        reward: in place of the reward functions that the config names.
        interruption: lets another thread end the run in order.
        command: the one that the user gave. Another than `train` replaces its own earlier run.
    """
    folder, interruption = RunFolder(output_dir), interruption or Interruption()
    folder.claim(command, only_check=True)
    config.weights.in_run_folder(output_dir)  # raises if versions of others are there
    config = LiveConfig.of(with_published_defaults(config))
    config = dated(config, folder) if resume else config
    recording = Recording.read(config) if config.run.replay else None
    schedule = BoundSchedule(replayed) if recording else schedule or resolve(config)
    saved = b"" if reward is None else saved_function(reward, "reward")
    begin_start(config)
    with TemporaryDirectory() as scratch:  # nothing is written into a folder that may hold another run
        checked = Path(scratch) / "reward.pkl"
        checked.write_bytes(saved)
        live = _with_reward(config, reward, checked)
        fitted = check_replay(config, recording) if recording else check_live(live, schedule)
    if fitted.table:
        print(fitted.table, file=sys.stderr)
    config = _with_reward(fitted.config, reward, folder.reward)
    received = signals_received(interruption.request, RESUME)
    with folder.locked(command) as earlier, folder.shortage_explained(), received:
        if earlier.command == command != "train":
            folder.clear(keep=("lock",))
        num_restarts = 0
        while True:
            try:
                summary = _one_life(config, schedule, folder, command, resume, saved, interruption, recording)
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


def _one_life(
    config: LiveConfig,
    schedule: BoundSchedule,
    folder: RunFolder,
    command: str,
    resume: bool,
    reward: bytes,
    interruption: Interruption,
    recording: Recording | None,
) -> RunSummary:
    """Train until the run ends or a worker dies."""
    folder.lock.touch()  # for `tailrace view`: the events that are there are of an earlier process
    with opened(folder.kept(config), folder, resume) as (store, start):
        folder.claim(command)  # only here, because a run that was refused is not this command's
        if start.base.round >= config.run.rounds and (ended := _ended(config, folder)):
            folder.export(folder.checkpoints / start.base.checkpoint)
            say(f"the run has ended after round {config.run.rounds}; raise run.rounds to go on")
            return ended
        if reward:
            folder.reward.write_bytes(reward)
        if recording:
            if start.life == 1:
                recording.fill(start, config, folder)
            else:
                recording.restore_versions(start)
            num = len(start.interrupted)
            schedule = partial(replayed, config=config, recording=recording, num_groups=num)
        if start.base.cut_steps and not recording:
            start.steps_per_round = steps_of_a_round(config, schedule)
        try:
            training = _train(config, schedule, folder, store, start, interruption)
            outcome, summary = clock.run(training, virtual=False)
        except asyncio.CancelledError:
            state = " before training began: there is nothing to save; start the run again"
            if start.base.checkpoint:
                state = (
                    f" before training went on; --resume continues from {start.base.checkpoint}, as before"
                )
            raise _interrupted(interruption, state) from None
        finally:
            faulthandler.cancel_dump_traceback_later()  # that of `end_at_last`
        if outcome.checkpoint:
            folder.export(outcome.checkpoint)
        if store and not Path(store.name).exists():
            say(f"warning: {store.name} was deleted meanwhile: the run can be neither resumed nor inspected")
        _report(summary, folder, config)
    if outcome.interrupted and interruption.signal is None:
        remedy = f"raise {interruption.limit}, then --resume"
        say(f"{interruption.reason}; saved {outcome.checkpoint}; {remedy}")
        return summary
    if outcome.interrupted and outcome.checkpoint:
        saved = f"saved {outcome.checkpoint}, its model in {folder.model}"
        raise _interrupted(interruption, f": {saved}; --resume continues from there")
    if outcome.interrupted:
        state = " before the first optimizer step: no weights to save; start again, or --resume"
        raise _interrupted(interruption, state)
    return summary


def _ended(config: RunConfig, folder: RunFolder) -> RunSummary | None:
    """Return the summary of a run whose rounds are made; None: its last process did not come to its end."""
    rows, last = read_rows(folder.metrics), config.run.rounds
    evaluated = any(row["round"] == last for row in evaluations_of(rows))
    closed = folder.summary.exists() and folder.summary.stat().st_mtime >= folder.metrics.stat().st_mtime
    return Summary(earlier=rows).summary() if closed and (evaluated or not config.run.eval_every) else None


async def _train(
    config: LiveConfig,
    schedule: BoundSchedule,
    folder: RunFolder,
    store: Store | None,
    start: StartingPoint,
    interruption: Interruption,
) -> tuple[RunResult, RunSummary]:
    interruption.begin()
    start.began_s = clock.now()
    replays = config.run.replay is not None
    opening = open_replay if replays else partial(open_parts, life=start.life)
    async with opening(config, folder.path) as parts:
        say(f"the workers are ready after {clock.now() - start.began_s:.1f} s")
        if start.base.checkpoint:
            await rewind(parts, folder.checkpoints / start.base.checkpoint, start.base.version)
        if store and start.life > 1:
            store.commit(start.opening)
            folder.config.write_text(folder.kept(config).toml(), encoding="utf-8")
        rewind_records(folder.metrics, folder.samples, round=start.base.round, step=start.base.step)
        recorder, summary = _recorder(config, folder, start, interruption)
        with commits_on_thread(store) if store else nullcontext() as commit:
            journal = Journal(commit, start, flush_s=config.ledger.flush_s) if commit else NullJournal()
            journal.keep_tokens = config.ledger.keep_tokens
            outcome = await _executed(
                ComparedSchedule(config, schedule),
                parts,
                recorder,
                folder=folder.checkpoints,
                starting_point=start,
                journal=journal,
                interruption=interruption,
                beside=[watch_controller_lag(recorder), end_at_last(config.run.step_timeout_s)],
            )
    return outcome, summary.summary()


def _recorder(
    config: RunConfig, folder: RunFolder, start: StartingPoint, interruption: Interruption
) -> tuple[Recorder, Summary]:
    earlier = read_rows(folder.metrics)
    start.best = best_evaluation(earlier, folder)
    summary = Summary(folder.summary, earlier=earlier)
    loop = asyncio.get_running_loop()  # the display asks from a thread of its own
    waits = partial(clock.who_waits, loop)
    stop = StopWithoutGain(config, earlier, interruption)
    display = Display(config.run.rounds, waits, config.record, start_s=start.began_s)
    interruption.on_request = lambda: display.stopping(
        STOPPING.format(Signals(interruption.signal or 0).name)
    )
    tracked = TrackedRun(config.record.project, folder.path, config.shared(), start.life, start.base.step)
    recorder = recorder_of(
        folder,
        summary,
        display,
        stop,
        *open_sinks(config.record.sinks, folder.path, display.say),
        *open_trackers(config.record.trackers, tracked, display.say),
        start=start,
        earlier=earlier,
        token_samples=config.record.token_samples,
        waits=clock.open_waits,
    )
    return recorder, summary


class StopWithoutGain:
    """Sink: ends the run in order after `run.stop_after_evaluations` evaluations without a better one."""

    def __init__(self, config: RunConfig, earlier: Sequence[Row], interruption: Interruption) -> None:
        self._run, self._interruption = config.run, interruption
        self._accuracies = [row["eval/accuracy"] for row in evaluations_of(earlier)]

    def on(self, event: Event) -> None:
        if not isinstance(event, Evaluated) or event.round >= self._run.rounds:
            return
        self._accuracies.append(event.accuracy)
        best, num = max(self._accuracies), self._run.stop_after_evaluations
        without_gain = len(self._accuracies) - 1 - self._accuracies.index(best)
        if 0 < num <= without_gain:
            what = "evaluation is" if without_gain == 1 else f"{without_gain} evaluations are"
            reason = f"the last {what} no better than {best:.3f}"
            self._interruption.stop(reason, "run.stop_after_evaluations")

    def close(self) -> None: ...


def _report(summary: RunSummary, folder: RunFolder, config: RunConfig) -> None:
    lines = [f"events    {folder.events}  (tailrace view {folder.path})"]
    lost = {"skipped": summary.rows_skipped, "failed": summary.failures, "groups": summary.groups.reasons}
    for what, reasons in lost.items():
        if reasons:
            lines.append(f"{what:9} {', '.join(f'{count} {reason}' for reason, count in reasons.items())}")
    if config.prices and summary.cost is not None:
        lines.insert(0, f"cost      {config.prices.words(summary.cost)}")
    if summary.bound:
        lines.insert(0, f"bound     {summary.bound.line}")
    rows = read_rows(folder.metrics)
    if rewards := [row["reward"] for row in steps_of(rows)]:
        curve = sparkline(rewards[:: -(-len(rewards) // NUM_REWARDS)])
        lines.insert(0, f"reward    {rewards[0]:.3f} -> {rewards[-1]:.3f}  {curve}")
    if summary.eval:
        first, last = summary.eval.first, summary.eval.last
        lines.insert(0, f"held-out accuracy {first:.3f} -> {last:.3f} in {summary.steps} steps")
    if folder.model.exists():
        lines.append(f"model     {folder.model}")
    if folder.adapter.exists():
        lines.append(f"adapter   {folder.adapter}")
    if best := best_evaluation(rows, folder):
        name, how = checkpoint_name(best[1]), f"tailrace eval {folder.path} --checkpoint best"
        lines.append(f"best      checkpoints/{name}, accuracy {best[0]:.3f}  ({how})")
    lines += [f"advice    {kind}, {text}" for kind, text in summary.advisories.items()]
    with suppress(OSError, ValueError):  # the output may be closed
        print(*lines, sep="\n")


def _interrupted(interruption: Interruption, state: str) -> Interrupted:
    number = interruption.signal or 0
    return Interrupted(f"{Signals(number).name}{state}", number)


# -- trials -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparedSchedule:
    """A schedule, and the config that its workers are made from."""

    config: RunConfig
    schedule: BoundSchedule

    @property
    def setup(self) -> str:
        """The settings that worker processes are made from."""
        sections = "model data sampling reward engine algorithm trainer host placement"
        return json.dumps(self.config.model_dump(mode="json", include=set(sections.split())), sort_keys=True)


class SharedWorkers:
    """The workers of one candidate at a time, always at the weights that training starts from: those of a
    checkpoint, or of the model."""

    def __init__(self, folder: Path, checkpoint: Path | None = None) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self.start = checkpoint or folder / "start"
        self._setup = ""
        self._open = AsyncExitStack()
        self._parts: RunComponents | None = None

    async def parts(self, candidate: ComparedSchedule) -> RunComponents:
        """The workers of a candidate, rewound. Workers of another set-up are closed first."""
        if self._parts is None or candidate.setup != self._setup:
            await self.aclose()
            config = LiveConfig.of(candidate.config)
            self._parts = await self._open.enter_async_context(open_parts(config, self._folder))
            self._setup = candidate.setup
            if not self._checkpoint:  # for each set-up: a trainer with another algorithm keeps other things
                async with on_devices_of_trainer(self._parts):
                    await (await self._parts.trainer.save(self.start))
        await rewind(self._parts, self.start, version=0)
        return self._parts

    async def aclose(self) -> None:
        self._parts = None
        await self._open.aclose()


async def run_trial(
    candidate: ComparedSchedule, parts: RunComponents, recorder: Recorder, rounds: int
) -> None:
    """Run a schedule on given workers, without evaluations and checkpoints."""
    config = candidate.config.changed(run={"eval_every": 0, "checkpoint_every": 0, "rounds": rounds})
    await _executed(replace(candidate, config=config), parts, recorder)


async def _executed(
    candidate: ComparedSchedule, parts: RunComponents, recorder: Recorder, **life: Any
) -> RunResult:
    """Run a schedule on workers. `life`: what `execute` is told of a run that may be resumed."""
    config, schedule = LiveConfig.of(candidate.config), candidate.schedule
    parts = replace(parts, max_failures=failure_limit(config, schedule))
    advantages = advantages_of(config)
    return await execute(schedule, parts, config.run, recorder, compute_advantages=advantages, **life)
