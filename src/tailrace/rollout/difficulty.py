"""Difficulty pools: rows of which all responses were right, or all wrong, are drawn less.

The pools and their settings are those of prime-rl's buffer. There a fraction of the rows comes back when a
run is resumed; here it does so in each epoch. The pool of a row is a function of the groups that have ended,
so the ledger is its only record.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import fmean

from tailrace.contracts.data import PoolSettings
from tailrace.types import Group, Prompt


class DifficultyPools:
    """The mean reward of each row, from its newest prompt that was trained or filtered.

    Args:
        rewards: mean reward of each such prompt of earlier processes, by its index.
        prompt_of: the prompt of an index.
    """

    def __init__(
        self,
        settings: PoolSettings,
        seed: int,
        rewards: Mapping[int, float],
        prompt_of: Callable[[int], Prompt],
    ) -> None:
        self.settings, self._seed = settings, seed
        self._rewards: dict[int, tuple[int, float]] = {}
        """Index of the prompt, and its mean reward, by row number."""
        self.sizes = Counter[str]()
        """Rows in each pool."""
        for index in rewards if settings.is_used else ():
            self._note(prompt_of(index), rewards[index])

    def observe(self, group: Group) -> None:
        """Note the rewards of a group that has ended, if it was trained or filtered."""
        rewards = [sample.reward for sample in group.trainable if sample.reward is not None]
        if self.settings.is_used and group.fate != "dropped" and rewards:
            self._note(group.prompt, fmean(rewards))

    def passes_over(self, prompt: Prompt) -> str:
        """Return why a prompt of the order is not generated, as the reason of its group; empty: it is."""
        if not (pool := self._pool_of(prompt.row_number)):
            return ""
        fraction = self.settings.easy_fraction if pool == "easy" else self.settings.hard_fraction
        is_drawn = random.Random(f"pool {self._seed} {prompt.index}").random() < fraction
        return "" if is_drawn else f"{pool} pool"

    def _pool_of(self, row: int | None) -> str:
        return self.settings.pool_of(self._rewards[row][1]) if row in self._rewards else ""

    def _note(self, prompt: Prompt, reward: float) -> None:
        row = prompt.row_number
        if row is None or (row in self._rewards and self._rewards[row][0] > prompt.index):
            return  # of an earlier epoch than what is known
        before = self._pool_of(row)
        self._rewards[row] = prompt.index, reward
        self.sizes[before] -= 1
        self.sizes[self._pool_of(row)] += 1
