"""`tailrace sft`: supervised fine-tuning with the trainer of a run.

The loss is the cross-entropy of the responses' tokens, a mean over the tokens of a step. To the trainer it
is REINFORCE with an advantage of 1 for each given response: -A log pi, normalised by "token_mean". So
packing, LoRA, ranks, replicas, the optimizer and its checkpoints are those of `tailrace train`.

A step is a round of its own in metrics.jsonl and in the names of checkpoints. Which rows a step took follows
from its number and the data, so a killed run repeats what it lost. The metrics only save counting them again.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from signal import Signals
from typing import cast

from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import RunConfig, check_resumable, load_config, with_model_folder
from tailrace.contracts.sampling import SamplingSettings
from tailrace.controller.checkpoints import checkpoint_name, delete_old
from tailrace.controller.interruption import Interruption
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.live import begin_start, check_own_trainer, dated, fitted_to_machine
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.assembly.workers import open_trainer
from tailrace.drivers.data.encoding import Tokenizer, load_tokenizer
from tailrace.drivers.trainer.batch import LossDatum, TokenLoss
from tailrace.drivers.trainer.checksums import remedy, verify
from tailrace.drivers.weights.settings import SharedMemorySettings
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import CheckpointError, ConfigError, Interrupted, say
from tailrace.extras.sft.rows import CHECKED_ROWS, ResponseRows
from tailrace.ledger.store import LEDGER_FILE
from tailrace.record.figures import Row, steps_of
from tailrace.record.metrics import MetricsWriter, read_rows
from tailrace.record.rewind import rewind_records
from tailrace.types import Sample

CROSS_ENTROPY = AlgorithmSettings(loss="reinforce", normalize="token_mean", old_policy="recorded")
"""The loss of samples whose advantage is 1."""


def sft(config: Path, /, *, output_dir: Path, resume: bool = False, overrides: Mapping[str, str]) -> None:
    """Fine-tune a model on the responses of [data]. `tailrace train --model.path OUTPUT_DIR/model` goes on.

    Args:
        config: a TOML file; [sft] has the steps, [trainer] the learning rate.
        output_dir: for all files of the run.
        resume: continue the run in the output directory, if one has begun there.
    """
    folder = RunFolder(output_dir)
    folder.claim("sft", only_check=True)
    loaded = with_model_folder(load_config(config, overrides))
    every = {"checkpoint_every": loaded.sft.checkpoint_every}
    loaded = loaded.model_copy(update={"run": loaded.run.model_copy(update=every)})
    check_own_trainer(loaded)
    loaded, interruption = dated(loaded, folder if resume else None), Interruption()
    assert loaded.model
    begin_start(loaded)
    tokenizer = load_tokenizer(loaded.model.path, loaded.model.template_date)
    rows = ResponseRows(loaded, tokenizer, "train")
    checked, _, skipped = rows.take(0, CHECKED_ROWS, once=True)
    held_out = ResponseRows(loaded, tokenizer, "eval").take(0, loaded.sft.eval_rows, once=True)[0]
    for remark in rows.remarks:
        say(f"warning: {remark}")
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        say(f"warning: beside the first {len(checked)} rows these are skipped: {reasons}")
    longest = max(each.num_sequence_tokens for each in (*checked, *held_out))
    changes = {
        "algorithm": CROSS_ENTROPY,
        "sampling": SamplingSettings(max_completion_tokens=longest),
        "weights": SharedMemorySettings(probe_every=0),
    }
    loaded = fitted_to_machine(loaded.model_copy(update=changes), prompt_tokens=1, overlaps=False).config
    with folder.locked("sft"), folder.shortage_explained(), signals_received(interruption.request):
        step = _begun(loaded, folder, resume)
        folder.config.write_text(loaded.toml(), encoding="utf-8")
        if step < loaded.sft.steps:
            rewind_records(folder.metrics, folder.samples, round=step, step=step)
            training = _train(loaded, folder, tokenizer, rows, held_out, interruption)
            clock.run(training, virtual=False)
        newest, signal = folder.newest_checkpoint(), interruption.signal
        if newest:
            folder.export(newest, rows.taught_ends)
    if signal is not None:
        saved = f"saved {newest}, its model in {folder.model}; --resume continues from there"
        said = saved if newest else "before the first step: there are no weights to save; start it again"
        raise Interrupted(f"{Signals(signal).name}: {said}", signal)
    losses = [row["eval/loss"] for row in read_rows(folder.metrics) if "eval/loss" in row]
    if losses:
        print(f"held-out loss {losses[0]:.4f} -> {losses[-1]:.4f} in {loaded.sft.steps} steps")
    print(f"metrics   {folder.metrics}\nmodel     {folder.model}")


def _begun(config: RunConfig, folder: RunFolder, resume: bool) -> int:
    """Return the steps of the checkpoint to go on from; 0: the run begins. Raises a ConfigError if the folder
    holds another run, a CheckpointError if the checkpoint is damaged."""
    place, newest = ("--output-dir", str(folder.path)), folder.newest_checkpoint()
    if (folder.path / LEDGER_FILE).exists():
        raise ConfigError(*place, "it holds a run of tailrace train", "choose another")
    if newest is None:
        folder.clear()
        return 0
    if not resume:
        raise ConfigError(*place, "it holds a run already", "add --resume, or choose another")
    check_resumable(folder.read_config().to_json(), config)
    if not verify(newest, remedy(newest), step=(step := _step_of(newest))):
        raise CheckpointError(f"{newest} has no checksums; {remedy(newest)}")
    return step


async def _train(
    config: RunConfig,
    folder: RunFolder,
    tokenizer: Tokenizer,
    rows: ResponseRows,
    held_out: Sequence[Sample],
    interruption: Interruption,
) -> None:
    """Train from the newest checkpoint to the last step, or to the step in which a signal comes."""
    settings, newest = config.sft, folder.newest_checkpoint()
    earlier = (steps_of(read_rows(folder.metrics)) or [{}])[-1]
    drawn, num_skipped = (int(earlier.get(name, 0)) for name in ("rows/drawn", "rows/skipped"))
    step = _step_of(newest) if newest else 0
    if step and (earlier.get("step") != step or drawn - num_skipped != step * settings.rows_per_step):
        say(f"{folder.metrics} does not tell the rows of the first {step} steps: they are counted again")
        drawn = num_skipped = 0
        for _ in range(step):
            _, drawn, skipped = rows.take(drawn, settings.rows_per_step)
            num_skipped += skipped.total()
    with closing(MetricsWriter(folder.metrics)) as metrics:
        async with open_trainer(config, folder.path, tokenizer) as opened:
            trainer = cast(RemoteTrainer, opened)
            if newest:
                await trainer.restore(newest)
            while True:
                last = step == settings.steps or interruption.signal is not None
                if settings.eval_every and (step % settings.eval_every == 0 or step == settings.steps):
                    loss = await _held_out_loss(trainer, held_out)
                    metrics.append({"step": step, "round": step, "eval/loss": loss})
                path, every = folder.checkpoints / checkpoint_name(step), settings.checkpoint_every
                if step and path != newest and (last or (every and step % every == 0)):
                    await (await trainer.save(path))
                    newest = path
                    delete_old(newest, config.run.keep_checkpoints)
                if last:
                    return
                samples, drawn, skipped = rows.take(drawn, settings.rows_per_step)
                num_skipped += skipped.total()
                await trainer.accumulate([[each] for each in samples], version=0)
                stats = await trainer.step()
                row: Row = {
                    "step": stats.num_steps,
                    "round": step,
                    "rows/drawn": drawn,
                    "rows/skipped": num_skipped,
                }
                row |= {
                    name: getattr(stats, name) for name in ("loss", "grad_norm", "learning_rate", "entropy")
                }
                row |= {"tokens/trained": stats.num_tokens, "samples/trained": len(stats.samples)}
                metrics.append({**row, "wall_time": clock.wall_time()})
                step = stats.num_steps


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


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("round_"))
