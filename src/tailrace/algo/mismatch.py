"""The log-ratio of trained tokens, current policy to behaviour policy, in parts that add up.

    numerics   trainer - engine, both under the weights of the token, the engine with a fresh KV cache
    kv         engine with a fresh KV cache - engine as recorded
    lag        trainer under the current weights - trainer under the weights of the token

The KL of the behaviour policy to the current one is estimated by k2 (losses.py), half the square of the
log-ratio x. It is linear in the parts: that of part p is the mean of p x / 2, and these add up to it. A part
that goes against the others has a negative one.
"""

from collections.abc import Collection, Iterable
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

    @property
    def total(self) -> float:
        return self.numerics + self.kv + self.lag


def parts_of(ratios: Collection[TokenRatio]) -> dict[Cause, float]:
    """Return what each cause adds to the KL, in nats a token."""
    return {cause: fmean(getattr(each, cause) * each.total / 2 for each in ratios) for cause in CAUSES}


def k2(log_ratios: Iterable[float]) -> float:
    """The KL by the estimator k2, in nats a token."""
    return fmean(x * x / 2 for x in log_ratios)


def k3(log_ratios: Iterable[float]) -> float:
    """The KL by the estimator k3, as in the figure mismatch_kl, in nats a token."""
    return fmean(expm1(x) - x for x in log_ratios)
