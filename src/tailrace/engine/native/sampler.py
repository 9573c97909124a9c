"""How a token is drawn: a pure function of its logits and of one uniform number.

The number is a function of the request's seed and of the token's index in the completion: counter-based
noise after SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). The draw inverts the cumulative distribution. So
the tokens of a request do not depend on the other requests of a batch, the replica or interruptions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.engine.base import SamplingParams

_64_BITS = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(z: Any) -> Any:
    """The finaliser of SplitMix64, for an integer or an array of np.uint64."""
    z = (z ^ (z >> 30)) * _MIX_1 & _64_BITS
    z = (z ^ (z >> 27)) * _MIX_2 & _64_BITS
    return z ^ (z >> 31)


def noise_stream(seed: int) -> int:
    """The counter at which the noise of a seed begins. Neighbouring seeds get unrelated counters."""
    mixed: int = _mix(seed & _64_BITS)
    return mixed


def noise(streams: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), [T], one for each token.

    Args:
        streams: [T], the `noise_stream` of each completion's seed.
        indices: [T], of the tokens in their completions, from 0.
    """
    counters = np.array(streams, np.uint64) + (np.array(indices, np.uint64) + 1) * _GOLDEN
    uniforms: NDArray[np.float64] = (_mix(counters) >> 11) * 2.0**-53
    return uniforms


class Drawn(NamedTuple):
    """One token for each row.

    Args:
        logprobs: [T], over the whole vocabulary whatever top_k and top_p keep.
    """

    ids: list[int]
    logprobs: list[float]


def draw(
    logits: Tensor, uniforms: Tensor, sampling: Sequence[SamplingParams], greedy: Sequence[int] = ()
) -> Drawn:
    """Draw one token from each row.

    Args:
        logits: [T, V], float32.
        uniforms: [T], float64, in [0, 1).
        sampling: [T]
        greedy: the rows that get their most likely token.
    """
    logits = logits / logits.new_tensor([each.temperature for each in sampling])[:, None]
    logprobs = torch.log_softmax(logits, -1)
    probs = logprobs.exp()
    for (top_k, top_p), rows in _rows_by_truncation(sampling).items():
        probs[rows] = _truncate(probs[rows], top_k, top_p)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the target: never one of probability zero.
    ids = torch.searchsorted(cumulative, targets, right=True).clamp_(max=probs.shape[-1] - 1)
    if greedy:
        ids[list(greedy)] = logits[list(greedy)].argmax(-1, keepdim=True)
    chosen = logprobs.gather(1, ids)
    return Drawn(ids[:, 0].tolist(), chosen[:, 0].tolist())


def _rows_by_truncation(sampling: Sequence[SamplingParams]) -> dict[tuple[int, float], list[int]]:
    found: dict[tuple[int, float], list[int]] = {}
    for row, each in enumerate(sampling):
        if each.top_k > 0 or each.top_p < 1.0:
            found.setdefault((each.top_k, each.top_p), []).append(row)
    return found


def _truncate(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero all tokens that top_k or top_p exclude."""
    if 0 < top_k < probs.shape[-1]:
        probs = probs.masked_fill(probs < probs.topk(top_k).values[:, -1:], 0.0)
    return _nucleus(probs, top_p) if top_p < 1.0 else probs


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Zero all but the likeliest tokens that together reach top_p (Holtzman et al. 2020)."""
    ranked, order = probs.sort(stable=True, dim=-1, descending=True)
    before = ranked.cumsum(-1) - ranked
    ranked.masked_fill_(before >= top_p * ranked.sum(-1, keepdim=True), 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)
