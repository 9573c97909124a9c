"""What schedules' parameters may be, beyond plain types."""

from typing import Annotated

from pydantic import Field

from tailrace.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
"""At least one."""
Bound = Annotated[int, Field(ge=0)]
"""Publications: how old a trained token may be."""
Factor = Annotated[float, Field(ge=1.0)]
"""How many times more than wanted."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def require(true: bool, name: str, value: object, problem: str, remedy: str) -> None:
    """
    Raises:
        ConfigError: `true` is false.
    """
    if not true:
        raise ConfigError(f"schedule.{name}", value, problem, remedy)


def require_divisible(R: int, U: int) -> None:
    """R groups must make whole optimizer steps of U."""
    divisors = ", ".join(str(n) for n in range(1, R + 1) if R % n == 0)
    require(R % U == 0, "U", U, f"R = {R} groups do not divide into steps of {U}", f"choose from {divisors}")
