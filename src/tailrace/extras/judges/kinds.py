"""The kinds of judges: behind an endpoint, or in a process of the run."""

from collections.abc import Awaitable, Callable, Sequence

from tailrace import clock
from tailrace.contracts.memory import ProcessMemory
from tailrace.devices import check_device
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.settings import EndpointJudgeSettings, LocalJudgeSettings, RewardSettings
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.errors import ConfigError
from tailrace.extras.judges.endpoint import EndpointJudge, check_endpoint, check_template
from tailrace.extras.judges.memory import check_folder, judge_memory
from tailrace.extras.judges.simulated import SimJudge, forward_pass
from tailrace.extras.judges.worker import JudgeJob, JudgeWorker, RemoteJudge
from tailrace.sim.host import Host
from tailrace.sim.settings import SimSettings
from tailrace.types import Prompt


class EndpointJudges:
    """`JudgeKind` (drivers/reward/kinds.py) of models behind an endpoint."""

    def check(
        self, judge: EndpointJudgeSettings, reward: RewardSettings, host: str, prompts: Sequence[Prompt]
    ) -> str | None:
        check_template(judge, [prompt.row for prompt in prompts])
        for prompt in prompts[:1]:
            call = Call(prompt.text, "", [], "stop", prompt.row, prompt.given, prompt.source)
            return clock.run(check_endpoint(judge, reward.timeout_s, call), virtual=False)
        return None

    def memory(self, judge: EndpointJudgeSettings) -> Sequence[ProcessMemory]:
        return ()

    async def begin(self, judge: EndpointJudgeSettings, start: object, timeout_s: float) -> EndpointJudge:
        return EndpointJudge(judge, timeout_s)


class LocalJudges:
    """`JudgeKind` (drivers/reward/kinds.py) of models in processes of the run."""

    def check(self, judge: LocalJudgeSettings, reward: object, host: str, prompts: Sequence[Prompt]) -> None:
        check_template(judge, [prompt.row for prompt in prompts])
        check_folder(judge)
        if host != "local":
            problem, remedy = "it runs on the controller's host only", 'serve it, and write "endpoint"'
            raise ConfigError("reward.judges.kind", judge.kind, problem, remedy)
        check_device("reward.judges.device", judge.device)

    def memory(self, judge: LocalJudgeSettings) -> Sequence[ProcessMemory]:
        return (judge_memory(judge),)

    async def begin(
        self, judge: LocalJudgeSettings, start: Callable[..., Awaitable[RemoteWorker]], timeout_s: float
    ) -> RemoteJudge:
        job = JudgeJob(threads=judge.threads, judge=judge)
        return RemoteJudge(await start(JudgeWorker, f"judge-{judge.name}", job), judge)

    def simulated(self, settings: SimSettings, hosts: Sequence[Host | None]) -> list[SimJudge]:
        """Return the judges of [sim.rewards.judge], one on each device of the engines of these hosts."""
        assert settings.cluster
        forward = forward_pass(settings)
        return [SimJudge(forward, host) for host in hosts for _ in range(settings.cluster.tensor_parallel)]
