"""The contract of the data room: prompts by index, in an order that the seed fixes.

A finite number of rows is repeated in epochs. Each epoch has its own permutation, a function of (seed,
epoch), so the row at any index is found without visiting the earlier ones.
"""

from typing import Literal, Protocol

from pydantic import Field, model_validator

from tailrace.contracts.permutation import permutation
from tailrace.settings import Resumable, Settings
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


class PoolSettings(Settings):
    """Difficulty pools, by the names of prime-rl's buffer. A row is in the pool of the mean reward of its
    responses when it was generated last, and leaves it when it is drawn again with another one. A prompt that
    a pool passes over is a dropped group, "easy pool" or "hard pool". `algorithm.filter = "zero_variance"` is
    its `online_difficulty_filtering`, and SkyRL's `dynamic_sampling.type = "filter"`."""

    easy_threshold: Resumable[float | None] = Field(default=None, allow_inf_nan=False)
    """Mean reward from which a row is in the easy pool. None: there is none."""
    hard_threshold: Resumable[float | None] = Field(default=None, allow_inf_nan=False)
    """Mean reward up to which a row is in the hard pool. None: there is none."""
    easy_fraction: Resumable[float] = Field(default=0.0, ge=0, le=1)
    """Share of the rows of the easy pool that an epoch draws, chosen by the seed. 0: none is drawn again."""
    hard_fraction: Resumable[float] = Field(default=0.0, ge=0, le=1)
    """Share of the rows of the hard pool that an epoch draws."""

    @property
    def is_used(self) -> bool:
        return self.easy_threshold is not None or self.hard_threshold is not None

    def pool_of(self, reward: float) -> str:
        """Return "easy", "hard", or "" for no pool."""
        if self.easy_threshold is not None and reward >= self.easy_threshold:
            return "easy"
        return "hard" if self.hard_threshold is not None and reward <= self.hard_threshold else ""

    @model_validator(mode="after")
    def _check_thresholds(self) -> "PoolSettings":
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and hard >= easy:
            raise ValueError(f"hard_threshold = {hard:g} is not below easy_threshold = {easy:g}")
        for pool in ("easy", "hard"):
            if getattr(self, f"{pool}_fraction") and getattr(self, f"{pool}_threshold") is None:
                raise ValueError(f"{pool}_fraction needs {pool}_threshold")
        return self
