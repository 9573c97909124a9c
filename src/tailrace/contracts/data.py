"""The contract of the data room: prompts by index, in an order that the seed fixes.

A finite number of rows is repeated in epochs. Each epoch has its own permutation, a function of (seed,
epoch), so the row at any index is found without visiting the earlier ones.
"""

from typing import Literal, Protocol

from tailrace.contracts.permutation import permutation
from tailrace.types import Prompt

HELD_OUT_ONE_IN = 16
"""Share of the different prompts that is held out for evaluation when there is no evaluation set."""

Split = Literal["train", "eval"]
"""Name of one of the two disjoint sets of prompts."""


class Prompts(Protocol):
    """An endless order of prompts, fixed by the seed. It has no state: one index is the cursor of a run."""

    def __getitem__(self, index: int) -> Prompt:
        """Return prompt number `index` of the run. Each call, in each process, returns the same prompt.
        Raises a BadRow if the row has no usable prompt."""


class Epochs:
    """Maps an index of the endless order to a row number."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        self._epoch, self._order = -1, permutation((), 0)

    def row_at(self, index: int) -> int:
        """Return the row number at `index`."""
        epoch, place = divmod(index, self._num_rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation((self._seed, epoch), self._num_rows)
        return self._order[place]
