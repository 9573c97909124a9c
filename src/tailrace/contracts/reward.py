"""The contract of rewards, and the time limit of a test case."""

from typing import Protocol

from pydantic import Field, model_validator

from tailrace.settings import Settings
from tailrace.types import Sample


class TimeoutSettings(Settings):
    """The time limit of a test case: min(max(min_s, factor * anchor), max_s) (RollPacker 4.3).

    The anchor is the longest run of this test case among the correct responses to the prompt so far, or the
    reference time of the row. Without one the limit is max_s. Evaluations learn no anchor and use none.
    """

    adaptive: bool = True
    """False: the limit is always max_s."""
    reference_column: str | None = Field(default=None, min_length=1)
    """Column with the seconds that a correct program takes for a test case: the anchor before the first
    response, in evaluations, too. RollPacker's published code has it, with factor = 2. A simulation takes
    the longest test case of a correct program, whatever the name. None: anchors are learnt."""
    factor: float = Field(default=1.5, ge=1, le=1000)
    """Lambda of the paper."""
    min_s: float = Field(default=2.0, gt=0, le=86_400)
    """T_min, in seconds; above 0, at most max_s."""
    max_s: float = Field(default=30.0, gt=0, le=86_400)
    """T_max, in seconds."""

    @model_validator(mode="after")
    def _check_order(self) -> "TimeoutSettings":
        if self.min_s > self.max_s:
            raise ValueError(f"min_s ({self.min_s:g}) is above max_s ({self.max_s:g})")
        return self


class Rewards(Protocol):
    """Scores samples outside the controller's event loop."""

    async def score(self, sample: Sample) -> float:
        """Return the reward of a finished sample. Set `sample.text`, `reward_metrics` and `reward_columns`.

        A call that exceeds the time limit gives 0.0 and sets `sample.timed_out`, or fails with the reason
        'timeout', as `RewardSettings.on_timeout` says. The call may be cancelled. Raises a RewardFailed if
        the function raised, ended its process, or returned no finite number."""
