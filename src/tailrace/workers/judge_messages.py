"""What crosses between the controller and the process of a judge model, beside the messages of all
(messages.py)."""

import msgspec

from tailrace.reward.base import RewardSettings
from tailrace.reward.judge_settings import LocalJudgeSettings
from tailrace.workers.messages import Job, Ready, Refused
from tailrace.workers.reward_messages import Failed


class JudgeJob(Job):
    """Score completions with a model."""

    judge: LocalJudgeSettings


def judge_jobs(reward: RewardSettings) -> list[JudgeJob]:
    """Return the jobs of the judges that are worker processes."""
    models = [each for each in reward.judges if isinstance(each, LocalJudgeSettings)]
    return [JudgeJob(threads=each.threads, judge=each) for each in models]


class Judging(msgspec.Struct, tag=True):
    """Score a completion. Answered by Judged."""

    messages: list[dict[str, str]]
    """What the judge reads, as chat messages."""


class Judged(msgspec.Struct, tag=True):
    outcome: float | Failed


FromJudge = Ready | Refused | Judged
