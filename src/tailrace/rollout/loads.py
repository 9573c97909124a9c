"""The loads of engines.

The least loaded engine is the open one that has the smallest share of its slots taken, from a heap with lazy
deletion. An entry whose share is not that of its engine any more is removed when it comes to the top, or when
the heap is rebuilt. So a change of load and a choice take O(log n) for n engines.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

from tailrace.contracts.engine import Engine

MAX_ENTRIES = 8
"""The heap is rebuilt when it has more entries than this for each engine."""


class EngineLoads:
    """The load of each engine, by its number in the sequence."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self.requests = [0] * len(engines)
        """Requests that each engine has now."""
        self.shares = [inf] * len(engines)
        """Share of the slots of each engine that is taken; infinite if the engine is not open."""
        self.refresh()

    def refresh(self) -> None:
        """Read which engines are open, and how many slots they have."""
        is_open = [engine for engine in self._engines if engine.state == "open"]
        self.num_open = len(is_open)
        self.slots = sum(engine.slots for engine in is_open)
        self.shares = [self._share(number) for number in range(len(self._engines))]
        self._rebuild()

    def add(self, number: int, requests: int) -> None:
        """Count requests that an engine got, or gave back if negative."""
        self.requests[number] += requests
        self.shares[number] = share = self._share(number)
        heappush(self._heap, (share, number))
        if len(self._heap) > MAX_ENTRIES * len(self._engines):
            self._rebuild()

    def least_loaded(self) -> int | None:
        """The open engine with the smallest share; of several, the first. None: no engine is open."""
        while self._heap[0][0] != self.shares[self._heap[0][1]]:
            heappop(self._heap)
        share, number = self._heap[0]
        return number if share < inf else None

    def _share(self, number: int) -> float:
        engine = self._engines[number]
        return self.requests[number] / engine.slots if engine.state == "open" else inf

    def _rebuild(self) -> None:
        self._heap = [(share, number) for number, share in enumerate(self.shares)]
        heapify(self._heap)
