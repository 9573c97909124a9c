"""How a token is drawn: a pure function of its logits and of one uniform number.

The number is a function of the request's seed and of the token's index in the completion: counter-based
noise after SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). The draw inverts the cumulative distribution. So
the tokens of a request do not depend on the other requests of a batch, the replica or interruptions. All is
computed on the device of the logits.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tailrace.types import SamplingParams

BLOCK, MIN_BLOCKS = 128, 16
"""128 divides the vocabularies of most models, which then need no padding."""


def _signed(number: int) -> int:
    """The int64 with the same last 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


_GOLDEN, _MIX_1, _MIX_2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros; torch's own shift of int64 repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64. Products of int64 keep the last 64 bits."""
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def noise_stream(seed: int) -> int:
    """The counter at which the noise of a seed begins. Neighbouring seeds get unrelated counters."""
    return int(_mix(torch.tensor(_signed(seed))))


def noise(streams: Tensor, indices: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), [T] float64, of the `noise_stream` of each completion's seed and the index
    of the token in the completion, from 0: [T] int64."""
    return _shifted(_mix(streams + (indices + 1) * _GOLDEN), 11).double() * 2.0**-53


def on_device(values: object, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers of the host as a tensor. The host does not wait for the device."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


class Drawn(NamedTuple):
    """One token for each row, [T]. `logprobs`: over the whole vocabulary whatever top_k and top_p keep."""

    ids: Tensor
    logprobs: Tensor


def draw(
    logits: Tensor, uniforms: Tensor, sampling: Sequence[SamplingParams], greedy: Sequence[int] = ()
) -> Drawn:
    """Draw one token from each row, by its own sampling parameters.

    Args:
        logits: [T, V], float32.
        uniforms: [T], float64, in [0, 1).
        greedy: the rows that get their most likely token.
    """
    device = logits.device
    if any(each.temperature != 1.0 for each in sampling):
        logits = logits / on_device([each.temperature for each in sampling], device, logits.dtype)[:, None]
    weights = whole = logits.softmax(-1)
    truncated = defaultdict[tuple[int, float], list[int]](list)
    for row, each in enumerate(sampling):
        if each.top_k > 0 or each.top_p < 1.0:
            truncated[each.top_k, each.top_p].append(row)
    for (top_k, top_p), numbers in truncated.items():
        rows = on_device(numbers, device)
        weights = weights.index_copy(0, rows, _truncate(weights[rows], top_k, top_p))
    ids = _choose_in_blocks(weights, uniforms[:, None])
    if greedy:
        rows = on_device(greedy, device)
        ids[rows] = logits[rows].argmax(-1, keepdim=True)
    return Drawn(ids[:, 0], whole.gather(1, ids).log_()[:, 0])


def _choose_in_blocks(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Choose a block, then one of its tokens: float64 sums over a large vocabulary would take too long."""
    if weights.shape[1] <= MIN_BLOCKS * BLOCK:
        return _choose(weights, uniforms)[0]
    short = -weights.shape[1] % BLOCK
    blocks = (F.pad(weights, (0, short)) if short else weights).view(len(weights), -1, BLOCK)
    block, within = _choose(blocks.sum(-1), uniforms)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    return (block * BLOCK + _choose(chosen, within)[0]).clamp_(max=weights.shape[1] - 1)


def _choose(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Choose an index of each row with a probability proportional to its weight.

    Args:
        weights: [T, N]
        uniforms: [T, 1], float64, in [0, 1).

    Returns:
        The first indices whose cumulative weight exceeds the uniform share of the sum, [T, 1]: never one of
        weight zero. And where the share lies within the weight: uniform numbers in [0, 1), [T, 1].
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    targets = uniforms * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True).clamp_(max=weights.shape[1] - 1)
    own = weights.gather(1, ids).double()
    within = (targets - (cumulative.gather(1, ids) - own)) / own
    return ids, within.clamp_(0.0, 1.0 - 2.0**-53)


def _truncate(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero all tokens but the likeliest: top_k of them (0: all), and of these as many as together reach top_p
    (Holtzman et al. 2020)."""
    if 0 < top_k < weights.shape[-1]:
        weights = weights.masked_fill(weights < weights.topk(top_k).values[:, -1:], 0.0)
    if top_p < 1.0:
        ranked, order = weights.sort(stable=True, dim=-1, descending=True)
        before = ranked.cumsum(-1) - ranked
        ranked.masked_fill_(before >= top_p * ranked.sum(-1, keepdim=True), 0.0)
        weights = torch.zeros_like(weights).scatter_(-1, order, ranked)
    return weights
