"""Two agents: the proposer writes a riddle, and solvers answer it. The proposer is rewarded for a riddle that
some of them answer."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf


class Data(vf.TaskData):
    topic: str = ""


class Propose(vf.Task[Data]):
    pass


class Solve(vf.Task[Data]):
    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 8)


class Config(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig(max_turns=1)
    n: int = 2


class ProposerSolverEnv(vf.Env[Config]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.solver.trainable = False

    async def run(self, task: Propose, agents: vf.Agents) -> None:
        riddle = (await agents.proposer.run(task)).last_reply
        async with asyncio.TaskGroup() as group:
            for _ in range(self.config.n):
                group.create_task(agents.solver.run(Solve(Data(prompt=f"Solve: {riddle}"))))

    async def finalize(self, task: Propose, episode: vf.Episode) -> None:
        solvers = [trace for trace in episode.traces if trace.agent.name == "solver"]
        rate = sum(trace.reward for trace in solvers) / len(solvers)
        (proposer,) = (trace for trace in episode.traces if trace.agent.name == "proposer")
        proposer.record_metric("solve_rate", rate)
        proposer.record_reward("learnability", 4 * rate * (1 - rate))


class ProposerSolverTaskset(vf.Taskset[Propose, vf.TasksetConfig]):
    def load(self) -> Iterator[Propose]:
        for topic in ("geometry", "probability", "rates", "primes"):
            yield Propose(Data(prompt=f"Write a riddle about {topic}.", topic=topic), self.config.task)


__all__ = ["ProposerSolverEnv", "ProposerSolverTaskset"]
