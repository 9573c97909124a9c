"""The forward pass of a decode step as CUDA graphs: one launch instead of one for each kernel."""

from collections.abc import Callable

import torch
from torch import Tensor

from tailrace.drivers.engine.native.support import GRAPH_ROWS
from tailrace.errors import say


class Graphs:
    """A graph for each of a few numbers of rows, at most `max_rows`. It has the addresses of weights, cache
    and inputs, all of which are written in place. One is captured at the first step with so many rows, and
    again when the cache has grown. Where that fails, which is said once, the engine launches the kernels."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device, self._size_of_cache = device, 0
        most = min(max_rows, GRAPH_ROWS[-1])
        self._sizes = [*(size for size in GRAPH_ROWS if size < most), most]
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def rows(self, num: int) -> int:
        """The rows of a step of so many sequences: those of the smallest graph that has them."""
        return next((size for size in self._sizes if size >= num), num)

    def __call__(self, forward: Callable[[int], Tensor], rows: int, size_of_cache: int) -> Tensor | None:
        """Compute a step; None: no graph has so many rows. `forward`: of so many rows [rows, hidden]; it may
        not make the host wait for the device."""
        if rows not in self._sizes:
            return None
        if size_of_cache != self._size_of_cache:
            self.clear()
            self._size_of_cache = size_of_cache
        if rows not in self._captured:
            try:
                self._captured[rows] = self._capture(forward, rows)
            except RuntimeError as error:  # of CUDA and its allocator
                say(f"the engine decodes without CUDA graphs: that of {rows} rows was not captured: {error}")
                self._captured, self._sizes = {}, []
                return None
        graph, result = self._captured[rows]
        graph.replay()
        return result

    def clear(self) -> None:
        """Free all graphs."""
        if self._captured:
            torch.cuda.synchronize(self._device)
        self._captured = {}

    def _capture(self, forward: Callable[[int], Tensor], rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run the work once, which loads its kernels, and record it. Graphs share their memory."""
        graph = torch.cuda.CUDAGraph()
        pool = next((graph.pool() for graph, _ in self._captured.values()), None)
        with torch.cuda.device(self._device):
            own, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(own)
            with torch.cuda.stream(stream):
                forward(rows)
            own.wait_stream(stream)
            # A capture that fails leaves its stream as the current one; the outer block takes it back.
            with torch.cuda.stream(own), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                result = forward(rows)
        return graph, result
