"""The tensor-parallel size of the engines, chosen online by their preemptions (RollPacker 4.2).

An engine preempts requests when its KV cache is full. A group of twice as many devices holds the weights once
and has more than twice the cache; its decode steps communicate more.
"""

import asyncio
from collections.abc import Sequence

from tailrace.engine.base import Engine
from tailrace.rollout.progress import RolloutProgress

RISE = 1.05
"""A round with more preemptions than so many times those of the last round of its kind doubles the size."""
CALM_ROUNDS = 4
"""So many rounds in succession without a preemption halve the size."""


class TensorParallelRule:
    """The paper's rule. There are two kinds of rounds, races and rounds without a race, and preemptions are
    compared with the last round of the same kind. A rise from zero counts as a rise. The size changes only
    after a round without a race: with tail batching, after a long round.

    Args:
        largest: the largest width.
    """

    def __init__(self, largest: int) -> None:
        self.width = 1
        """Of the next round, as a multiple of the smallest tensor-parallel size."""
        self._largest = largest
        self._last: dict[bool, int] = {}
        self._calm = 0
        self._rose = False

    def round_ended(self, num_preempted: int, *, is_race: bool) -> int:
        """Count a round; return the width of the next one."""
        last = self._last.get(is_race)
        self._rose |= last is not None and num_preempted > RISE * last
        self._last[is_race] = num_preempted
        self._calm = 0 if num_preempted else self._calm + 1
        if is_race:
            return self.width
        if self._rose:
            self.width = min(2 * self.width, self._largest)
        elif self._calm >= CALM_ROUNDS:
            self.width = max(self.width // 2, 1)
            self._calm = 0
        self._rose = False
        return self.width


class ParallelismPlanner:
    """Applies the rule to the engines between two rounds.

    Args:
        largest: the largest width; 1: the size is fixed.
    """

    def __init__(self, engines: Sequence[Engine], progress: RolloutProgress, largest: int) -> None:
        self.engines, self._progress, self._largest = engines, progress, largest
        self._rule = TensorParallelRule(largest)
        self._before = self._num_preempted()

    async def round_ended(self) -> None:
        """Choose the size for the next round, and restart engines if it is another one."""
        if self._largest == 1:
            return
        before, self._before = self._before, self._num_preempted()
        width = self._rule.round_ended(self._before - before, is_race=self._progress.is_race)
        wanted = [0 if number % width else width for number in range(len(self.engines))]
        changed = [pair for pair in zip(self.engines, wanted, strict=True) if pair[0].width != pair[1]]
        # All give their devices up before one takes those of another.
        await asyncio.gather(*(engine.regroup(0) for engine, _ in changed))
        await asyncio.gather(*(engine.regroup(width) for engine, width in changed if width))

    def _num_preempted(self) -> int:
        return sum(engine.usage().num_preempted for engine in self.engines)
