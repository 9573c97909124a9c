"""Lanes: which row of a picture a request is drawn in."""

import heapq


class Lanes:
    """The lanes of one engine: the lowest free one is taken, so there are as many as ran at once.

    Example:
        >>> lanes = Lanes()
        >>> lanes.take(), lanes.take()
        (0, 1)
        >>> lanes.give_back(0)
        >>> lanes.take(), lanes.take()
        (0, 2)
    """

    def __init__(self) -> None:
        self.num_lanes = 0
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.num_lanes += 1
        return self.num_lanes - 1

    def give_back(self, lane: int) -> None:
        heapq.heappush(self._free, lane)
