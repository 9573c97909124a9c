"""What a fit finds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FitPart:
    """Fitted parameters of one kind of work.

    Args:
        values: by the key of the config, such as "sim.engines.base_s".
        observations: how many the fit rests on.
        explained: share of the variance that it explains; None where there is no such share.
        notes: what could not be identified, in words.
    """

    name: str
    values: Mapping[str, object]
    observations: int
    explained: float | None
    notes: Sequence[str]
