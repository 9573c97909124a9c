"""What a helper is to a trainer: another process with its weights, which computes while CPUs are lent."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tailrace.trainer.wire import TrainingSample


class Helper(Protocol):
    """It finds the weights where the trainer keeps them, and adds to a sum of gradients of its own."""

    gradient: Tensor
    """[number of parameters]: its sum, in memory that both see; the trainer's to read and to empty once it
    has finished."""

    def begin(self, samples: Sequence[TrainingSample]) -> None:
        """Have it compute them, after what it was given before. Returns at once."""

    def finish(self) -> list[float]:
        """Wait until it has computed all it was given since the last time. Returns what it counted
        (`Tally.figures`); nothing, if it was given nothing."""
