"""The simulated trainer, rewards and lengths."""

import asyncio
import math
from pathlib import Path

import pytest

from helpers.virtual import EXACT, change
from tailrace import clock
from tailrace.contracts.data import Epochs
from tailrace.contracts.reward import TimeoutSettings
from tailrace.errors import CheckpointError, RewardFailed
from tailrace.rollout.reward_timeout import Anchors
from tailrace.sim.reward import SimRewards, rewards_of
from tailrace.sim.settings import (
    SimCodeSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimTrainerSettings,
)
from tailrace.sim.trainer import STEPS_FILE, SimTrainer
from tailrace.sim.world import Lengths, SimPrompts
from tailrace.types import Group, Sample, SampleId

pytestmark = pytest.mark.virtual


def sample(prompt: int = 0, number: int = 0) -> Sample:
    group = Group(SimPrompts(2)[prompt], 1, [])
    group.samples = [Sample(SampleId(prompt, 0, number), group)]
    return group.samples[0]


async def test_a_step_trains_what_was_accumulated_since_the_last_and_counts_its_own_time() -> None:
    trainer = SimTrainer(SimTrainerSettings(tokens_per_s=4.0, step_s=0.5))
    samples = [sample(number) for number in range(3)]
    for one in samples:
        one.grow(6, version=0)
    await trainer.accumulate([samples[:1]], version=0)
    await asyncio.sleep(100)
    await trainer.accumulate([samples[1:2]], version=0)
    first = await trainer.step()
    assert (clock.now(), first.compute_s, first.num_steps, first.num_tokens) == (104.5, 4.5, 1, 12)
    assert first.samples == (samples[0].id, samples[1].id)
    await trainer.accumulate([samples[2:]], version=0)
    second = await trainer.step()
    assert (second.compute_s, second.num_steps, second.samples) == (2.5, 2, (samples[2].id,))


@pytest.mark.parametrize(("replicas", "expected_s"), [(None, 2 + 2 * 16), (1, 2 * (2 + 2 * 16))])
async def test_attention_takes_time_by_the_square_of_each_sequence(
    replicas: int | None, expected_s: float
) -> None:
    """Two sequences of 4 tokens, one of them the prompt; one replica of two has half of the speed."""
    trainer = SimTrainer(SimTrainerSettings(tokens_per_s=4.0, attention_s=1.0), replicas=2)
    samples = [sample(number) for number in range(2)]
    for one in samples:
        one.grow(2, version=0)
    await trainer.accumulate([samples], version=0, replicas=replicas)
    assert clock.now() == expected_s


async def test_the_effective_sample_size_is_one_on_policy_and_falls_with_age() -> None:
    trainer = SimTrainer(SimTrainerSettings(drift=0.5))
    fresh, stale = sample(0), sample(1)
    await trainer.publish(3)
    fresh.grow(10, version=3)
    stale.grow(10, version=1)
    assert await trainer.ess([[fresh]], version=3) == 1.0
    assert 0 < await trainer.ess([[stale]], version=3) < await trainer.ess([[fresh, stale]], version=3) < 1


async def test_a_trainer_goes_on_from_its_checkpoint_and_refuses_a_torn_one(tmp_path: Path) -> None:
    trainer = SimTrainer(SimTrainerSettings())
    await trainer.step()
    await trainer.save(tmp_path / "one")
    await trainer.save(tmp_path / "one")  # over what a killed run left
    again = SimTrainer(SimTrainerSettings())
    await again.restore(tmp_path / "one")
    assert (await again.step()).num_steps == 2
    (tmp_path / "one" / STEPS_FILE).write_text("")
    with pytest.raises(CheckpointError, match=STEPS_FILE):
        await again.restore(tmp_path / "one")


async def test_rewards_take_time_on_a_bounded_number_of_workers() -> None:
    rewards = SimRewards(SimRewardSettings(workers=2, median_s=3.0, sigma=0.0), seed=0)
    await asyncio.gather(*(rewards.score(sample(number)) for number in range(5)))
    assert clock.now() == 9.0


async def test_a_reward_that_fails_says_so() -> None:
    rewards = SimRewards(change(SimRewardSettings(median_s=3.0, sigma=0.0), failing=1.0), seed=0)
    with pytest.raises(RewardFailed) as caught:
        await rewards.score(sample())
    assert (caught.value.reason, clock.now()) == ("raised", 3.0)


async def test_a_reward_that_times_out_is_zero_and_is_marked() -> None:
    rewards = SimRewards(change(SimRewardSettings(median_s=3.0, sigma=0.0), hanging=1.0), seed=0)
    one = sample()
    assert (await rewards.score(one), one.timed_out, clock.now()) == (0.0, True, 10.0)


async def test_a_step_reports_the_effective_sample_size_and_the_kl_of_its_own_tokens() -> None:
    """Ten tokens of age 0 and ten of age 2: 20 / (10 + 10 exp((0.5 * 2)^2)), and half of (0.5 * 2)^2 / 2."""
    trainer = SimTrainer(SimTrainerSettings(drift=0.5))
    fresh, stale = sample(0), sample(1)
    fresh.grow(10, version=3)
    stale.grow(10, version=1)
    await trainer.accumulate([[fresh], [stale]], version=3)
    stats = await trainer.step()
    assert (stats.ess, stats.kl) == (pytest.approx(20 / (10 + 10 * math.e)), 0.25)
    stats = await trainer.step()
    assert (stats.ess, stats.kl) == (1.0, 0.0)


def test_the_reward_of_a_sample_is_its_own_whatever_else_is_scored() -> None:
    async def scores(order: list[int]) -> dict[int, float]:
        rewards = SimRewards(EXACT.rewards, seed=4)
        return {number: await rewards.score(sample(0, number)) for number in order}

    forwards = clock.run(scores(list(range(20))), virtual=True)
    assert forwards == clock.run(scores(list(reversed(range(20)))), virtual=True)
    assert set(forwards.values()) == {0.0, 1.0}


@pytest.mark.virtual
async def test_a_row_that_comes_again_keeps_its_solve_rate() -> None:
    """Three rows, each solved always or never, in five epochs."""
    prompts = SimPrompts(2, Epochs(3, seed=0))
    costs = change(EXACT.rewards, solvable=(1e-3, 1e-3))
    rewards, found = SimRewards(costs, seed=4), dict[int | None, set[float]]()
    for index in range(15):
        group = Group(prompts[index], 1, [])
        scored = await rewards.score(Sample(SampleId(index, 0, 0), group))
        found.setdefault(group.prompt.row_number, set()).add(scored)
    found = found
    assert [len(rewards) for rewards in found.values()] == [1, 1, 1]


def test_lengths_are_lognormal_clipped_and_fixed_by_the_sample() -> None:
    lengths = Lengths(SimLengthSettings(median_tokens=100, sigma=1.0, max_tokens=400), seed=0)
    drawn = sorted(lengths(sample(prompt)) for prompt in range(2001))
    assert 95 <= drawn[1000] <= 105
    assert drawn[-1] == 400 and drawn[0] >= 1
    assert 0.07 <= drawn.count(400) / 2001 <= 0.1  # P(z > ln 4) = 0.083
    assert lengths(sample(7, 3)) == lengths(sample(7, 3)) != lengths(sample(7, 4))


def test_the_correlation_is_that_of_two_responses_to_one_prompt() -> None:
    same = Lengths(SimLengthSettings(correlation=1.0), seed=0)
    assert len({same(sample(0, number)) for number in range(8)}) == 1
    none = Lengths(SimLengthSettings(sigma=0.0, median_tokens=10), seed=0)
    assert {none(sample(prompt)) for prompt in range(8)} == {10}


async def test_simulated_programs_learn_the_time_of_correct_ones_and_are_stopped_by_it() -> None:
    timeout = TimeoutSettings(min_s=2.0, factor=1.5, max_s=30.0)
    code = SimCodeSettings(cases=2, median_s=4.0, sigma=0.0, own_sigma=0.0, endless=0.0, timeout=timeout)
    anchors = Anchors()

    async def score(solvable: tuple[float, float], endless: float, prompt: int) -> tuple[float, float, bool]:
        cost = SimRewardSettings(solvable=solvable, code=code.model_copy(update={"endless": endless}))
        one, start_s = sample(prompt), clock.now()
        reward = await rewards_of(cost, 0, anchors).score(one)
        return reward, clock.now() - start_s, one.timed_out

    always, never = (1e9, 1e-9), (1e-9, 1e9)
    assert await score(always, endless=1.0, prompt=0) == (0.0, 30.0, True)
    assert await score(never, endless=0.0, prompt=0) == (0.0, 4.0, False)
    assert anchors.longest_s == {}
    assert await score(always, endless=0.0, prompt=0) == (1.0, 4.0, False)
    assert anchors.longest_s == {0: [4.0, 4.0]}
    assert await score(always, endless=1.0, prompt=0) == (0.0, 6.0, True)
    assert await score(always, endless=1.0, prompt=1) == (0.0, 30.0, True)
    stuck, _ = await asyncio.gather(
        score(always, endless=1.0, prompt=2), score(always, endless=0.0, prompt=2)
    )
    assert stuck == (0.0, 6.0, True)


async def test_a_simulated_test_case_is_stopped_by_its_own_anchor() -> None:
    """Two test cases of one prompt, of which only the times differ; all programs but the first hang in one of
    them, and are stopped 1.5 times its own time later."""
    timeout = TimeoutSettings(min_s=0.01, factor=1.5, max_s=300.0)
    code = SimCodeSettings(
        cases=2, median_s=4.0, sigma=0.0, case_sigma=1.0, own_sigma=0.0, endless=0.0, timeout=timeout
    )
    anchors = Anchors()

    async def score(endless: float, number: int) -> float:
        cost = SimRewardSettings(solvable=(1e9, 1e-9), code=code.model_copy(update={"endless": endless}))
        start_s = clock.now()
        await rewards_of(cost, 0, anchors).score(sample(0, number))
        return clock.now() - start_s

    longest_s = await score(0.0, number=0)
    first_s, second_s = anchors.longest_s[0]
    assert longest_s == max(first_s, second_s) > 1.1 * min(first_s, second_s)
    stopped_s = {round(await score(1.0, number), 6) for number in range(1, 9)}
    # A case that hangs does not shorten the wait for the other one, which is read first.
    assert stopped_s == {round(1.5 * first_s, 6), round(max(first_s, 1.5 * second_s), 6)}


async def test_a_simulated_program_is_stopped_by_the_reference_time_before_any_is_correct() -> None:
    """Twice the longest of its test cases; without the column a program that hangs has the whole limit."""

    async def score(column: str | None) -> float:
        timeout = TimeoutSettings(reference_column=column, min_s=0.01, factor=2.0, max_s=300.0)
        code = SimCodeSettings(cases=1, median_s=4.0, sigma=0.0, endless=1.0, timeout=timeout)
        start_s = clock.now()
        await rewards_of(SimRewardSettings(code=code), 0, Anchors()).score(sample(0))
        return clock.now() - start_s

    assert [await score(column) for column in ("reference_time", None)] == [8.0, 300.0]
