"""Sets of points in time, as sorted intervals that do not overlap: arrays of shape [n, 2]."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Intervals: TypeAlias = NDArray[np.float64]
EMPTY: Intervals = np.zeros((0, 2))


def union(pairs: Intervals | Sequence[tuple[float, float]]) -> Intervals:
    """The set that intervals in any order cover. Those of no length are left out."""
    given = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    given = given[given[:, 1] > given[:, 0]]
    if not len(given):
        return EMPTY
    given = given[np.argsort(given[:, 0], kind="stable")]
    reach = np.maximum.accumulate(given[:, 1])
    first = np.concatenate(([True], given[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((given[first, 0], reach[last]), axis=1)


def union_of(sets: Iterable[Intervals]) -> Intervals:
    """The set that several sets cover together."""
    return union(np.concatenate([EMPTY, *sets]))


def complement(of: Intervals, within: tuple[float, float]) -> Intervals:
    """Return the parts of one interval that a set does not cover."""
    inner = of[(of[:, 1] > within[0]) & (of[:, 0] < within[1])]
    starts = np.concatenate(([within[0]], inner[:, 1]))
    ends = np.concatenate((inner[:, 0], [within[1]]))
    found: Intervals = np.stack((starts, ends), axis=1)[ends > starts]
    return found


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of two sets."""
    if not len(one) or not len(other):
        return EMPTY
    first = np.searchsorted(other[:, 1], one[:, 0], side="right")
    behind = np.searchsorted(other[:, 0], one[:, 1], side="left")
    counts = np.maximum(0, behind - first)
    mine = np.repeat(np.arange(len(one)), counts)
    theirs = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    starts = np.maximum(one[mine, 0], other[theirs, 0])
    ends = np.minimum(one[mine, 1], other[theirs, 1])
    found: Intervals = np.stack((starts, ends), axis=1)[ends > starts]
    return found


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """Return the first set without the second."""
    return intersect(one, complement(other, (-np.inf, np.inf)))


def at_most(pairs: Intervals, limit: float) -> Intervals:
    """Return the times at which at least one of the intervals, and at most `limit` of them, are open."""
    times, counts = _open_at_once(pairs)
    few = (counts > 0) & (counts <= limit)
    return union(np.stack((times[:-1], times[1:]), axis=1)[few[:-1]])


def most_at_once(pairs: Intervals) -> float:
    """The largest number of intervals that are open at once."""
    return float(np.max(_open_at_once(pairs)[1], initial=0.0))


def _open_at_once(pairs: Intervals) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The times at which an interval begins or ends, and how many are open after each."""
    times = pairs.T.ravel()
    changes = np.repeat((1.0, -1.0), len(pairs))
    # Ends come first: where one ends as another begins, they are not open at once.
    order = np.lexsort((changes, times))
    return times[order], np.cumsum(changes[order])


def total(of: Intervals) -> float:
    """Seconds in a set."""
    return float(np.sum(of[:, 1] - of[:, 0]))
