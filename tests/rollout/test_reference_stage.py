"""The reference stage in virtual time: beside the rollout and the rewards, which do not wait for it."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from helpers.virtual import EXACT, SCHEDULES_BY_NAME, change, simulate
from tailrace.algo.base import AlgorithmSettings
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.record.events import Accumulated, Evaluated, ReferenceScored, SampleScored
from tailrace.schedules.rolloutpipe import rolloutpipe
from tailrace.sim.engine import SimEngine
from tailrace.types import Sample

PAIRS = RunSettings(rounds=1, group_size=2)
WITH_KL = AlgorithmSettings(kl_coef=0.1)
SCHEDULE = partial(rolloutpipe, groups_per_round=2, groups_per_step=1)


class Reference:
    """Takes a fixed time for each sample, all at once, and writes down whom it was asked for."""

    def __init__(self, seconds: float, logprob: float = -1.0) -> None:
        self._seconds, self._logprob = seconds, logprob
        self.asked: list[tuple[float, Sample]] = []

    async def logprobs(self, sample: Sample) -> list[float]:
        self.asked.append((asyncio.get_running_loop().time(), sample))
        await asyncio.sleep(self._seconds)
        return [self._logprob]


def world(reference: Reference, *, reward_s: float = 0.0, slow: int = 30) -> Callable[[], RunComponents]:
    """The first prompt's responses have 10 tokens, the others' more; a token is a second."""

    def parts() -> RunComponents:
        rewards = change(EXACT.rewards, median_s=reward_s or 1e-9, sigma=0.0)
        engine = SimEngine("engine", EXACT.engines, lambda s: 10 if s.prompt.index == 0 else slow)
        sim = change(EXACT, rewards=rewards)
        return replace(simulated_parts(sim, seed=0), engines=[engine], reference=reference)

    return parts


@pytest.mark.parametrize(("reward_s", "reference_s"), [(4.0, 1.0), (1.0, 4.0)])
def test_a_sample_is_judged_when_reward_and_reference_are_both_there(
    reward_s: float, reference_s: float
) -> None:
    """Side by side: 4 seconds, not 5. The first group is trained while the second is generated."""
    reference = Reference(reference_s)
    outcome = simulate(SCHEDULE, PAIRS, EXACT, parts=world(reference, reward_s=reward_s))
    times = [event.time_s for event in outcome.of(SampleScored)]
    assert times == pytest.approx([14.0, 14.0, 34.0, 34.0])
    assert [time for time, _ in reference.asked] == pytest.approx([10.0, 10.0, 30.0, 30.0])
    assert outcome.of(Accumulated)[0].start_s == pytest.approx(14.0)
    assert all(sample.reference_logprobs == [-1.0] for _, sample in reference.asked)


def test_log_probs_that_are_not_finite_cost_the_sample_and_not_the_run() -> None:
    """The group is replaced, as one whose rewards all failed."""

    class Odd(Reference):
        async def logprobs(self, sample: Sample) -> list[float]:
            return [math.nan] if sample.prompt.index == 0 else [-1.0]

    outcome = simulate(SCHEDULE, PAIRS, EXACT, parts=world(Odd(0.0)))
    failures = [event.failure for event in outcome.of(SampleScored) if event.failure]
    assert failures == ["reward without reference"] * 2
    assert outcome.totals.groups == {"trained": 2, "dropped": 1}


def test_evaluation_asks_for_no_reference() -> None:
    reference = Reference(1.0)
    settings = change(PAIRS, eval_every=1, eval_prompts=3)
    outcome = simulate(SCHEDULE, settings, EXACT, parts=world(reference))
    assert len(outcome.of(Evaluated)) == 2 and len(reference.asked) == 4


def test_the_simulated_reference_computes_one_sample_at_a_time() -> None:
    """11 positions at 11 a second: four samples that finish together are judged a second apart."""
    sim = change(EXACT, reference={"tokens_per_s": 11.0})
    outcome = simulate(SCHEDULE, PAIRS, sim, algorithm=WITH_KL)
    assert [event.time_s for event in outcome.of(SampleScored)] == pytest.approx([11, 12, 13, 14])


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_every_schedule_distils_in_virtual_time_and_says_when_each_sample_was_scored(name: str) -> None:
    """Also samples of equal rewards are trained. None is scored by the teacher twice."""
    teaching = AlgorithmSettings.model_validate({"name": "distillation"})
    outcome = simulate(SCHEDULES_BY_NAME[name], algorithm=teaching)
    scored = [event.sample for event in outcome.of(ReferenceScored)]
    trained = {sample for event in outcome.of(Accumulated) for sample in event.samples}
    assert trained and trained <= set(scored) and len(scored) == len(set(scored))
    assert all(event.end_s > event.start_s for event in outcome.of(ReferenceScored))
