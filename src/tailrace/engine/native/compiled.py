"""Decode steps and prefills on a CPU in float32: products.py for the matrices, kernels.py for the rest."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.engine.base import SamplingSettings
from tailrace.engine.native import kernels
from tailrace.engine.native.architecture import Architecture
from tailrace.engine.native.cache import Block, Tier
from tailrace.engine.native.model import Layer, Model
from tailrace.engine.native.prefill import prefill
from tailrace.engine.native.sampler import draw
from tailrace.products import add_product, multiply
from tailrace.vectors import WIDE

SHORT = 256
"""Tokens of a context up to which attention row by row was measured, and was faster."""
MADE = 1024
"""Numbers of rows that are remembered: to make the views of one takes longer than to normalise its rows."""


class Rows:
    """Activations of so many rows, as torch writes them and as the kernels see the same memory.

    Args:
        parts: seven vectors of at least so many rows' numbers, in the order of `_widths`.
    """

    def __init__(self, arch: Architecture, num_rows: int, parts: Sequence[Tensor]) -> None:
        matrices = [
            part[: num_rows * width].view(num_rows, width)
            for part, width in zip(parts, _widths(arch), strict=True)
        ]
        self.x, self.h, self.qkv, self.mixed, self.gate, self.up, self.logits = matrices
        self.x_array, self.h_array = self.x.numpy(), self.h.numpy()
        self.gate_array, self.up_array = self.gate.numpy(), self.up.numpy()
        self.qkv_array = self.qkv.numpy().reshape(num_rows, -1, arch.head_dim)
        self.mixed_array = self.mixed.numpy().reshape(num_rows, -1, arch.head_dim)
        self.logits_array = self.logits.numpy()
        self.ids, self.logprobs = np.empty(num_rows, np.int64), np.empty(num_rows)


def _widths(arch: Architecture) -> tuple[int, ...]:
    """Of a row: the residual stream, the same normalised, q with k and v, what attention gives, gate, up, and
    the logits."""
    hidden, inner, mixed = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
    return hidden, hidden, mixed + 2 * arch.num_kv_heads * arch.head_dim, mixed, inner, inner, arch.vocab_size


class Activations:
    """Rows in any number, in the same memory: each call ends the life of the rows that were made before."""

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        self._parts: list[Tensor] = []
        self._num_rows = 0
        self._made: dict[int, Rows] = {}

    def __call__(self, num_rows: int) -> Rows:
        if num_rows not in self._made:
            if num_rows > self._num_rows or len(self._made) == MADE:
                self._num_rows = max(num_rows, self._num_rows)
                self._parts = [torch.empty(self._num_rows * width) for width in _widths(self._arch)]
                self._made.clear()
            self._made[num_rows] = Rows(self._arch, num_rows, self._parts)
        return self._made[num_rows]


class Place(NamedTuple):
    """Where consecutive rows keep their keys and values."""

    slots: kernels.Ints
    """[T] of them."""
    keys: kernels.Floats
    """[L, S, K, D, C]"""
    values: kernels.Floats
    """[L, S, K, C, D]"""


class CompiledDecoder:
    """A Decoder (decoder.py). The kernels use one thread, the matrix products as many as torch may."""

    def __init__(self, model: Model, sampling: SamplingSettings, *, max_tokens: int) -> None:
        arch = model.architecture
        self._model = model
        self._sampling = sampling
        self._truncated = sampling.top_p < 1.0 or 0 < sampling.top_k < arch.vocab_size
        self._embedding = model.embedding.numpy()
        self._turns = _turns(model.rotations)
        self._gains = [_gains(layer) for layer in model.layers]
        self._hidden_epsilon = arch.hidden_size * arch.epsilon
        self._head_epsilon = arch.head_dim * arch.epsilon
        self._scores = np.empty((4, (max_tokens // WIDE + 2) * WIDE), np.float32)
        self._rows = Activations(arch)

    def __call__(
        self, tiers: Sequence[Tier], ids: Sequence[int], lengths: Sequence[int], uniforms: NDArray[np.float64]
    ) -> tuple[list[int], list[float]]:
        model, rows = self._model, self._rows(len(ids))
        places = [
            Place(np.arange(len(tier.responses)), tier.keys.numpy(), tier.values.numpy()) for tier in tiers
        ]
        self._forward(rows, ids, np.array(lengths) - 1, places)
        kernels.normalize(rows.x_array, self._hidden_epsilon, rows.h_array)
        multiply(rows.h.mul_(model.last_gain), model.head, out=rows.logits)
        return self._draw(rows, uniforms)

    def prefill(self, contexts: Sequence[Sequence[int]]) -> list[Block]:
        """Short contexts as a decode step whose rows are their tokens: for one, a third of the time."""
        lengths = [len(context) for context in contexts]
        if max(lengths, default=0) > SHORT:
            return prefill(self._model, contexts)
        arch = self._model.architecture
        shape = arch.num_layers, len(contexts), arch.num_kv_heads
        capacity = (max(lengths, default=0) + 15) // 32 * 32 + 16
        keys = torch.empty(*shape, arch.head_dim, capacity)
        values = torch.empty(*shape, capacity, arch.head_dim)
        if any(lengths):
            place = Place(np.repeat(np.arange(len(contexts)), lengths), keys.numpy(), values.numpy())
            positions = np.concatenate([np.arange(length) for length in lengths])
            ids = [id for context in contexts for id in context]
            self._forward(self._rows(len(ids)), ids, positions, [place])
        return [
            Block(
                keys[:, number, :, :, :length].permute(0, 3, 1, 2),
                values[:, number, :, :length].transpose(1, 2),
            )
            for number, length in enumerate(lengths)
        ]

    def _forward(
        self, rows: Rows, ids: Sequence[int], positions: kernels.Ints, places: "Sequence[Place]"
    ) -> None:
        """The residual stream of the rows after the last block; their keys and values go to their places."""
        # Of a few ids, torch takes longer to make a tensor than to look them up.
        np.take(self._embedding, ids, 0, out=rows.x_array, mode="clip")
        for index, layer in enumerate(self._model.layers):
            kernels.normalize(rows.x_array, self._hidden_epsilon, rows.h_array)
            _project(rows.h, layer.qkv, layer.qkv_bias, rows.qkv)
            first = 0
            for place in places:
                kernels.attend(
                    index,
                    first,
                    place.slots,
                    rows.qkv_array,
                    self._gains[index],
                    self._head_epsilon,
                    self._turns,
                    positions,
                    place.keys,
                    place.values,
                    self._scores,
                    rows.mixed_array,
                )
                first += len(place.slots)
            add_product(rows.mixed, layer.out, rows.x, room=rows.h)
            kernels.normalize(rows.x_array, self._hidden_epsilon, rows.h_array)
            multiply(rows.h, layer.gate, out=rows.gate)
            multiply(rows.h, layer.up, out=rows.up)
            kernels.silu_times(rows.gate_array, rows.up_array)
            add_product(rows.gate, layer.down, rows.x, room=rows.h)

    def _draw(self, rows: Rows, uniforms: NDArray[np.float64]) -> tuple[list[int], list[float]]:
        if self._truncated:
            ids, logprobs = draw(rows.logits, torch.from_numpy(uniforms), self._sampling)
            return ids.tolist(), logprobs.tolist()
        kernels.draw(rows.logits_array, uniforms, rows.ids, rows.logprobs)
        return rows.ids.tolist(), rows.logprobs.tolist()


def _turns(rotations: Tensor) -> kernels.Floats:
    """Complex [max_tokens, D / 2] as `kernels.attend` reads it: cosine twice, sine with either sign."""
    cos, sin = rotations.real, rotations.imag
    return torch.stack([torch.stack([cos, cos], -1), torch.stack([-sin, sin], -1)], 1).flatten(2).numpy()


def _gains(layer: Layer) -> kernels.Floats:
    """Of the norms of q and k, the memory of the layer's own; empty where there are none."""
    if layer.qk_gain is None:
        return np.empty((0, 0), np.float32)
    return layer.qk_gain.numpy()


def _project(h: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    multiply(h, weight, out=out)
    if bias is not None:
        out += bias
