"""How a token is drawn: a pure function of its logits and of one uniform number.

The number is a function of the request's seed and of the token's index in the completion: counter-based
noise after SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). The draw inverts the cumulative distribution. So
the tokens of a request do not depend on the other requests of a batch, the replica or interruptions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.engine.settings import SamplingSettings

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


def draw(
    logits: Tensor, uniforms: Tensor, sampling: SamplingSettings, greedy: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Draw one token from each row.

    Args:
        logits: [T, V], float32, already divided by the temperature.
        uniforms: [T], float64, in [0, 1).
        greedy: the rows that get their most likely token.

    Returns:
        Token ids [T] and their log-probs [T], over the whole vocabulary whatever top_k and top_p keep.
    """
    logprobs = torch.log_softmax(logits, -1)
    probs = logprobs.exp()
    if 0 < sampling.top_k < probs.shape[-1]:
        probs.masked_fill_(probs < probs.topk(sampling.top_k).values[:, -1:], 0.0)
    if sampling.top_p < 1.0:
        probs = _nucleus(probs, sampling.top_p)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    targets = uniforms[:, None] * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the target: never one of probability zero.
    ids = torch.searchsorted(cumulative, targets, right=True).clamp_(max=probs.shape[-1] - 1)
    if greedy:
        ids[list(greedy)] = logits[list(greedy)].argmax(-1, keepdim=True)
    return ids[:, 0], logprobs.gather(1, ids)[:, 0]


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Zero all but the likeliest tokens that together reach top_p (Holtzman et al. 2020)."""
    ranked, order = probs.sort(stable=True, dim=-1, descending=True)
    before = ranked.cumsum(-1) - ranked
    ranked.masked_fill_(before >= top_p * ranked.sum(-1, keepdim=True), 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)
