"""Episodes whose tokens are too old, with tools and the embedded engine."""

import asyncio
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest

from tailrace import clock
from tailrace.api import load_config
from tailrace.controller.base import RunComponents
from tailrace.drivers.assembly.open import open_parts
from tailrace.record.events import Event, Recorder, RequestStarted
from tailrace.rollout.router import Router
from tailrace.types import Group, Sample, SampleId, Span, noise_seed

EXAMPLE = Path(__file__).parents[3] / "examples" / "tools.toml"
ENVIRONMENT = '''
from tailrace.contracts.environments import Outcome

class Thrice:
    """Three turns, with a call after each but the last."""

    async def run(self, prompt, policy):
        turn = await policy.complete(max_tokens=12)
        for _ in range(2):
            async def shout() -> str:
                return turn.text.upper()
            answer = await policy.call(shout)
            turn = await policy.complete([{"role": "tool", "content": answer}], max_tokens=12)
        return Outcome(float(turn.num_tokens), {"last": turn.num_tokens})
'''


class Cancelling:
    """Sink: cancels every second sample when its second turn begins."""

    def __init__(self) -> None:
        self.tasks = dict[SampleId, asyncio.Task[None]]()

    def on(self, event: Event) -> None:
        if isinstance(event, RequestStarted) and event.num_tokens and event.sample.number % 2:
            self.tasks[event.sample].cancel()

    def close(self) -> None:
        """Nothing to do."""


async def play(parts: RunComponents, samples: list[Sample], sink: Cancelling | None = None) -> None:
    router = Router(parts.engines, Recorder(*([sink] if sink else [])), parts.run_episode)
    router.max_age = 0
    tasks = {sample.id: asyncio.create_task(router.serve(sample)) for sample in samples}
    if sink:
        sink.tasks = tasks
    await asyncio.wait(tasks.values())


@pytest.mark.slow
def test_a_verified_episode_is_the_one_that_the_new_weights_generate_from_nothing(tmp_path: Path) -> None:
    """Half of the episodes had ended, the others were interrupted in the second turn."""
    (tmp_path / "thrice.py").write_text(ENVIRONMENT)
    environment = f'{{ kind = "python", environment = "{tmp_path}/thrice.py:Thrice" }}'
    changes = {"environment": environment, "trainer.learning_rate": 4e-4, "sampling.temperature": 1.2}
    config = load_config(EXAMPLE, changes)

    def fresh(parts: RunComponents) -> list[Sample]:
        group = Group(parts.prompts[0], 48, [])
        ids = [SampleId(0, 0, number) for number in range(48)]
        group.samples = [Sample(id, group, noise_seed(0, id)) for id in ids]
        return group.samples

    async def run() -> tuple[list[Sample], list[Sample], list[Sample]]:
        async with open_parts(config, tmp_path) as parts:
            had, new = fresh(parts), fresh(parts)
            await play(parts, had, Cancelling())
            old = deepcopy(had)
            for sample in had:
                sample.advantage = 1.0 - 2 * (sample.num_tokens % 2)
            await parts.trainer.accumulate([[sample for sample in had if sample.ended]], version=0)
            await parts.trainer.step()
            weights = await parts.trainer.publish(1)
            for engine in parts.engines:
                await engine.load(weights, kv="recompute")
            for sample in had:
                sample.to_verify = True
            await play(parts, had)
            await play(parts, new)
            return old, had, new

    old, had, new = clock.run(run(), virtual=False)
    assert Counter(sample.in_episode for sample in old) == {False: 24, True: 24}
    cuts = Counter[tuple[bool, int | None]]()
    for before, sample, expected in zip(old, had, new, strict=True):
        assert sample.completion_ids == expected.completion_ids
        assert sample.turns == expected.turns and len(sample.turns) == 3
        assert sample.spans == expected.spans == [Span(1, sample.num_tokens)]
        assert sample.behavior_logprobs == pytest.approx(expected.behavior_logprobs, abs=1e-4)
        assert (sample.reward, sample.reward_metrics) == (expected.reward, expected.reward_metrics)
        assert sample.ended and expected.ended and sample.verified_turn is None
        kept = before.num_tokens - sample.num_changed
        assert sample.completion_ids[:kept] == before.completion_ids[:kept]
        ends = [turn.num_tokens for turn in before.turns]
        cut = sum(end <= kept for end in ends) if sample.num_changed else None
        cuts[before.in_episode, cut] += 1
    assert {(is_under_way, cut) for is_under_way in (False, True) for cut in (None, 0)} <= cuts.keys()
    assert sum(num for (_, cut), num in cuts.items() if cut) > 2, cuts
