"""How a token is drawn: a pure function of its logits and of the noise of its place.

The noise is a function of the request's seed and of the token's index in the completion: counter-based
numbers after SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). So the tokens of a request do not depend on the
other requests of a batch, the replica or interruptions. All is computed on the device of the logits.

The draw adds Gumbel noise to log-probs and takes the largest sum (Maddison, Tarlow and Minka, NeurIPS 2014):
first of blocks of the vocabulary, then of the tokens of that block. Each candidate has noise of its own, so
under slightly other weights nearly all tokens of a seed are the same. The inverse of the cumulative
distribution would change many of them: each change of a probability moves the borders of all tokens behind.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tailrace.types import SamplingParams

BLOCK, SMALL_BLOCK, SMALL = 128, 16, 2048
"""Tokens of a block; those of a block of a vocabulary that is at most so small. 128 divides the vocabularies
of most models, which then need no padding. A smaller vocabulary is one block."""


def _signed(number: int) -> int:
    """The int64 with the same last 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


_GOLDEN, _MIX_1, _MIX_2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right with zeros; torch's own shift of int64 repeats the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64. Products of int64 keep the last 64 bits."""
    z = (z ^ _shifted(z, 30)).mul_(_MIX_1)
    z = z.bitwise_xor_(_shifted(z, 27)).mul_(_MIX_2)
    return z.bitwise_xor_(_shifted(z, 31))


def noise_stream(seed: int) -> int:
    """The counter at which the noise of a seed begins. Neighbouring seeds get unrelated counters."""
    return int(_mix(torch.tensor(_signed(seed))))


def noise_keys(streams: Tensor, indices: Tensor) -> Tensor:
    """The counter at which the noise of a token begins, [T] int64, of the `noise_stream` of each completion's
    seed and the index of the token in the completion, from 0: [T] int64. A token has 2^20 numbers."""
    return streams + (indices << 20) * _GOLDEN


def noise(keys: Tensor, num: int) -> Tensor:
    """The first numbers of the noise of each token: [T, num] float64, exponentially distributed. -log of one
    is Gumbel noise; the largest log w - log e belongs to the largest w / e."""
    z = _mix(keys[:, None] + torch.arange(1, num + 1, device=keys.device) * _GOLDEN)
    # The middle of one of 2^52 intervals of (0, 1), which float64 has exactly: no number is 0 or infinite.
    return _shifted(z, 12).double().add_(0.5).mul_(2.0**-52).log_().neg_()


def on_device(values: object, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers of the host as a tensor. The host does not wait for the device."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


Draws = tuple[Tensor, Sequence[SamplingParams], Sequence[int]]
"""How the token of each row is drawn: the arguments of `draw` beside the logits."""


class Drawn(NamedTuple):
    """One token for each row, [T]. `logprobs`: over the whole vocabulary whatever top_k and top_p keep."""

    ids: Tensor
    logprobs: Tensor


def draw(
    logits: Tensor, keys: Tensor, sampling: Sequence[SamplingParams], greedy: Sequence[int] = ()
) -> Drawn:
    """Draw one token from each row, by its own sampling parameters.

    Args:
        logits: [T, V], float32.
        keys: [T], the `noise_keys` of the tokens.
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
    ids = _choose(weights, keys)
    if greedy:
        rows = on_device(greedy, device)
        ids[rows] = logits[rows].argmax(-1, keepdim=True)
    return Drawn(ids[:, 0], whole.gather(1, ids).log_()[:, 0])


def _choose(weights: Tensor, keys: Tensor) -> Tensor:
    """Choose an index of each row with a probability proportional to its weight, [T, 1]: never one of weight
    zero. `weights`: [T, V]. The noise of the tokens of all blocks is the same: one block is chosen."""
    if weights.shape[1] <= BLOCK:  # the time is that of the operations, whatever their size
        return (weights / noise(keys, weights.shape[1])).argmax(-1, keepdim=True)
    size = BLOCK if weights.shape[1] > SMALL else SMALL_BLOCK
    short = -weights.shape[1] % size
    blocks = (F.pad(weights, (0, short)) if short else weights).view(len(weights), -1, size)
    of_tokens, of_blocks = noise(keys, size + blocks.shape[1]).split_with_sizes((size, blocks.shape[1]), 1)
    block = (blocks.sum(-1) / of_blocks).argmax(-1, keepdim=True)
    tokens = blocks.gather(1, block[:, :, None].expand(-1, 1, size))[:, 0]
    return block.mul_(size).add_((tokens / of_tokens).argmax(-1, keepdim=True))


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
