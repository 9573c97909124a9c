"""`tailrace sft`: supervised fine-tuning with the trainer of a run.

The loss is the cross-entropy of the responses' tokens, a mean over the tokens of a step. To the trainer it
is REINFORCE with an advantage of 1 for each given response: -A log pi, normalised by "token_mean". So
packing, LoRA, ranks, replicas, the optimizer and its checkpoints are those of `tailrace train`.

A step is a round of its own in metrics.jsonl and in the names of checkpoints. The ledger has the config and
the inputs of the run, its checkpoints, and the rows drawn before the newest one, after which a killed run
goes on.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import LiveConfig, RunConfig, load_config
from tailrace.contracts.sampling import SamplingSettings
from tailrace.controller.checkpoints import checkpoint_name, make_room
from tailrace.controller.interruption import Interruption
from tailrace.drivers.assembly.check import begin_start, check_own_trainer, fitted_to_machine
from tailrace.drivers.assembly.display import number
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.notebook import open_display
from tailrace.drivers.assembly.open import open_trainer
from tailrace.drivers.assembly.resumption import as_begun, dated, go_on, opened
from tailrace.drivers.assembly.running import RESUME, STOPPING
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.data.encoding import Tokenizer, load_tokenizer
from tailrace.drivers.trainer.batch import LossDatum, TokenLoss
from tailrace.drivers.trainer.checksums import seal_model
from tailrace.drivers.weights.settings import SharedMemorySettings
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import ConfigError, Interrupted, say
from tailrace.extras.sft.rows import CHECKED_ROWS, ResponseRows
from tailrace.ledger.base import FORMAT, CheckpointRow, RunRow, Transaction
from tailrace.ledger.recovery import StartingPoint
from tailrace.ledger.store import LEDGER_FILE, Store
from tailrace.model_folder import end_texts_with
from tailrace.record.events import RoundEnded, RoundStarted, Row
from tailrace.record.figures import steps_of
from tailrace.record.metrics import MetricsWriter, read_rows
from tailrace.record.summary import FirstLast
from tailrace.types import Sample

CROSS_ENTROPY = AlgorithmSettings(loss="reinforce", normalize="token_mean", old_policy="recorded")
"""The loss of samples whose advantage is 1."""


def sft(
    config: Path,
    /,
    *,
    output_dir: Path,
    resume: bool = False,
    verbose: bool = False,
    overrides: Mapping[str, str],
) -> None:
    """Fine-tune a model on the responses of [data]. `tailrace train --model.path OUTPUT_DIR` goes on.

    Args:
        config: a TOML file; [sft] has the steps, [trainer] the learning rate.
        output_dir: for all files of the run.
        resume: continue the run in the output directory, if one has begun there.
        verbose: print every figure of a step, in a line of any width.
    """
    if verbose:
        overrides = {**overrides, "record.verbose": "true"}
    fine_tune(load_config(config, overrides), output_dir, resume=resume, interruption=Interruption())


def fine_tune(
    loaded: RunConfig, output_dir: Path, *, resume: bool, interruption: Interruption
) -> FirstLast | None:
    """Fine-tune as `sft`. Return the held-out loss. `interruption`: ends it in order."""
    folder = RunFolder(output_dir, has_ledger=loaded.ledger.is_stored)
    folder.claim("sft", only_check=True)
    if resume and folder.newest_checkpoint() and not (folder.path / LEDGER_FILE).exists():
        problem, remedy = "it has no {} to go on from", f"begin another with --model.path {output_dir}"
        raise ConfigError("--output-dir", str(output_dir), problem.format(LEDGER_FILE), remedy)
    loaded = as_begun(loaded, folder) if resume else loaded
    check_own_trainer(at_work := _at_work(loaded))
    at_work = dated(at_work, folder if resume else None)
    loaded = loaded.changed(model=at_work.model, data=at_work.data)
    begin_start(loaded)
    tokenizer = load_tokenizer(at_work.model.path, at_work.model.template_date)
    rows = ResponseRows(at_work, tokenizer, "train")
    checked, _, skipped = rows.take(0, CHECKED_ROWS, once=True)
    held_out = ResponseRows(at_work, tokenizer, "eval").take(0, loaded.sft.eval_rows, once=True)[0]
    for remark in rows.remarks:
        say(f"warning: {remark}")
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        say(f"warning: beside the first {len(checked)} rows these are skipped: {reasons}")
    longest = max(each.num_sequence_tokens for each in (*checked, *held_out))
    fitted = fitted_to_machine(_at_work(loaded, longest), prompt_tokens=1, overlaps=False).config
    loaded = loaded.changed(engine=fitted.engine, trainer=fitted.trainer)
    received = signals_received(interruption.request, RESUME)
    with folder.locked("sft"), folder.shortage_explained(), received, opened(loaded, folder, resume) as begun:
        training = _train(loaded, longest, folder, tokenizer, rows, held_out, interruption, *begun)
        if newest := clock.run(training, virtual=False):
            folder.export(newest)
    if (signal := interruption.signal) is not None:
        saved = f"saved {newest}, its model in {folder.model}; --resume continues from there"
        said = saved if newest else "before the first step: there are no weights to save; start it again"
        raise Interrupted(f"{interruption.name}: {said}", signal)
    losses = [row["eval/loss"] for row in read_rows(folder.metrics) if "eval/loss" in row]
    loss = FirstLast(losses[0], losses[-1]) if losses else None
    if loss:
        print(f"held-out loss {loss.first:.4f} -> {loss.last:.4f} in {loaded.sft.steps} steps")
    print(f"metrics   {folder.metrics}\nmodel     {folder.model}")
    return loss


def _at_work(config: RunConfig, longest: int = 1) -> LiveConfig:
    """The config of the trainer. The run's keeps the user's. `longest`: tokens of the longest sequence."""
    changed = config.changed(
        run={"checkpoint_every": config.sft.checkpoint_every},
        trainer={"decay_steps": config.trainer.decay_steps or config.sft.steps},
        algorithm=CROSS_ENTROPY,
        sampling=SamplingSettings(max_completion_tokens=longest),
        weights=SharedMemorySettings(probe_every=0),
    )
    return LiveConfig.of(changed)


async def _train(
    config: RunConfig,
    longest: int,
    folder: RunFolder,
    tokenizer: Tokenizer,
    rows: ResponseRows,
    held_out: Sequence[Sample],
    interruption: Interruption,
    store: Store | None,
    start: StartingPoint,
) -> Path | None:
    """Train from a starting point to the last step, or to the step in which a signal comes. Return the newest
    checkpoint; None: there is none. `longest`: tokens of the longest sequence."""
    settings, base, every = config.sft, start.base, config.sft.checkpoint_every
    step, drawn = base.step, start.run.num_drawn
    newest = folder.checkpoints / base.checkpoint if base.checkpoint else None
    if step >= settings.steps:
        return newest
    if start.missing:  # the ledger has the rows before the newest checkpoint, which was removed
        drawn = 0
        for _ in range(step):
            drawn = rows.take(drawn, settings.rows_per_step)[1]
    waits = partial(clock.who_waits, asyncio.get_running_loop())
    display = open_display(settings.steps, waits, config.record, start_s=clock.now())
    async with open_trainer(_at_work(config, longest), folder.path, tokenizer) as opened_trainer:
        trainer = cast(RemoteTrainer, opened_trainer)
        if newest:
            await trainer.restore(newest)
        go_on(config, folder, store, start)
        with closing(MetricsWriter(folder.metrics)) as metrics, closing(display):
            while True:
                last = step == settings.steps or interruption.signal is not None
                if interruption.signal is not None:
                    display.stopping(STOPPING.format(interruption.name))
                if settings.eval_every and (step % settings.eval_every == 0 or step == settings.steps):
                    loss = await _held_out_loss(trainer, held_out)
                    metrics.append({**_place(step, step), "eval/loss": loss})
                    display.say(f"Evaluation | Step {step} | Loss {number(loss)} | {len(held_out)} rows")
                if step != base.step and (last or (every and step % every == 0)):
                    newest = folder.checkpoints / checkpoint_name(step)
                    await (await trainer.save(newest))
                    seal_model(newest, newest, end_texts_with(newest, rows.taught_ends))
                    if store:
                        saved = CheckpointRow(start.life, step, 0, step, newest.name, [])
                        store.commit(Transaction([RunRow(FORMAT, drawn, 0), saved]))
                    await make_room(trainer, newest, config.run)
                if last:
                    break
                display.on(RoundStarted(began_s := clock.now(), step, 0))
                samples, drawn, _ = rows.take(drawn, settings.rows_per_step)
                await trainer.accumulate([[each] for each in samples], version=0)
                stats = await trainer.step()
                row = {**_place(stats.num_steps, step), "time/step": clock.now() - began_s}
                row |= {"rows/drawn": drawn, "rows/skipped": drawn - stats.num_steps * settings.rows_per_step}
                names = ("loss", "grad_norm", "learning_rate", "entropy")
                row |= {name: getattr(stats, name) for name in names}
                row |= {"tokens/trained": stats.num_tokens, "samples/trained": len(stats.samples)}
                metrics.append(row)
                display.on(RoundEnded(row["time"], step))
                display.on(row)
                step = stats.num_steps
    trained = sum(row["tokens/trained"] for row in steps_of(read_rows(folder.metrics)))
    summary = {"steps": step, "rows": {"drawn": drawn}, "tokens": {"trained": trained}}
    folder.summary.write_bytes(msgspec.json.encode(summary))
    return newest


def _place(step: int, round: int) -> Row:
    return {"step": step, "round": round, "time": clock.now(), "wall_time": clock.wall_time()}


async def _held_out_loss(trainer: RemoteTrainer, samples: Sequence[Sample]) -> float:
    """Return the mean cross-entropy of the responses' tokens."""
    data = [
        LossDatum(
            [*each.prompt.ids, *each.completion_ids],
            [0.0] * (len(each.prompt.ids) - 1) + [1.0] * each.num_tokens,
        )
        for each in samples
    ]
    outputs = await trainer.run_tokens(data, TokenLoss("cross_entropy"), with_gradient=False)
    return sum(sum(each.losses) for each in outputs) / sum(each.num_tokens for each in samples)
