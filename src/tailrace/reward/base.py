"""The contract of rewards, and their settings."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from pydantic import Field

from tailrace.settings import Settings
from tailrace.types import FinishReason, Sample


class RewardSettings(Settings):
    """How finished samples are scored."""

    function: str | None = None
    """'package.module:name' or 'path/to/file.py:name'; None: the scorer of the data, where they bring one."""
    timeout_s: float = Field(default=10.0, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds after which a call is stopped together with the processes that it started; above 0, at most a
    day."""
    on_timeout: Literal["zero", "drop"] = "zero"
    """What a call that is stopped gives: a reward of zero, which is counted as a timeout (RollPacker), or a
    failure, which drops the sample."""
    max_failures: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Consecutive failures or timeouts that end the run; at least 1. None: as many as a round has samples."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Processes that score, one call at a time each; 1 to 1024."""


OWN_ARGUMENTS = ("prompt", "completion", "completion_ids", "finish_reason")
"""What a sample gives to a reward function besides the columns of its row."""


class Call(msgspec.Struct, array_like=True):
    """The arguments of one call of a reward function."""

    prompt: str
    completion: str
    completion_ids: Sequence[int]
    finish_reason: FinishReason
    row: Mapping[str, object]
    """The columns of the data."""

    def arguments(self) -> dict[str, object]:
        """Return the arguments by name. The sample's own win over columns of the same names."""
        return {**self.row, **{name: getattr(self, name) for name in OWN_ARGUMENTS}}


class Rewards(Protocol):
    """Scores samples outside the controller's event loop."""

    async def score(self, sample: Sample) -> float:
        """Return the reward of a finished sample and set `sample.text`.

        A call that exceeds the time limit gives 0.0 and sets `sample.timed_out`, or fails with the reason
        'timeout', as `RewardSettings.on_timeout` says. The call may be cancelled.

        Raises:
            RewardFailed: the function raised, ended its process, or returned no finite number.
        """
