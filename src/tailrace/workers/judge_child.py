"""The process of a judge model. What arrives while a batch is computed is the next batch."""

import msgspec

from tailrace.reward.judge_model import ModelJudge
from tailrace.workers.channel import WorkerChannel, WorkerEnd
from tailrace.workers.child import begin, config_errors_sent, end_with_controller
from tailrace.workers.judge_messages import Judged, JudgeJob, Judging
from tailrace.workers.messages import Ready
from tailrace.workers.reward_messages import Failed


def serve(job: JudgeJob, channel: WorkerEnd[Judging]) -> None:
    """Load the model and answer until the controller says no more."""
    with config_errors_sent(channel):
        judge = ModelJudge.load(job.judge)
    channel.send(Ready())
    while (asked := channel.receive(wait=True)) is not None:
        for score in judge.scores([message.messages for message in asked]):
            channel.send(Judged(score if isinstance(score, float) else Failed(score.reason, score.detail)))


def main() -> None:
    end, job = begin(JudgeJob)
    end_with_controller(end)
    serve(job, WorkerChannel(end, msgspec.msgpack.Decoder(Judging)))


if __name__ == "__main__":
    main()
