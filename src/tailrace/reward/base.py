"""What a reward is to the pool: a number for a finished sample, later."""

from typing import Protocol

from pydantic import Field

from tailrace.settings import Settings
from tailrace.types import Sample


class RewardSettings(Settings):
    """How samples are scored."""

    function: str | None = None
    """'package.module:name' or 'path/to/file.py:name'; None: the data's own scorer."""
    timeout_s: float = Field(default=10.0, gt=0)
    """A call that takes longer is killed with its process."""
    workers: int = Field(default=1, ge=1)
    """Processes that score."""


class Rewards(Protocol):
    """Scores samples off the controller's loop."""

    async def score(self, sample: Sample) -> float:
        """The reward of a finished sample; sets `sample.text`.

        Raises:
            RewardFailed: it raised, hung, or gave something that is no finite number.
        """
