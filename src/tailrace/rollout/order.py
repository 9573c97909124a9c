"""The order of the requests that wait in the pool's queue."""

from collections.abc import Callable, Iterable
from math import inf
from typing import Literal

from tailrace.types import Group, Sample

SortKey = Callable[[Sample], tuple[float, ...]]
"""The place of a sample among those that wait; the smallest is served first. It may depend on the finished
samples of the group."""


def launched_first(sample: Sample) -> tuple[float, ...]:
    """The order in which groups were launched."""
    return (sample.group.order,)


def longest_first(sample: Sample) -> tuple[float, ...]:
    """The groups first whose rows had the longest responses when they were last trained (StreamRL)."""
    return (-sample.group.predicted_tokens, sample.group.order)


def probe_first(sample: Sample) -> tuple[float, ...]:
    """The first sample of each group; then the others, the longest finished response of the group first. A
    group without a finished response counts as the longest (Seer)."""
    group = sample.group
    if sample.id.number == 0:
        return (0, group.order)
    return (1, -max((kept.num_tokens for kept in group.kept), default=inf), group.order)


Order = Literal["launched", "longest_first", "probe_first"]
"""Order of the requests that wait."""
ORDERS: dict[Order, SortKey] = {
    "launched": launched_first,
    "longest_first": longest_first,
    "probe_first": probe_first,
}


def in_order(groups: Iterable[Group]) -> list[Group]:
    """The groups in the order in which they were launched."""
    return sorted(groups, key=lambda group: group.order)
