"""Episodes in virtual time: an environment with calls, and the parts that play it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from helpers.virtual import EXACT
from tailrace.contracts import environments as base
from tailrace.contracts.environments import Policy
from tailrace.contracts.sampling import SamplingSettings
from tailrace.controller.base import RunComponents
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.rollout.episode import Episode
from tailrace.rollout.episodes import Episodes
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import SimSettings
from tailrace.sim.world import Lengths
from tailrace.types import Prompt, Sample, SampleId

CALL_S, OBSERVED = 2.0, 5


@dataclass
class Calls:
    """An environment of three turns, each but the last followed by two calls at a time."""

    made: list[tuple[SampleId, int, int]] = field(default_factory=list)
    answered: list[tuple[SampleId, int, int]] = field(default_factory=list)
    turns: int = 3
    reward: float | None = None

    async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
        for turn in range(self.turns):
            await policy.complete([{"role": "user", "content": str(turn)}] if turn else ())
            if turn < self.turns - 1:
                answers = await asyncio.gather(
                    *(policy.call(self.action(policy.id, turn, n)) for n in (0, 1))
                )
                assert answers == [f"{policy.id} {turn} {n}" for n in (0, 1)]
        return base.Outcome(self.reward, {"turns": self.turns})

    def action(self, sample: SampleId, turn: int, number: int) -> Callable[[], Awaitable[str]]:
        async def act() -> str:
            self.made.append((sample, turn, number))
            await asyncio.sleep(CALL_S)
            self.answered.append((sample, turn, number))
            return f"{sample} {turn} {number}"

        return act


LONG, SHORT = (SamplingSettings(max_completion_tokens=limit) for limit in (10**6, 20))


def episodes(
    environment: base.Environment,
    sampling: SamplingSettings = LONG,
    max_context_tokens: int = 10**6,
    parking_timeout_s: float = 60.0,
    max_failures: int = 100,
    **changes: Any,
) -> Episodes:
    episode = partial(
        Episode,
        observe=lambda messages, last: [0] * OBSERVED,
        decode=lambda ids: "",
        sampling=sampling,
        max_context_tokens=max_context_tokens,
        parking_timeout_s=parking_timeout_s,
    )
    return Episodes(environment, lambda ids: "", episode, max_failures=max_failures, **changes)


def world(
    environment: base.Environment, sim: SimSettings = EXACT, **changes: Any
) -> Callable[[], RunComponents]:
    """Parts whose episodes have turns of a third of the length of a response."""

    def parts() -> RunComponents:
        lengths = Lengths(sim.lengths, 0)

        def length_of(sample: Sample) -> int:
            return sample.turn_start + (10 if sim is EXACT else max(1, lengths(sample) // 3))

        count = sim.engines.count or 1
        engines = [SimEngine(f"engine-{number}", sim.engines, length_of) for number in range(count)]
        run_episode = episodes(environment, **changes).run
        return replace(simulated_parts(sim, 0), engines=engines, run_episode=run_episode)

    return parts
