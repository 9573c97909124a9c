"""Kinds of judges: behind an endpoint, or in a process of the run."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from tailrace import clock
from tailrace.contracts.memory import ProcessMemory
from tailrace.drivers.kinds.hooks import SimulatedJudges
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.kinds import JudgeKind, Verdict
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.workers.base import HostSettings
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.worker import BatchWorker, Job, WorkerConnection, batched
from tailrace.errors import ConfigError, RewardFailed
from tailrace.extras.judges.endpoint import (
    EndpointJudge,
    check_endpoint,
    check_template,
    messages_of,
    score_reader,
)
from tailrace.extras.judges.memory import check_folder, judge_memory
from tailrace.extras.judges.settings import EndpointJudgeSettings, LocalJudgeSettings
from tailrace.extras.judges.simulated import SimJudge, forward_pass
from tailrace.sim.host import Host
from tailrace.sim.settings import SimSettings
from tailrace.types import Prompt

if TYPE_CHECKING:
    from tailrace.extras.judges.local import ModelJudge


Messages = list[dict[str, str]]
"""Chat messages that the judge reads."""


class JudgeJob(Job):
    """Score completions with a model."""

    judge: LocalJudgeSettings


class JudgeWorker(BatchWorker):
    """A process of a judge model. What arrives while a batch is computed is the next batch."""

    job_type = JudgeJob

    def __init__(self, judge: "ModelJudge") -> None:
        self._judge = judge

    @override
    @classmethod
    def load_job(cls, job: JudgeJob, connection: WorkerConnection) -> "JudgeWorker":
        from tailrace.extras.judges.local import ModelJudge

        return cls(ModelJudge.load(job.judge))

    @batched
    def score(self, conversations: list[Messages]) -> Iterable[float | RewardFailed]:
        """Score completions. One that has no score has its failure."""
        return self._judge.scores(conversations)

    @batched
    def write(self, conversations: list[Messages]) -> Iterable[str | RewardFailed]:
        """Write answers. One that has none has its failure."""
        return self._judge.answers(conversations)


class RemoteJudge:
    """A Judge (extras/judges/endpoint.py) in its own process. It has no time limit: its work is bounded by
    the length of the text."""

    def __init__(self, worker: RemoteWorker, settings: LocalJudgeSettings) -> None:
        self._worker, self.settings, self._read = worker, settings, score_reader(settings)

    async def judge(self, call: Call) -> Verdict:
        """Score a completion. When this is cancelled, the score is computed nevertheless."""
        messages = messages_of(self.settings, call)
        if self.settings.labels:
            return Verdict(await self._worker.call(JudgeWorker.score, messages))
        answer = await self._worker.call(JudgeWorker.write, messages)
        if (score := self._read(answer)) is None:
            raise RewardFailed("judge unreadable", f"no score in {answer!r:.300} (reward.judges.pattern)")
        return Verdict(score, answer)

    async def close(self) -> None:
        """Do nothing: its worker ends with the run."""


class EndpointJudges(JudgeKind):
    """Models behind an endpoint."""

    settings = EndpointJudgeSettings

    @override
    def check(
        self, judge: EndpointJudgeSettings, reward: RewardSettings, host: object, prompts: Sequence[Prompt]
    ) -> str | None:
        check_template(judge, [prompt.row for prompt in prompts])
        for prompt in prompts[:1]:
            call = Call(prompt.text, "", [], "stop", prompt.row, prompt.given, prompt.source)
            return clock.run(check_endpoint(judge, reward.timeout_s, call), virtual=False)
        return None

    @override
    async def begin(self, judge: EndpointJudgeSettings, start: object, timeout_s: float) -> EndpointJudge:
        return EndpointJudge(judge, timeout_s)


class LocalJudges(JudgeKind):
    """Models in processes of the run."""

    settings = LocalJudgeSettings

    @override
    def check(
        self, judge: LocalJudgeSettings, reward: object, host: HostSettings, prompts: Sequence[Prompt]
    ) -> None:
        check_template(judge, [prompt.row for prompt in prompts])
        check_folder(judge)
        if host.gives_devices:
            problem, remedy = "it runs on the controller's host only", 'serve it, and write "endpoint"'
            raise ConfigError("reward.judges.kind", judge.kind, problem, remedy)

    @override
    def memory(self, judge: LocalJudgeSettings) -> Sequence[ProcessMemory]:
        return (judge_memory(judge),)

    @override
    async def begin(
        self, judge: LocalJudgeSettings, start: Callable[..., Awaitable[RemoteWorker]], timeout_s: float
    ) -> RemoteJudge:
        job = JudgeJob(threads=judge.threads, judge=judge)
        return RemoteJudge(await start(JudgeWorker, f"judge-{judge.name}", job), judge)


class SimJudges(SimulatedJudges):
    """Judges on the devices of the engines."""

    @override
    def simulated(self, settings: SimSettings, hosts: Sequence[Host | None]) -> list[SimJudge]:
        assert settings.cluster
        forward = forward_pass(settings)
        return [SimJudge(forward, host) for host in hosts for _ in range(settings.cluster.tensor_parallel)]
