"""Which part of some intervals lies in others."""

from collections.abc import Iterable

import numpy as np

from tailrace.fit.least_squares import Array
from tailrace.record.events import Interval
from tailrace.record.intervals import union


class Busy:
    """The times at which at least one of some intervals lasts."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._starts, self._ends = union([(each.start_s, each.end_s) for each in intervals]).T
        self._before = np.concatenate([[0.0], np.cumsum(self._ends - self._starts)])

    def seconds(self, starts: Array, ends: Array) -> Array:
        """Return the busy seconds between each start and end."""
        return self._until(ends) - self._until(starts)

    def _until(self, times: Array) -> Array:
        if not len(self._starts):
            return np.zeros(len(times))
        number = np.searchsorted(self._starts, times, side="right")
        inside = np.minimum(times, self._ends[number - 1]) - self._starts[number - 1]
        before = self._before[np.maximum(number - 1, 0)]
        return np.where(number > 0, before + inside, 0.0)
