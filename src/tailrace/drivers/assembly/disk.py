"""The disk that the checkpoints of a run need."""

from dataclasses import dataclass

from tailrace.config import PolicyConfig
from tailrace.contracts.memory import gib
from tailrace.drivers.kinds.base import trainer_kind


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Bytes of the checkpoints of a run that nothing interrupts: at its end, and while the last is written.
    The exported model is hard links to the newest one, where the file system has them."""

    end: int
    peak: int

    def words(self) -> str:
        """The need in a sentence."""
        return f"checkpoints take {gib(self.end)} at the end, {gib(self.peak)} while the last one is written"


def disk_need(config: PolicyConfig) -> DiskNeed:
    """Estimate the disk that the checkpoints of a checked config need."""
    run, (model, state) = config.run, trainer_kind(config).checkpoint_bytes(config)
    keep, every = run.keep_checkpoints, run.checkpoint_every
    num_saved = -(-run.rounds // every) if every else 1

    def held(num: int) -> int:
        """Bytes after so many checkpoints that have an optimizer step."""
        has_start = every > 0 and (num == 0 or keep == 0 or run.keep_optimizer != 1)
        num_models = min(num + has_start, keep or num + 1)
        num_states = min(num_models, num, run.keep_optimizer or num)
        has_best = run.eval_every > 0 and num_models < num
        return (num_models + has_best) * model + num_states * state

    return DiskNeed(held(num_saved), held(num_saved - 1) + model + state)
