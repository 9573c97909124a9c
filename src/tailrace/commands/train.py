"""`tailrace train`: one live run. folder.py lists the files that it leaves in its output directory.

A run may be continued by several processes, which the ledger calls its lives. A resumed run reads all that it
needs before it changes anything of an earlier life; its first change is one transaction of the ledger.
"""

import asyncio
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from tailrace import clock
from tailrace.assembly.folder import RunFolder
from tailrace.assembly.live import advantages_of, check_live, open_parts, rewind, training_prompts
from tailrace.assembly.schedule import BoundSchedule, resolve, with_published_defaults
from tailrace.commands.signals import signals_received
from tailrace.config import RunConfig, check_resumable, with_model_folder
from tailrace.controller.checkpoints import checkpoint_name
from tailrace.controller.execution import RunOutcome, execute
from tailrace.controller.interruption import Interruption
from tailrace.controller.watchdog import watch_controller_lag
from tailrace.engine.base import counted_tokens
from tailrace.errors import CheckpointError, ConfigError, Interrupted, WorkerDied
from tailrace.importing import saved_function
from tailrace.ledger.base import Store
from tailrace.ledger.journal import Journal, NullJournal, commits_on_thread
from tailrace.ledger.recovery import StartingPoint, first_life, next_life, read_books
from tailrace.ledger.sqlite import create_store, has_begun, has_trained, open_store
from tailrace.record.display import Display
from tailrace.record.events import Recorder
from tailrace.record.figures import Row
from tailrace.record.metrics import MetricsWriter, read_rows
from tailrace.record.rewind import rewind_records
from tailrace.record.run_log import LogWriter
from tailrace.record.samples import SamplesWriter
from tailrace.record.sinks import TrackedRun, open_sinks, open_trackers
from tailrace.record.steps import StepMeter
from tailrace.record.summary import RunSummary, Summary
from tailrace.reward.functions import WithFailureLimit
from tailrace.trainer.checksums import CHECKSUMS_FILE, remedy, verify


def run(config: RunConfig, output_dir: Path, *, resume: bool, dry_run: bool) -> None:
    """Train, or print the resolved config with a table of the processes as TOML. Raises as `train`."""
    if not dry_run:
        train(config, output_dir, resume=resume)
        return
    config = with_model_folder(config)
    fitted = check_live(config, resolve(config))
    print(fitted.config.toml(), end="")
    print(textwrap.indent(fitted.table, "# "))


def train(
    config: RunConfig,
    output_dir: Path,
    *,
    resume: bool = False,
    schedule: BoundSchedule | None = None,
    reward: Callable[..., Any] | None = None,
    interruption: Interruption | None = None,
) -> RunSummary:
    """Train to the last round, from the start or from the newest checkpoint. Raises as `api.train`.

    If a worker dies that cannot be replaced alone, the run is resumed from its newest checkpoint, at most
    `host.restarts` times.

    SIGINT, SIGTERM and SIGHUP end the run in order; the second signal ends the process at once.

    Args:
        resume: continue the run in the output directory, if one has begun there.
        schedule: in place of the schedule that the config names; checked by the caller.
        reward: in place of the reward functions that the config names.
        interruption: lets another thread end the run in order.
    """
    config = with_published_defaults(with_model_folder(config))
    schedule = schedule or resolve(config)
    folder, interruption = RunFolder(output_dir), interruption or Interruption()
    saved = None if reward is None else saved_function(reward, "reward")
    with TemporaryDirectory() as scratch:  # nothing is written into a folder that may hold another run
        fitted = check_live(_with_reward(config, reward, saved, Path(scratch) / "reward.pkl"), schedule)
    if fitted.table:
        print(fitted.table, file=sys.stderr)
    config = _with_reward(fitted.config, reward, None, folder.reward)
    with folder.locked(), folder.full_disk_explained(), signals_received(interruption.request):
        num_restarts = 0
        while True:
            try:
                is_resumed = resume or num_restarts > 0
                summary = _one_life(config, schedule, folder, is_resumed, saved, interruption)
                for each in fitted.idle:  # the bound takes the threads as given
                    _say(f"warning: {each}")
                return summary
            except WorkerDied as died:
                limit = config.host.restarts
                if num_restarts == limit or interruption.signal is not None:
                    raise
                num_restarts += 1
                _say(str(died))
                _say(f"restart {num_restarts} of {limit}")


def _with_reward(
    config: RunConfig, reward: Callable[..., Any] | None, saved: bytes | None, path: Path
) -> RunConfig:
    """The config with a reward function that is saved in a file."""
    if reward is None:
        return config
    if saved:
        path.write_bytes(saved)
    name = getattr(reward, "__name__", "reward")
    settings = config.reward.model_copy(update={"function": f"{path.resolve()}:{name}", "functions": ()})
    return config.model_copy(update={"reward": settings})


def _one_life(
    config: RunConfig,
    schedule: BoundSchedule,
    folder: RunFolder,
    resume: bool,
    reward: bytes | None,
    interruption: Interruption,
) -> RunSummary:
    """Train until the run ends or a worker dies."""
    folder.lock.touch()  # for `tailrace view`: the events that are there are of an earlier process
    with opened(config, folder, resume) as (store, start):
        if reward:
            folder.reward.write_bytes(reward)
        try:
            training = _train(config, schedule, folder, store, start, interruption)
            outcome, summary = clock.run(training, virtual=False)
        except asyncio.CancelledError:
            raise _interrupted(interruption, _before_training(start)) from None
        if outcome.checkpoint:
            folder.export(outcome.checkpoint)
        _report(summary, folder)
    if outcome.interrupted:
        raise _interrupted(interruption, _what_was_saved(outcome, folder))
    return summary


@contextmanager
def opened(
    config: RunConfig, folder: RunFolder, resume: bool
) -> Iterator[tuple[Store | None, StartingPoint]]:
    """Open the ledger, of an earlier life if there is one that `resume` asks for."""
    stepped = folder.metrics.exists() and b'"loss"' in folder.metrics.read_bytes()
    if resume and (stepped or has_begun(config.ledger, folder.path, folder.checkpoints)):
        with closing(open_store(config.ledger, folder.path)) as store:
            yield store, _starting_point(config, folder, store)
        return
    if stepped or has_trained(config.ledger, folder.path, folder.checkpoints):
        problem = "it holds a run already"
        raise ConfigError("--output-dir", str(folder.path), problem, "add --resume, or choose another")
    folder.clear()
    start = first_life(config.to_json())
    created = create_store(config.ledger, folder.path)
    with closing(created) if created else nullcontext():
        if created:
            created.commit(start.opening)
        folder.config.write_text(config.toml())
        yield created, start


def _starting_point(config: RunConfig, folder: RunFolder, store: Store) -> StartingPoint:
    books = read_books(store)
    check_resumable(books.lives[max(books.lives)].config, config)
    start = next_life(
        books,
        name=store.name,
        config=config.to_json(),
        checkpoints=folder.checkpoints,
        num_generated=counted_tokens(folder.counts),
        prompt_of=training_prompts(config, config.run.seed).__getitem__,
        seed=config.run.seed,
    )
    _check_checkpoint(folder, start)
    undone = [training.step for training in books.trainings.values() if training.undone == start.life]
    num_undone = max(undone, default=start.step) - start.step
    where = start.checkpoint or "the model of the config"
    _say(f"resumed from {where}, step {start.step} ({num_undone} step{'s' * (num_undone != 1)} undone)")
    return start


def _check_checkpoint(folder: RunFolder, start: StartingPoint) -> None:
    """Raises CheckpointError if the checkpoint of the starting point is damaged, or if all are gone."""
    missing = ", ".join(mark.checkpoint for mark in start.missing)
    if not start.checkpoint:
        if any(mark.step for mark in start.missing):
            raise CheckpointError(
                f"{folder.checkpoints}: the checkpoints of the run are gone ({missing}); "
                "put the folder back, or begin a new run in another --output-dir"
            )
        return
    if missing:
        _say(f"checkpoints that the ledger knows are missing: {missing}")
    path = folder.checkpoints / start.checkpoint
    if not verify(path, remedy(path), step=start.step):
        _say(f"{path} has no {CHECKSUMS_FILE} (an older version wrote it): it is taken as it is")


def _say(line: str) -> None:
    print(f"tailrace: {line}", file=sys.stderr)


async def _train(
    config: RunConfig,
    schedule: BoundSchedule,
    folder: RunFolder,
    store: Store | None,
    start: StartingPoint,
    interruption: Interruption,
) -> tuple[RunOutcome, RunSummary]:
    interruption.begin()
    async with open_parts(config, folder.path, life=start.life) as parts:
        if start.checkpoint:
            await rewind(parts, folder.checkpoints / start.checkpoint, start.version)
        if store and start.life > 1:
            store.commit(start.opening)
            folder.config.write_text(config.toml())
        rewind_records(folder.metrics, folder.samples, round=start.round, step=start.step)
        earlier = read_rows(folder.metrics)
        start.best = _best(earlier, folder)
        recorder, summary = _recorder(config, folder, start, earlier)
        with commits_on_thread(store) if store else nullcontext() as commit:
            limit = config.reward.max_failures or _round_samples(schedule, config.run.group_size)
            outcome = await execute(
                schedule,
                replace(parts, rewards=WithFailureLimit(parts.rewards, limit)),
                config.run,
                recorder,
                compute_advantages=advantages_of(config),
                folder=folder.checkpoints,
                starting_point=start,
                journal=Journal(commit, start, flush_s=config.ledger.flush_s) if commit else NullJournal(),
                interruption=interruption,
                beside=[watch_controller_lag(recorder)],
            )
    return outcome, summary.summary()


def _best(earlier: Sequence[Row], folder: RunFolder) -> tuple[float, int] | None:
    """Accuracy and round of the best evaluation of the run's earlier lives whose checkpoint is there."""
    found = [
        (row["eval/accuracy"], int(row["round"]))
        for row in earlier
        if "eval/accuracy" in row and (folder.checkpoints / checkpoint_name(int(row["round"]))).is_dir()
    ]
    return max(found, key=lambda each: each[0], default=None)


def _recorder(
    config: RunConfig,
    folder: RunFolder,
    start: StartingPoint,
    earlier: Sequence[Row],
) -> tuple[Recorder, Summary]:
    summary = Summary(folder.summary, earlier=earlier)
    loop = asyncio.get_running_loop()  # the display asks from a thread of its own
    display = Display(config.run.rounds, partial(clock.who_waits, loop), config.record)
    tracked = TrackedRun(
        config.record.project, folder.path, config.model_dump(mode="json"), start.life, start.step
    )
    meter = StepMeter(
        MetricsWriter(folder.metrics),
        SamplesWriter(folder.samples, token_samples=config.record.token_samples),
        LogWriter(
            folder.events,
            waits=clock.open_waits,
            life=start.life,
            round=start.round,
            version=start.version,
            step=start.step,
        ),
        summary,
        display,
        *open_sinks(config.record.sinks, folder.path, display.say),
        *open_trackers(config.record.trackers, tracked, display.say),
        wall_clock=clock.wall_time,
        earlier=earlier,
    )
    return Recorder(meter), summary


def _round_samples(schedule: BoundSchedule, group_size: int) -> int:
    """Samples of a round, or of a step where the schedule has no other number of groups."""
    groups = [value for name, value in schedule.keywords.items() if name.startswith("groups_")]
    return group_size * max(groups, default=1)


def _report(summary: RunSummary, folder: RunFolder) -> None:
    console = Console(soft_wrap=True)
    if summary.eval:
        first, last = summary.eval.first, summary.eval.last
        console.print(f"held-out accuracy {first:.3f} -> {last:.3f} in {summary.steps} steps")
    if summary.bound:
        console.print(f"bound     {summary.bound.line}", markup=False)
    console.print(f"events    {folder.events}  (tailrace view {folder.path})", markup=False)
    if folder.model.exists():
        console.print(f"model     {folder.model}")


def _interrupted(interruption: Interruption, state: str) -> Interrupted:
    number = interruption.signal or 0
    return Interrupted(f"{Signals(number).name}{state}", number)


def _before_training(start: StartingPoint) -> str:
    """What a signal found while the workers were starting."""
    if start.checkpoint:
        return f" before training went on; --resume continues from {start.checkpoint}, as before"
    return " before training began: there is nothing to save; start the run again"


def _what_was_saved(outcome: RunOutcome, folder: RunFolder) -> str:
    if outcome.checkpoint is None:
        return " before the first optimizer step: no weights to save; start again, or --resume"
    return f": saved {outcome.checkpoint}, its model in {folder.model}; --resume continues from there"
