"""A judge that writes, in a process of its own: its answer is read, or fails its sample."""

import asyncio
from pathlib import Path

from helpers.tiny_models import LETTERS, save_tiny_model
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.kinds import Verdict
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.errors import RewardFailed
from tailrace.extras.judges.kind import JudgeJob, JudgeWorker, RemoteJudge
from tailrace.extras.judges.settings import LocalJudgeSettings


def test_a_written_answer_is_read_and_one_that_cannot_be_read_fails_its_sample(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "judge")
    given = {"path": tmp_path / "judge", "template": "{completion}", "labels": [], "pattern": "^(.)"}
    settings = LocalJudgeSettings.model_validate(given)

    async def main() -> list[Verdict | BaseException]:
        worker = await LocalSpawner(tmp_path).start("judge", JudgeWorker, JudgeJob(judge=settings))
        try:
            await worker.ready()
            written = await worker.call(JudgeWorker.write, [{"role": "user", "content": "ABC"}])
            values = {written[0].lower(): 0.25}
            readable = settings.model_copy(update={"values": values})
            judges = [RemoteJudge(worker, each) for each in (readable, settings)]
            call = Call("", "ABC", [], "stop", {}, None, "")
            return await asyncio.gather(*(each.judge(call) for each in judges), return_exceptions=True)
        finally:
            await worker.close()

    verdict, failure = asyncio.run(main())
    assert isinstance(verdict, Verdict) and verdict.score == 0.25
    assert len(verdict.answer) == 1 and verdict.answer in LETTERS
    assert isinstance(failure, RewardFailed) and failure.reason == "judge unreadable"
    assert verdict.answer in failure.detail and "reward.judges.pattern" in failure.detail
