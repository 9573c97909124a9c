"""`tailrace sft`: supervised fine-tuning with the trainer of a run.

The loss is the cross-entropy of the responses' tokens, a mean over the tokens of a step. To the trainer it
is REINFORCE with an advantage of 1 for each given response: -A log pi, normalised by "token_mean". So
packing, LoRA, ranks, replicas, the optimizer and its checkpoints are those of `tailrace train`.

A step is a round of its own in metrics.jsonl and in the names of checkpoints. A checkpoint is complete or not
there, and which rows a step took follows from the metrics, so a killed run repeats what it lost.
"""

import shutil
from collections.abc import Awaitable, Mapping
from pathlib import Path
from signal import Signals
from typing import cast

import msgspec

from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import RunConfig, check_resumable, load_config, with_model_folder
from tailrace.contracts.sampling import SamplingSettings
from tailrace.controller.checkpoints import checkpoint_name
from tailrace.controller.interruption import Interruption
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.live import begin_start, check_policy, fitted_to_machine, say
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.assembly.workers import open_trainer
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.kinds.base import trainer_kind
from tailrace.drivers.trainer.batch import LossDatum, TokenLoss
from tailrace.drivers.trainer.checksums import remedy, verify
from tailrace.drivers.weights.settings import SharedMemorySettings
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import CheckpointError, ConfigError, Interrupted
from tailrace.extras.sft.rows import CHECKED_ROWS, ResponseRows
from tailrace.ledger.store import LEDGER_FILE
from tailrace.record.figures import Row
from tailrace.record.metrics import read_rows
from tailrace.record.rewind import rewind_records
from tailrace.types import Sample

CROSS_ENTROPY = AlgorithmSettings(loss="reinforce", normalize="token_mean", old_policy="recorded")
"""The loss of samples whose advantage is 1."""
FIXED = ("response_column", "rows_per_step")
"""Keys of [sft] that a resumed run must have as before."""


def sft(
    config: Path,
    /,
    *,
    output_dir: Path,
    resume: bool = False,
    overrides: Mapping[str, str],
) -> None:
    """Fine-tune a model on the responses of [data]. `tailrace train --model.path OUTPUT_DIR/model` goes on.

    Args:
        config: a TOML file; [sft] has the steps, [trainer] the learning rate.
        output_dir: for all files of the run.
        resume: continue the run in the output directory, if one has begun there.
    """
    loaded = with_model_folder(load_config(config, overrides))
    for name in ("model", "data"):
        if getattr(loaded, name) is None:
            raise ConfigError(name, None, "this command needs the section", f"add [{name}] to the config")
    if not trainer_kind(loaded).is_local:
        problem = "supervised fine-tuning is the work of the run's own trainer"
        raise ConfigError("trainer.kind", loaded.trainer.kind, problem, 'write "torch"')
    begin_start(loaded)
    folder, interruption = RunFolder(output_dir), Interruption()
    with folder.locked(), folder.shortage_explained(), signals_received(interruption.request):
        _Run(loaded, folder, interruption, resume).run()


class _Run:
    """One process of a run.

    Raises a ConfigError if data and model do not fit, or another run is in the folder.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, interruption: Interruption, resume: bool
    ) -> None:
        assert config.model
        self._folder, self._interruption, self._settings = folder, interruption, config.sft
        self._tokenizer = load_tokenizer(config.model.path)
        self._rows = ResponseRows(config, self._tokenizer, "train")
        found = self._rows.take(0, CHECKED_ROWS)
        held_out = ResponseRows(config, self._tokenizer, "eval") if self._settings.eval_every else None
        self._held_out = held_out.take(0, self._settings.eval_rows).samples if held_out else []
        if found.skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in found.skipped.items())
            say(f"warning: of the first {found.num_drawn} rows these are skipped: {reasons}")
        longest = max(each.num_sequence_tokens for each in (*found.samples, *self._held_out))
        changes = {
            "algorithm": CROSS_ENTROPY,
            "sampling": SamplingSettings(max_completion_tokens=longest),
            "weights": SharedMemorySettings(probe_every=0),
        }
        config = config.model_copy(update=changes)
        check_policy(config)
        self._newest = self._earlier(config, resume)
        self._config = fitted_to_machine(config, prompt_tokens=1, overlaps=False).config

    def _earlier(self, config: RunConfig, resume: bool) -> Path | None:
        """Return the checkpoint to go on from; None: the run begins."""
        folder, newest = self._folder, self._folder.newest_checkpoint()
        place = ("--output-dir", str(folder.path))
        if (folder.path / LEDGER_FILE).exists():
            raise ConfigError(*place, "it holds a run of tailrace train", "choose another")
        if newest is None:
            folder.clear()
            return None
        if not resume:
            raise ConfigError(*place, "it holds a run already", "add --resume, or choose another")
        before = folder.read_config()
        check_resumable(before.to_json(), config)
        for key in FIXED:
            if (old := getattr(before.sft, key)) != (new := getattr(config.sft, key)):
                problem = f"the run was begun with {old!r}"
                raise ConfigError(f"sft.{key}", new, problem, "change it back, or begin a new run")
        if not verify(newest, remedy(newest), step=_step_of(newest)):
            raise CheckpointError(f"{newest} has no checksums; {remedy(newest)}")
        return newest

    def run(self) -> None:
        """Train to the last step, and export the model."""
        folder = self._folder
        folder.config.write_text(self._config.toml(), encoding="utf-8")
        step = _step_of(self._newest) if self._newest else 0
        if step < self._settings.steps:
            rewind_records(folder.metrics, folder.samples, round=step, step=step)
            clock.run(self._train(step), virtual=False)
        if self._newest:
            folder.export(self._newest)
        if (signal := self._interruption.signal) is not None:
            saved = f"saved {self._newest}, its model in {folder.model}; --resume continues from there"
            said = saved if self._newest else "before the first step: no weights to save; start it again"
            raise Interrupted(f"{Signals(signal).name}: {said}", signal)
        rows = read_rows(folder.metrics)
        losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
        if losses:
            print(f"held-out loss {losses[0]:.4f} -> {losses[-1]:.4f} in {self._settings.steps} steps")
        print(f"metrics   {folder.metrics}\nmodel     {folder.model}")

    async def _train(self, step: int) -> None:
        settings, folder = self._settings, self._folder
        earlier = [row for row in read_rows(folder.metrics) if "loss" in row]
        drawn, skipped = (
            (int(earlier[-1]["rows/drawn"]), int(earlier[-1]["rows/skipped"])) if earlier else (0, 0)
        )
        writing: Awaitable[None] | None = None
        async with open_trainer(self._config, folder.path, self._tokenizer) as opened:
            trainer = cast(RemoteTrainer, opened)
            if self._newest:
                await trainer.restore(self._newest)
            while True:
                last = step == settings.steps or self._interruption.signal is not None
                if self._held_out and (step % settings.eval_every == 0 or step == settings.steps):
                    self._write({"step": step, "round": step, "eval/loss": await self._loss(trainer)})
                every = settings.checkpoint_every
                if step and (last or (every and step % every == 0)):
                    if writing:
                        await writing
                    path = folder.checkpoints / checkpoint_name(step)
                    if path != self._newest:
                        writing = await trainer.save(path)
                        self._newest = path
                if last:
                    break
                taken = self._rows.take(drawn, settings.rows_per_step)
                drawn, skipped = taken.num_drawn, skipped + taken.skipped.total()
                await trainer.accumulate([[each] for each in taken.samples], version=0)
                stats = await trainer.step()
                self._write(
                    {
                        "step": stats.num_steps,
                        "round": step,
                        "loss": stats.loss,
                        "grad_norm": stats.grad_norm,
                        "learning_rate": stats.learning_rate,
                        "entropy": stats.entropy,
                        "tokens/trained": stats.num_tokens,
                        "samples/trained": len(stats.samples),
                        "rows/drawn": drawn,
                        "rows/skipped": skipped,
                        "wall_time": clock.wall_time(),
                    }
                )
                step = stats.num_steps
            if writing:
                await writing
        self._delete_old()

    async def _loss(self, trainer: RemoteTrainer) -> float:
        """Return the mean cross-entropy of the held-out responses' tokens."""
        data = [_datum(sample) for sample in self._held_out]
        outputs = await trainer.run_tokens(data, TokenLoss("cross_entropy"), with_gradient=False)
        return sum(sum(each.losses) for each in outputs) / sum(each.num_tokens for each in self._held_out)

    def _write(self, row: Row) -> None:
        with self._folder.metrics.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")

    def _delete_old(self) -> None:
        keep = self._config.run.keep_checkpoints
        for old in sorted(self._folder.checkpoints.glob("round_*"))[:-keep] if keep else ():
            shutil.rmtree(old)


def _datum(sample: Sample) -> LossDatum:
    prompt = sample.prompt.ids
    weights = [0.0] * (len(prompt) - 1) + [1.0] * sample.num_tokens
    return LossDatum([*prompt, *sample.completion_ids], weights)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("round_"))
