"""Lanes: the row of a picture in which a request is drawn."""

import heapq


class Lanes:
    """Hands out the lowest free lane, so there are as many lanes as requests that ran at once."""

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
