"""The controller's side of the process of a judge model."""

import msgspec

from tailrace.errors import RewardFailed
from tailrace.reward.base import Call
from tailrace.reward.judge import Verdict, messages_of
from tailrace.reward.judge_settings import LocalJudgeSettings
from tailrace.workers.conversation import Conversation
from tailrace.workers.judge_messages import FromJudge, Judged, JudgeJob, Judging
from tailrace.workers.remote import RemoteWorker
from tailrace.workers.reward_messages import Failed


class RemoteJudge(RemoteWorker[JudgeJob]):
    """A Judge (reward/judge.py) in its own process. It has no time limit: its work is bounded by the length
    of the text."""

    module = "tailrace.workers.judge_child"
    decoder = msgspec.msgpack.Decoder(FromJudge)
    settings: LocalJudgeSettings

    def __init__(self, process: Conversation, job: JudgeJob) -> None:
        super().__init__(process, job)
        self.settings = job.judge

    async def judge(self, call: Call) -> Verdict:
        """As Judge.judge. When this is cancelled, the score is computed nevertheless."""
        messages = messages_of(self.settings, call)
        match (await self.process.ask(Judging(messages), Judged)).outcome:
            case Failed() as failed:
                raise RewardFailed(failed.reason, failed.detail)
            case float(score):
                return Verdict(score)
