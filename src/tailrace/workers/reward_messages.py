"""What crosses between the controller and a reward worker, beside the messages of all (messages.py)."""

import msgspec

from tailrace.reward.base import Call, Scores
from tailrace.workers.messages import Ready, Refused


class Score(msgspec.Struct, tag=True):
    """Make one call of the reward function. Answered by Scored of the same number, or by Serving where the
    call ended its process."""

    number: int
    call: Call


class Serving(msgspec.Struct, tag=True):
    """A new process is ready for calls."""

    pid: int
    """The process, and the process group that it leads."""
    ended: str
    """How the process before it ended; empty for the first one."""


class Failed(msgspec.Struct, array_like=True, tag=True):
    """A RewardFailed, as data."""

    reason: str
    detail: str
    is_defect: bool = False


class Scored(msgspec.Struct, tag=True):
    """The outcome of a call."""

    number: int
    outcome: Scores | Failed


FromScorer = Ready | Refused | Serving | Scored
