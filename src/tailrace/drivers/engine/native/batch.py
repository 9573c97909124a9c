"""The inputs of a decode step on the device, and its forward pass as a CUDA graph.

While the same sequences run in the same slots, a step needs nothing of the host: the tokens that it draws are
the inputs of the next one, and the positions are one more. All inputs are written in place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tailrace.drivers.engine.native.cache import Cache, Sequence
from tailrace.drivers.engine.native.model import Run, runs_of
from tailrace.drivers.engine.native.sampler import Rules, on_device
from tailrace.drivers.engine.native.states import States
from tailrace.errors import say

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of the graphs. Those of a step are rounded up."""
IDS, POSITIONS, INDICES, STARTS, STREAMS = range(5)


class Batch:
    """The rows of the next decode step, one for each sequence.

    Args:
        max_rows: the most sequences.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.sequences: list[Sequence] = []
        self.runs: list[Run] = []
        self.rules: Rules
        self._table = torch.zeros(5, max_rows + 1, dtype=torch.long, device=device)
        """[5, max_rows + 1]: tokens, positions, indices in the completions, first positions of the slots and
        noise streams. Rows without a sequence have position 0 of the place that belongs to no sequence."""
        self._num_changes = -1
        """Those of the cache at the last `update`."""

    @property
    def streams(self) -> Tensor:
        return self._table[STREAMS, : len(self.sequences)]

    @property
    def indices(self) -> Tensor:
        return self._table[INDICES, : len(self.sequences)]

    def starts(self, num_rows: int) -> Tensor:
        """[num_rows], the first positions of the slots."""
        return self._table[STARTS, :num_rows]

    def inputs(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and first positions of the slots, [num_rows] each."""
        ids, positions, _, starts, _ = self._table[:, :num_rows]
        return ids, positions, starts

    def update(self, sequences: list[Sequence], cache: Cache | States) -> None:
        """Take the sequences of the next step. Tokens that are not read are those of the last step."""
        if sequences == self.sequences and cache.num_changes == self._num_changes:
            return
        slots = cache.slots()
        rows = [slots[each] for each in sequences]
        device, num = self._table.device, len(sequences)
        new = on_device(
            [
                [each.tokens[-1] for each in sequences],
                [each.length - 1 for each in sequences],
                [each.num_completion for each in sequences],
                [start for start, _ in rows],
                [each.noise_stream for each in sequences],
            ],
            device,
        )
        if any(each.num_unread for each in sequences):
            row_of = {each: row for row, each in enumerate(self.sequences)}
            last = on_device([row_of[each] if each.num_unread else -1 for each in sequences], device)
            new[IDS] = torch.where(last < 0, new[IDS], self._table[IDS, last.clamp(min=0)])
        if sequences != self.sequences:
            greedy = [row for row, each in enumerate(sequences) if each.greedy]
            self.rules = Rules.of([each.sampling for each in sequences], greedy, device)
        self._table[:, :num] = new
        self._table[POSITIONS, num:] = 0
        self._table[STARTS, num:] = cache.size
        self.sequences, self.runs, self._num_changes = sequences, runs_of(rows), cache.num_changes

    def advance(self, ids: Tensor) -> None:
        """Take the tokens that were drawn, [T]."""
        num = len(ids)
        self._table[IDS, :num] = ids
        self._table[POSITIONS : INDICES + 1, :num] += 1


Captured = tuple[Callable[[], None], Tensor]
"""Runs a graph; and where its result is afterwards."""


def capture(work: Callable[[], Tensor], device: torch.device, pool: Any) -> Captured:
    """Record the kernels of `work`, which runs once before, so that none is loaded meanwhile. `pool`: the
    memory of graphs of which one runs at a time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
    return graph.replay, result


class Graphs:
    """The forward pass of a decode step as CUDA graphs, one for each of a few numbers of rows. They have the
    addresses of weights, cache and inputs, all of which are written in place. One is captured at the first
    step with so many rows, and again when the cache has grown.

    Args:
        forward: returns [rows, hidden] for a number of rows; without a stop of the device.
        max_rows: the most rows.
    """

    def __init__(self, forward: Callable[[int], Tensor], max_rows: int, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._sizes = [size for size in SIZES if size <= max_rows]
        self._captured: dict[int, Captured] = {}
        self._pool: Any = None
        self._size_of_cache = 0

    def __call__(self, num_rows: int, size_of_cache: int) -> Tensor | None:
        """Compute a step, at least `num_rows` rows; None: no graph has them."""
        size = next((size for size in self._sizes if size >= num_rows), None)
        if size is None:
            return None
        if size_of_cache != self._size_of_cache:
            self.clear()
            self._size_of_cache = size_of_cache
        if size not in self._captured:
            try:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                self._captured[size] = capture(partial(self._forward, size), self._device, self._pool)
            except RuntimeError as why:  # of CUDA and its allocator
                say(f"the engine goes on without CUDA graphs: a step of {size} rows was not captured: {why}")
                self.clear()
                self._sizes = []
                return None
        replay, result = self._captured[size]
        replay()
        return result

    def clear(self) -> None:
        """Free the graphs."""
        if self._captured:
            torch.cuda.synchronize(self._device)
        self._captured, self._pool = {}, None
