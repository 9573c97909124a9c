"""The beginning of a process of a run: its ledger is opened at a checkpoint that is whole, and its workers
and files go back to it.

A run may be continued by several processes, which the ledger calls its lives. A resumed run reads all that it
needs before it changes anything of an earlier life; its first change is one transaction of the ledger.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext, suppress
from datetime import date
from functools import cache
from hashlib import blake2b
from pathlib import Path

from tailrace import clock
from tailrace.config import LiveConfig, Policy, RunConfig, changed_keys, check_resumable, files_of
from tailrace.contracts.engine import counted_tokens
from tailrace.controller.base import RunComponents
from tailrace.controller.checkpoints import checkpoint_name
from tailrace.drivers.assembly.environments import training_prompts
from tailrace.drivers.assembly.folder import WRITTEN, RunFolder
from tailrace.drivers.assembly.placement import prices_of
from tailrace.drivers.trainer.checksums import CHECKSUMS_FILE, is_retired, remedy, verify
from tailrace.errors import CheckpointError, ConfigError, say
from tailrace.ledger.recovery import StartingPoint, first_life, next_life
from tailrace.ledger.store import Store, create_store, has_begun, has_trained, open_store, read_ledger
from tailrace.model_folder import asks_for_date
from tailrace.record.events import Row
from tailrace.record.figures import evaluations_of, steps_of
from tailrace.record.metrics import read_rows
from tailrace.record.rewind import rewind_records
from tailrace.record.summary import RunSummary, Summary

BLOCK = 2**20
"""Bytes of a file that are read at a time."""


@contextmanager
def opened(
    config: RunConfig, folder: RunFolder, resume: bool, rows: bytes | None = None
) -> Iterator[tuple[Store | None, StartingPoint]]:
    """Open the ledger, of an earlier life if there is one that `resume` asks for. `rows`: content of the
    folder's rows.jsonl, which a new run gets and a resumed one must have."""
    stepped = folder.metrics.exists() and b'"loss"' in folder.metrics.read_bytes()
    if resume and (stepped or has_begun(config.ledger, folder.path, folder.checkpoints)):
        if rows is not None and not (folder.rows.exists() and folder.rows.read_bytes() == rows):
            remedy = f"give the rows of {folder.rows}, or begin a new run in another output directory"
            raise ConfigError("data", "these rows", "the run was begun with others", remedy)
        with closing(open_store(config.ledger, folder.path)) as store:
            yield store, _starting_point(config, folder, store)
        return
    if stepped or has_trained(config.ledger, folder.path, folder.checkpoints):
        problem = "it holds a run already"
        raise ConfigError("--output-dir", str(folder.path), problem, "add --resume, or choose another")
    folder.clear()
    if rows is not None:
        folder.rows.write_bytes(rows)
    start = first_life(config.to_json(), inputs_of(config, folder))
    created = create_store(config.ledger, folder.path)
    with closing(created) if created else nullcontext():
        if created:
            created.commit(start.opening)
        folder.config.write_text(config.toml(), encoding="utf-8")
        yield created, start


def _starting_point(config: RunConfig, folder: RunFolder, store: Store) -> StartingPoint:
    tables = read_ledger(store)
    last, inputs = tables.lives[max(tables.lives)], inputs_of(config, folder)
    check_resumable(last.config, config)
    for key, (before, after) in changed_keys(last.config, config).items():
        say(f"{key} was {before!r} and is {after!r}")
    if changed := changed_files(last.inputs, inputs):
        if not config.run.accept_changed_inputs:
            problem = f"the run was begun with another content of {changed}"
            remedy = "put it back, begin a new run in another --output-dir, or set this to true"
            raise ConfigError("run.accept_changed_inputs", False, problem, remedy)
        say(f"goes on with another content of {changed}")
    # A fine-tuning asks for none.
    prompts = cache(lambda: training_prompts(LiveConfig.of(config)))
    start = next_life(
        tables,
        config=config.to_json(),
        inputs=inputs,
        checkpoints=folder.checkpoints,
        num_generated=counted_tokens(folder.counts),
        prompt_of=lambda index: prompts()[index],
        seed=config.run.seed,
    )
    if (prices := prices_of(config)) and (
        overrun := prices.settings.overrun(prices.cost(start.totals, start.num_generated))
    ):
        raise ConfigError("prices.budget", prices.settings.budget, overrun, "raise it, then --resume")
    _check_checkpoint(folder, start)
    names = {"config.toml", "metrics.jsonl", "events.jsonl", "samples"} & {
        *WRITTEN[folder.command or "train"]
    }
    if start.base.step and (gone := sorted(name for name in names if not (folder.path / name).exists())):
        say(f"warning: {folder.path} lacks {', '.join(gone)} of what it has trained: they were deleted")
    undone = [training.step for training in tables.trainings.values() if training.undone == start.life]
    num_undone = max(undone, default=start.base.step) - start.base.step
    where = start.base.checkpoint or "the model of the config"
    say(f"resumed from {where}, step {start.base.step} ({num_undone} step{'s' * (num_undone != 1)} undone)")
    return start


def inputs_of(config: RunConfig, folder: RunFolder | None = None) -> dict[str, str]:
    """Return a digest of each file that a resumed run reads again, by its path; of the rows in the folder of
    the run, which may be moved, by their name."""
    files = {
        str(file): file
        for path in files_of(config)
        for file in (path.rglob("*") if path.is_dir() else [path])
    }
    if folder and files.keys() & {folder.rows.name, str(folder.rows.resolve())}:
        files.pop(str(folder.rows.resolve()), None)
        files[folder.rows.name] = folder.rows
    return {
        name: _digest(file)
        for name, file in files.items()
        if file.is_file() and not file.name.startswith(".")
    }


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the files whose content differs, for a message."""
    return ", ".join(sorted({name for name, _ in before.items() ^ after.items()}))


def _digest(file: Path) -> str:
    """Return a digest of the content of a file; of weights, of their size and 64 blocks."""
    digest, size = blake2b(digest_size=16), file.stat().st_size
    step = max(BLOCK, size // 64) if file.suffix == ".safetensors" else BLOCK
    with file.open("rb") as opened:
        for place in range(0, size, step):
            opened.seek(place)
            digest.update(opened.read(BLOCK))
    return f"{size} {digest.hexdigest()}"


def _check_checkpoint(folder: RunFolder, start: StartingPoint) -> None:
    """Raises CheckpointError if the checkpoint of the starting point is damaged, or if all are gone."""
    missing = ", ".join(row.checkpoint for row in start.missing)
    if not start.base.checkpoint:
        if any(row.step for row in start.missing):
            raise CheckpointError(
                f"{folder.checkpoints}: the checkpoints of the run are gone ({missing}); "
                "put the folder back, or begin a new run in another --output-dir"
            )
        return
    if missing:
        say(f"checkpoints that the ledger knows are missing: {missing}")
    path = folder.checkpoints / start.base.checkpoint
    if not verify(path, remedy(path), step=start.base.step):
        raise CheckpointError(f"{path / CHECKSUMS_FILE} is missing; {remedy(path)}")
    if is_retired(path):
        raise CheckpointError(
            f"{path} has a model and no state of the optimizer, which only the newest run.keep_optimizer "
            f"checkpoints keep; put back {missing or 'a later one'}, or begin a new run in another "
            f"--output-dir with --model.path {path}"
        )


def best_evaluation(earlier: Sequence[Row], folder: RunFolder) -> tuple[float, int] | None:
    """Held-out reward and round of the best evaluation of the run's earlier lives whose checkpoint is there.

    A round that was resumed after some of its steps was evaluated with later weights than its checkpoint has.
    """
    round_of_step = {row["step"]: row["round"] for row in steps_of(earlier)}
    found = [
        (row["eval/reward"], int(row["round"]))
        for row in evaluations_of(earlier)
        if round_of_step.get(row["step"], -1) < row["round"]
        and (folder.checkpoints / checkpoint_name(int(row["round"]))).is_dir()
    ]
    return max(found, key=lambda each: each[0], default=None)


def ended(config: RunConfig, folder: RunFolder) -> RunSummary | None:
    """Return the summary of a run whose rounds are made; None: its last process did not come to its end."""
    rows, last = read_rows(folder.metrics), config.run.rounds
    evaluated = any(row["round"] == last for row in evaluations_of(rows))
    closed = folder.summary.exists() and folder.summary.stat().st_mtime >= folder.metrics.stat().st_mtime
    return Summary(earlier=rows).summary() if closed and (evaluated or not config.run.eval_every) else None


def go_on(config: RunConfig, folder: RunFolder, store: Store | None, start: StartingPoint) -> None:
    """Change the files of a run to those of a starting point, when all that it needs is ready. `config`: that
    is kept."""
    if store and start.life > 1:
        store.commit(start.opening)
        folder.config.write_text(config.toml(), encoding="utf-8")
    rewind_records(folder.metrics, folder.samples, round=start.base.round, step=start.base.step)


def dated(config: Policy, earlier: RunFolder | None = None) -> Policy:
    """Return the config with the day that the chat template tells, if it asks for the date: its own, that of
    the earlier life of the run, or today. So a prompt has the same tokens whenever it is written."""
    path, day = config.model.path, config.model.template_date
    if day is None and earlier:
        with suppress(ConfigError):  # no life of it has begun
            day = model.template_date if (model := earlier.read_config().model) else None
    if day is None and asks_for_date(path):
        day = date.fromtimestamp(clock.wall_time())
        say(f"the chat template can ask for the date: it gets {day} in all prompts (model.template_date)")
    return config.changed(model={"template_date": day})


def as_begun(config: RunConfig, earlier: RunFolder) -> RunConfig:
    """Return the config with the commits of data sets of the hub with which the run in a folder began."""
    begun = None
    with suppress(ConfigError):  # no life of it has begun
        begun = earlier.read_config().data
    return config.changed(data=config.data.pinned(begun)) if config.data and begun else config


async def rewind(parts: RunComponents, folder: Path, version: int) -> None:
    """Restore the trainer from `folder`, and load its weights into the engines as a version."""
    async with on_devices_of_trainer(parts):
        await parts.trainer.restore(folder)
        weights = await parts.trainer.publish(version)
        await asyncio.gather(*(engine.load(weights, kv="recompute") for engine in parts.engines))


@asynccontextmanager
async def on_devices_of_trainer(parts: RunComponents) -> AsyncIterator[None]:
    """Before a run engines have the devices that the trainer shares. Inside the block it has them."""
    is_shared = parts.sharing.takes_turns
    engines = parts.engines if is_shared else ()
    await asyncio.gather(*(engine.sleep() for engine in engines))
    if is_shared:
        await parts.trainer.wake()
    yield
    if is_shared:
        await parts.trainer.sleep()
    await asyncio.gather(*(engine.wake() for engine in engines))
