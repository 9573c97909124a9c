"""The log-ratio of trained tokens, current policy to behaviour policy, in parts that add up.

    numerics   trainer - engine, both under the weights of the token, the engine with a fresh KV cache
    kv         engine with a fresh KV cache - engine as recorded
    lag        trainer under the current weights - trainer under the weights of the token

The KL of the behaviour policy to the current one is the figure mismatch_kl: the mean over tokens of the
estimator k3 (losses.py), exp(x) - 1 - x of the log-ratio x. Each token's k3 is divided among the parts of x in
their proportion, so what the causes add to the KL adds up to it. A part against the others is negative.
"""

from collections.abc import Collection
from math import expm1
from statistics import fmean
from typing import Literal, NamedTuple, get_args

Cause = Literal["numerics", "kv", "lag"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class TokenRatio(NamedTuple):
    """The log-ratio of a token. `place`: its position as a share of the response, in [0, 1)."""

    place: float
    numerics: float
    kv: float
    lag: float


def mismatch_kl(ratios: Collection[TokenRatio], causes: Collection[Cause] = CAUSES) -> float:
    """The KL, in nats a token, if the log-ratios had some of their parts only."""
    totals = [sum(getattr(each, cause) for cause in causes) for each in ratios]
    return fmean(expm1(x) - x for x in totals)


def parts_of(ratios: Collection[TokenRatio]) -> dict[Cause, float]:
    """What each cause adds to the KL, in nats a token."""
    totals = [each.numerics + each.kv + each.lag for each in ratios]
    weights = [expm1(x) / x - 1 if x else 0.0 for x in totals]  # k3(x) / x
    weighted = list(zip(ratios, weights, strict=True))
    return {cause: fmean(getattr(each, cause) * weight for each, weight in weighted) for cause in CAUSES}
