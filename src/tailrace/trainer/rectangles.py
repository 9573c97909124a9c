"""Causal attention of packed sequences on a CPU: those of like length are padded and attended in one call.

A call for each sequence costs more than what it computes, where sequences are short. Behind its end a
sequence is padded with its own last token: no real token attends that far, and nothing reads what is
computed there, so that no gradient comes from it either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

LEAST_FILLED = 0.75
"""Of the longest of a rectangle: what its shortest sequence has at least."""
SHORT = 48
"""Tokens: whatever the lengths below, one call is cheaper than two."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Rectangles:
    """How T packed tokens lie at the P places of rectangles."""

    shapes: tuple[tuple[int, int], ...]
    """(N, L): sequences and the longest one's tokens. P is the sum of N L."""
    tokens: Tensor
    """[P]: the packed token at each place."""
    places: Tensor
    """[T]: the place of each packed token."""
    real: Tensor
    """[P, 1, 1] float32: 1, and 0 where it is padded."""


class Attended:
    """What `attend` keeps of one rectangle for its gradient: [N, H, L, D] each, and [N, H, L]."""

    __slots__ = ("key", "logsumexp", "out", "query", "value")

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        self.query, self.key, self.value = query, key, value
        self.out, self.logsumexp = _forward(query, key, value, 0.0, True, scale=scale)

    def backward(self, grad: Tensor, scale: float) -> tuple[Tensor, ...]:
        """Of query, key and value; grad: [N, H, L, D]."""
        gradients: tuple[Tensor, ...] = _backward(
            grad, self.query, self.key, self.value, self.out, self.logsumexp, 0.0, True, scale=scale
        )
        return gradients


def rectangles(lengths: Sequence[int]) -> Rectangles:
    """Lay sequences of these lengths out: the longest begins a rectangle, and others that fill it join it."""
    starts = [0, *accumulate(lengths)]
    members: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        longest = lengths[members[-1][0]] if members else 0
        if not members or (longest > SHORT and lengths[n] < LEAST_FILLED * longest):
            members.append([])
        members[-1].append(n)
    tokens: list[int] = []
    places = [0] * starts[-1]
    real: list[float] = []
    for sequences in members:
        for n in sequences:
            spare = lengths[sequences[0]] - lengths[n]
            places[starts[n] : starts[n + 1]] = range(len(tokens), len(tokens) + lengths[n])
            tokens += [*range(starts[n], starts[n + 1]), *[starts[n + 1] - 1] * spare]
            real += [1.0] * lengths[n] + [0.0] * spare
    shapes = tuple((len(sequences), lengths[sequences[0]]) for sequences in members)
    return Rectangles(shapes, torch.tensor(tokens), torch.tensor(places), torch.tensor(real)[:, None, None])


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Rectangles, scale: float
) -> tuple[Tensor, list[Attended]]:
    """[T, H, D] of query [T, H, D], key and value [T, K, D], and what its gradient needs."""
    group = query.shape[1] // key.shape[1]
    parts = zip(*(_laid_out(x, layout) for x in (query, key, value)), strict=True)
    kept = [Attended(q, _repeated(k, group), _repeated(v, group), scale) for q, k, v in parts]
    return _packed([part.out for part in kept], layout), kept


def attend_backward(
    grad: Tensor, kept: Sequence[Attended], layout: Rectangles, scale: float, num_kv: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of query [T, H, D], key and value [T, K, D]; grad: [T, H, D]."""
    laid_out = grad.index_select(0, layout.tokens).mul_(layout.real)
    parts = [
        part.backward(part_grad, scale)
        for part, part_grad in zip(kept, _split(laid_out, layout), strict=True)
    ]
    queries, keys, values = zip(*parts, strict=True)
    return (
        _packed(queries, layout),
        _packed([_summed(key, num_kv) for key in keys], layout),
        _packed([_summed(value, num_kv) for value in values], layout),
    )


def _laid_out(packed: Tensor, layout: Rectangles) -> list[Tensor]:
    return _split(packed.index_select(0, layout.tokens), layout)


def _split(laid_out: Tensor, layout: Rectangles) -> list[Tensor]:
    """[N, H, L, D] of each rectangle, of [P, H, D]."""
    parts = torch.split(laid_out, [num * length for num, length in layout.shapes])
    return [
        part.view(*shape, *part.shape[1:]).transpose(1, 2)
        for part, shape in zip(parts, layout.shapes, strict=True)
    ]


def _packed(parts: Sequence[Tensor], layout: Rectangles) -> Tensor:
    """[T, H, D] of [N, H, L, D] of each rectangle."""
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return (torch.cat(flat) if len(flat) > 1 else flat[0]).index_select(0, layout.places)


def _repeated(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _summed(x: Tensor, num_kv: int) -> Tensor:
    """[N, K, L, D]: the gradients of a key-value head's query heads, [N, H, L, D], together."""
    num, num_heads, length, dim = x.shape
    return x if num_heads == num_kv else x.reshape(num, num_kv, -1, length, dim).sum(2)
