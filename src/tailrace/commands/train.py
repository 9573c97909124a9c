"""`tailrace train`: one live run, and everything about it in its output directory.

A run that was killed has several lives. Nothing of an earlier one is changed before all that is needed to go
on was read and found whole; the first change is the ledger's, in one transaction.

config.toml      resolved: every default written out
metrics.jsonl    one object an optimizer step
summary.json     what came of it
samples/         what was trained on, a file a round
trace.json       for Perfetto: a lane an engine slot, a lane the trainer; of a second life trace-2.json
timeline.png     the same at one glance
checkpoints/     round_000010/: a Hugging Face folder and the optimizer
ledger.sqlite    the fate of every token and prompt, and where the run stood at each checkpoint
counts/          how many tokens each engine produced, by its own count
logs/            what the worker processes printed
lock             held by the process that runs here; the system frees it when that ends, however it ends
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from errno import EDQUOT, ENOSPC
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from tailrace import clock
from tailrace.commands.live import advantages_of, check_live, open_parts, rewind, training_prompts
from tailrace.config import RunConfig, check_resumable
from tailrace.controller.execution import execute
from tailrace.errors import ConfigError, DiskFull
from tailrace.ledger.base import Store
from tailrace.ledger.journal import Journal, NullJournal
from tailrace.ledger.open import create_store, open_store
from tailrace.ledger.read import read_books
from tailrace.ledger.recovery import StartingPoint, first_life, next_life
from tailrace.ledger.writer import ThreadWriter
from tailrace.record.display import open_display
from tailrace.record.events import FromRound, Recorder
from tailrace.record.metrics import MetricsWriter, read_rows
from tailrace.record.samples import SamplesWriter
from tailrace.record.summary import RunSummary, Summary
from tailrace.record.timeline import PICTURED_ROUNDS, Timeline, draw
from tailrace.record.trace import TraceWriter
from tailrace.schedules.resolve import BoundSchedule, resolve
from tailrace.workers.counter import COUNTS_FOLDER, counted_tokens

CONFIG_FILE = "config.toml"
CHECKPOINTS_FOLDER = "checkpoints"


def train(config: RunConfig, folder: Path, *, resume: bool = False, dry_run: bool = False) -> None:
    """Train to the last round, from the start or from the last checkpoint.

    Raises:
        ConfigError: the config cannot work, the folder is used and `resume` was not asked for, or another
            process is training in it.
        LedgerError: the ledger is missing, damaged, of another config, or cannot be written.
        CheckpointError: the checkpoint cannot be read.
        TailraceError: whatever ended the run.
    """
    schedule = resolve(config)
    check_live(config)
    if dry_run:
        Console().print(config.toml(), highlight=False, markup=False)
        return
    with alone_in(folder):
        store = open_store(config.ledger, folder) if resume else _begun(config, folder)
        with closing(store) if store else nullcontext():
            starting_point = (
                _starting_point(config, folder, store) if resume and store else first_life(config.to_json())
            )
            with full_disk_explained(folder):
                clock.run(_train(config, schedule, folder, store, starting_point), virtual=False)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No other process trains in the folder meanwhile; it is made if need be.

    Raises:
        ConfigError: another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(folder / "lock").acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            "--output-dir",
            str(folder),
            "another process is training in it",
            "let that one end, or choose another",
        ) from None
    with held:
        yield


def _begun(config: RunConfig, folder: Path) -> Store | None:
    if (folder / CONFIG_FILE).exists():
        raise ConfigError(
            "--output-dir", str(folder), "it holds a run already", "add --resume, or choose another"
        )
    store = create_store(config.ledger, folder)
    if store:
        store.commit(first_life(config.to_json()).opening)
    (folder / CONFIG_FILE).write_text(config.toml())
    return store


def _starting_point(config: RunConfig, folder: Path, store: Store) -> StartingPoint:
    books = read_books(store)
    check_resumable(books.lives[max(books.lives)].config, config)
    return next_life(
        books,
        name=store.name,
        config=config.to_json(),
        checkpoints=folder / CHECKPOINTS_FOLDER,
        num_generated=counted_tokens(folder / COUNTS_FOLDER),
        prompt_of=training_prompts(config, config.run.seed).__getitem__,
        seed=config.run.seed,
    )


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """
    Raises:
        DiskFull: a file of the run could not be written to its end.
    """
    try:
        yield
    except OSError as why:
        if why.errno not in (ENOSPC, EDQUOT):
            raise
        raise DiskFull(
            f"{why.filename or folder}: {why.strerror}; make room on the disk, then --resume"
        ) from why


async def _train(
    config: RunConfig,
    schedule: BoundSchedule,
    folder: Path,
    store: Store | None,
    starting_point: StartingPoint,
) -> None:
    checkpoints = folder / CHECKPOINTS_FOLDER
    async with open_parts(config, folder, life=starting_point.life) as parts:
        if starting_point.checkpoint:
            await rewind(parts, checkpoints / starting_point.checkpoint, starting_point.version)
        if store and starting_point.life > 1:
            store.commit(starting_point.opening)
            (folder / CONFIG_FILE).write_text(config.toml())
        timeline, metrics = Timeline(), folder / "metrics.jsonl"
        trace = folder / ("trace.json" if starting_point.life == 1 else f"trace-{starting_point.life}.json")
        summary = Summary(
            folder / "summary.json", earlier=read_rows(metrics, before_round=starting_point.round)
        )
        recorder = Recorder(
            MetricsWriter(metrics, first_round=starting_point.round),
            SamplesWriter(folder / "samples", first_round=starting_point.round),
            TraceWriter(trace),
            FromRound(config.run.rounds - PICTURED_ROUNDS, timeline),
            summary,
            open_display(rounds=config.run.rounds, waits=clock.who_waits),
        )
        with closing(ThreadWriter(store)) if store else nullcontext() as writer:
            journal = (
                Journal(writer, starting_point, flush_s=config.ledger.flush_s) if writer else NullJournal()
            )
            await execute(
                schedule,
                parts,
                config.run,
                recorder,
                compute_advantages=advantages_of(config),
                folder=checkpoints,
                starting_point=starting_point,
                journal=journal,
            )
    draw({str(config.schedule["name"]): timeline}, folder / "timeline.png")
    _report(summary.summary(), folder, trace)


def _report(summary: RunSummary, folder: Path, trace: Path) -> None:
    console = Console()
    if summary.eval:
        first, last = summary.eval.first, summary.eval.last
        console.print(f"held-out accuracy {first:.3f} -> {last:.3f} in {summary.steps} steps")
    console.print(f"timeline  {folder / 'timeline.png'}")
    console.print(f"trace     {trace}  (open it at ui.perfetto.dev)")
    console.print(f"model     {folder / CHECKPOINTS_FOLDER}")
