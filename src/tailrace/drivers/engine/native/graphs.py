"""Decode steps as CUDA graphs: one launch instead of one for each kernel."""

from collections import abc

import torch
from torch import Tensor

from tailrace.drivers.engine.native.cache import Cache
from tailrace.drivers.engine.native.model import CausalLM, Extent, GatheredAttention, VarlenAttention
from tailrace.drivers.engine.native.sampler import Drawn, Draws, draw, on_device
from tailrace.drivers.engine.native.support import GRAPH_LENGTHS, GRAPH_ROWS, MAX_GATHERED
from tailrace.errors import say

Key = tuple[int, int, bool]
"""Rows and the most tokens of a graph, and whether it draws the tokens."""


class Graphs:
    """A graph for each of a few numbers of rows, at most `max_rows`, and lengths. It has the addresses of
    weights, cache and inputs, all of which are written in place. One is captured at the first step that needs
    it, and again when the cache has grown. Where that fails, which is said once, the engine launches the
    kernels. A graph draws the tokens, too, unless one is greedy or of truncated sampling."""

    def __init__(self, model: CausalLM, cache: Cache, max_rows: int) -> None:
        self._model, self._cache, self._size_of_cache = model, cache, 0
        most = min(max_rows, GRAPH_ROWS[-1])
        self._sizes = [*(size for size in GRAPH_ROWS if size < most), most]
        self._lengths = [*(each for each in GRAPH_LENGTHS if each < model.max_tokens), model.max_tokens]
        self._inputs = torch.zeros(4, most + 1, dtype=torch.long, device=model.device)
        """Token, position, first position of the slot and noise key of each row of a decode step, and of one
        more."""
        self._temperatures = torch.ones(most, device=model.device)
        self._captured: dict[Key, tuple[torch.cuda.CUDAGraph, Drawn | Tensor]] = {}

    def __call__(self, parts: abc.Sequence[Extent], ids: Tensor, draws: Draws) -> Drawn | None:
        """Read one token of each sequence as `CausalLM.read`, and `draw`. None: no graph is so large."""
        keys, sampling, greedy = draws
        if (rows := next((size for size in self._sizes if size >= len(ids)), None)) is None:
            return None
        longest = max(new.stop for _, new in parts)
        length = next(each for each in self._lengths if each >= longest)
        if self._model.why_no_varlen and rows * length > MAX_GATHERED:
            return None
        if self._cache.size != self._size_of_cache:
            self.clear()
            self._size_of_cache = self._cache.size
        # Rows without a sequence write to the position that is of none, and attend to it.
        all_parts = [*parts, *[((self._cache.size, 1), range(1))] * (rows + 1 - len(ids))]
        places = [[new.start for _, new in all_parts], [start for (start, _), _ in all_parts]]
        self._inputs[0, : len(ids)], self._inputs[3, : len(ids)] = ids, keys
        self._inputs[1:3, : rows + 1] = on_device(places, ids.device)
        temperatures = [each.temperature for each in sampling]
        self._temperatures[: len(ids)] = on_device(temperatures, ids.device, torch.float32)
        is_plain = not greedy and all(each.top_k <= 0 and each.top_p >= 1.0 for each in sampling)
        if (key := (rows, length, is_plain)) not in self._captured:
            try:
                self._captured[key] = self._capture(key)
            except RuntimeError as error:  # of CUDA and its allocator
                say(f"the engine decodes without CUDA graphs: that of {rows} rows was not captured: {error}")
                self._captured, self._sizes = {}, []
                return None
        graph, result = self._captured[key]
        graph.replay()
        if isinstance(result, Drawn):
            return Drawn(*(each[: len(ids)] for each in result))
        return draw(self._model.logits(result[: len(ids)]), *draws)

    def _work(self, key: Key) -> Drawn | Tensor:
        """The tokens of the first rows of the inputs, or the residual stream after them. The host does not
        wait for the device."""
        rows, length, has_draw = key
        ids, positions, starts, keys = self._inputs[:, :rows]
        _, last, slots, _ = self._inputs[:, : rows + 1]
        slots = torch.stack((slots, last + 1, torch.arange(rows + 1, device=ids.device))).int()
        kind = GatheredAttention if self._model.why_no_varlen else VarlenAttention
        attention = kind(self._cache.pieces, starts + positions, slots, (1, length))
        x = self._model.forward(ids, positions, attention)
        return draw(self._model.logits(x) / self._temperatures[:rows, None], keys, ()) if has_draw else x

    def clear(self) -> None:
        """Free all graphs."""
        if self._captured:
            torch.cuda.synchronize(self._model.device)
        self._captured = {}

    def _capture(self, key: Key) -> tuple[torch.cuda.CUDAGraph, Drawn | Tensor]:
        """Run the work once, which loads its kernels, and record it. Graphs share their memory."""
        graph = torch.cuda.CUDAGraph()
        pool = next((graph.pool() for graph, _ in self._captured.values()), None)
        with torch.cuda.device(self._model.device):
            own, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(own)
            with torch.cuda.stream(stream):
                self._work(key)
            own.wait_stream(stream)
            # A capture that fails leaves its stream as the current one; the outer block takes it back.
            with torch.cuda.stream(own), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                result = self._work(key)
        return graph, result
