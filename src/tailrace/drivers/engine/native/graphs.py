"""The forward pass of a decode step as CUDA graphs: one launch instead of one for each kernel."""

from collections import abc

import torch
from torch import Tensor

from tailrace.drivers.engine.native.cache import Cache
from tailrace.drivers.engine.native.model import CausalLM, Extent, VarlenAttention
from tailrace.drivers.engine.native.sampler import on_device
from tailrace.drivers.engine.native.support import GRAPH_ROWS
from tailrace.errors import say


class Graphs:
    """A graph for each of a few numbers of rows, at most `max_rows`. It has the addresses of weights, cache
    and inputs, all of which are written in place. One is captured at the first step with so many rows, and
    again when the cache has grown. Where that fails, which is said once, the engine launches the kernels."""

    def __init__(self, model: CausalLM, cache: Cache, max_rows: int) -> None:
        self._model, self._cache, self._size_of_cache = model, cache, 0
        most = min(max_rows, GRAPH_ROWS[-1])
        self._sizes = [*(size for size in GRAPH_ROWS if size < most), most]
        self._inputs = torch.zeros(3, most + 1, dtype=torch.long, device=model.device)
        """Token, position and first position of the slot of each row of a decode step, and of one more."""
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, parts: abc.Sequence[Extent], ids: Tensor) -> Tensor | None:
        """Do what `CausalLM.read` does, with one token of each sequence. None: no graph has so many rows."""
        if (rows := next((size for size in self._sizes if size >= len(ids)), None)) is None:
            return None
        if self._cache.size != self._size_of_cache:
            self.clear()
            self._size_of_cache = self._cache.size
        # Rows without a sequence write to the position that is of none, and attend to it.
        all_parts = [*parts, *[((self._cache.size, 1), range(1))] * (rows + 1 - len(ids))]
        places = [[new.start for _, new in all_parts], [start for (start, _), _ in all_parts]]
        self._inputs[0, : len(ids)] = ids
        self._inputs[1:, : rows + 1] = on_device(places, ids.device)
        if rows not in self._captured:
            try:
                self._captured[rows] = self._capture(rows)
            except RuntimeError as error:  # of CUDA and its allocator
                say(f"the engine decodes without CUDA graphs: that of {rows} rows was not captured: {error}")
                self._captured, self._sizes = {}, []
                return None
        graph, result = self._captured[rows]
        graph.replay()
        return result[: len(ids)]

    def _forward(self, rows: int) -> Tensor:
        """The residual stream after the first rows of the inputs. The host does not wait for the device."""
        ids, positions, starts = self._inputs[:, :rows]
        _, last, slots = self._inputs[:, : rows + 1]
        boundaries = torch.arange(rows + 1, device=ids.device)
        slots, longest = torch.stack((slots, last + 1, boundaries)).int(), (1, self._model.max_tokens)
        attention = VarlenAttention(self._cache.pieces, starts + positions, slots, longest)
        return self._model.forward(ids, positions, attention)

    def clear(self) -> None:
        """Free all graphs."""
        if self._captured:
            torch.cuda.synchronize(self._model.device)
        self._captured = {}

    def _capture(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run the work once, which loads its kernels, and record it. Graphs share their memory."""
        graph = torch.cuda.CUDAGraph()
        pool = next((graph.pool() for graph, _ in self._captured.values()), None)
        with torch.cuda.device(self._model.device):
            own, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(own)
            with torch.cuda.stream(stream):
                self._forward(rows)
            own.wait_stream(stream)
            # A capture that fails leaves its stream as the current one; the outer block takes it back.
            with torch.cuda.stream(own), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                result = self._forward(rows)
        return graph, result
