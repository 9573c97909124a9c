"""Types of schedule parameters, and checks between them."""

from math import inf
from typing import Annotated

from pydantic import BeforeValidator, Field

from tailrace.errors import ConfigError
from tailrace.types import KV

Count = Annotated[int, Field(ge=1)]
"""A count of at least one."""
Bound = Annotated[int, Field(ge=0)]
"""Publications."""
Factor = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]
"""A multiple of what is wanted."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


def _known_rule(value: object) -> object:
    if value in ("keep", "recompute") or (
        isinstance(value, int | float) and value is not True and 0 < value < inf
    ):
        return value
    raise ValueError("it must be 'keep', 'recompute' or a finite number above 0")


KVRule = Annotated[KV | float, BeforeValidator(_known_rule)]
"""Keep or recompute the KV cache of sequences in flight when the weights change; a number: recompute it at
this drift, in nats a token (`Run.publish`)."""


def require(true: bool, name: str, value: object, problem: str, remedy: str) -> None:
    """Raise a ConfigError for a parameter of a schedule unless a condition is true."""
    if not true:
        raise ConfigError(f"schedule.{name}", value, problem, remedy)


def require_divisible(groups_per_round: int, groups_per_step: int) -> None:
    """Raise a ConfigError unless a round consists of whole optimizer steps."""
    R, U = groups_per_round, groups_per_step
    divisors = ", ".join(str(n) for n in range(1, min(R, 1024) + 1) if R % n == 0)
    problem = f"groups_per_round = {R} is not divisible by it"
    require(R % U == 0, "groups_per_step", U, problem, f"choose from {divisors}")
