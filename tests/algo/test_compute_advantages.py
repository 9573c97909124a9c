"""From the rewards of a group to the advantages of its samples."""

import math

import pytest

from tailrace.algo.advantages import ComputeAdvantages, overlong_penalty
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.types import Group, Prompt, Sample, SampleId

REWARDS = (1.0, 0.0, 0.5, None)
LENGTHS = (10, 9, 2, 4)

SAMPLING = SamplingSettings(max_completion_tokens=10)


def group(rewards: tuple[float | None, ...] = REWARDS) -> Group:
    """Finished samples of unequal lengths; one without a reward has failed."""
    made = Group(Prompt(0, [1]), num_required=len(rewards), samples=[])
    for number, (reward, length) in enumerate(zip(rewards, LENGTHS, strict=False)):
        sample = Sample(SampleId(0, 0, number), made, reward=reward)
        sample.failure = "reward raised" if reward is None else None
        sample.extend([1] * length, [-1.0] * length, version=0)
        sample.reference_logprobs = [-1.5] * length
        made.samples.append(sample)
    made.kept = list(made.samples)
    return made


def advantages(made: Group, **settings: object) -> list[float]:
    assert ComputeAdvantages(AlgorithmSettings.model_validate(settings), SAMPLING)(made) is None
    return [sample.advantage for sample in made.trainable]


def test_only_samples_with_a_reward_are_compared() -> None:
    made = group()
    assert advantages(made, advantage="none") == [0.5, -0.5, 0.0]
    assert made.samples[3].advantage == 0.0


def test_a_group_of_equal_rewards_is_filtered_by_the_filter_only() -> None:
    equal = group((1.0, 1.0, None, 1.0))
    assert ComputeAdvantages(AlgorithmSettings(filter="zero_variance"), SAMPLING)(equal) == "zero variance"
    assert advantages(equal) == [0.0, 0.0, 0.0]


def test_the_overlong_penalty_is_in_the_advantage_and_not_in_the_reward() -> None:
    made = group()
    # The last half of 10 tokens: 10 tokens lose 0.8, 9 tokens 0.64, 2 none.
    found = advantages(made, advantage="gae", overlong_buffer=0.5, overlong_penalty=0.8)
    assert found == pytest.approx([0.2, -0.64, 0.5])
    assert [sample.reward for sample in made.samples] == list(REWARDS)


def test_the_filter_ignores_the_overlong_penalty() -> None:
    dapo = ComputeAdvantages(AlgorithmSettings(name="dapo"), SAMPLING)
    assert dapo(group((0.0, 0.0, 0.0, 0.0))) == "zero variance"


def test_a_kl_in_the_reward_is_subtracted_before_advantages_are_computed() -> None:
    # k1 is 0.5 a token: 5, 4.5 and 1 nats.
    kl = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    shaped = [1.0 - 0.5, 0.0 - 0.45, 0.5 - 0.1]
    assert advantages(group(), advantage="gae", **kl) == pytest.approx(shaped)
    mean = sum(shaped) / 3
    assert advantages(group(), advantage="none", **kl) == pytest.approx([r - mean for r in shaped])


def test_a_kl_in_the_loss_leaves_the_reward_alone() -> None:
    assert advantages(group(), advantage="gae", kl_coef=0.1) == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("reward", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("advantage", ["group", "none", "rloo", "gae"])
def test_a_group_with_a_reward_that_is_not_finite_is_refused(reward: float, advantage: str) -> None:
    compute = ComputeAdvantages(AlgorithmSettings.model_validate({"advantage": advantage}), SAMPLING)
    assert compute(group((reward, -reward, 1.0))) == "reward not finite"


def test_a_huge_reward_has_a_finite_advantage_where_it_is_divided_by_the_deviation() -> None:
    assert advantages(group((1e308, 0.0, 0.0, 0.0)), advantage="group") == pytest.approx([1.5, *[-0.5] * 3])


@pytest.mark.parametrize("advantage", ["none", "rloo", "gae"])
def test_a_group_with_an_advantage_too_large_for_its_gradient_is_refused(advantage: str) -> None:
    compute = ComputeAdvantages(AlgorithmSettings.model_validate({"advantage": advantage}), SAMPLING)
    made = group((1e308, 0.0, 0.0, 0.0))
    assert compute(made) == "reward too large"
    assert [sample.advantage for sample in made.samples] == [0.0] * 4


def test_a_kl_that_overflows_is_a_reason_and_no_crash() -> None:
    made = group((1.0, 0.0))
    made.samples[0].reference_logprobs = [2000.0] * 10
    settings = AlgorithmSettings(kl_coef=1.0, kl_in="reward", kl_estimator="k3", advantage="none")
    assert ComputeAdvantages(settings, SAMPLING)(made) == "reward too large"


@pytest.mark.parametrize(
    ("num_tokens", "taken"), [(0, 0.0), (16_384, 0.0), (18_432, 0.5), (20_480, 1.0), (20_481, 1.0)]
)
def test_the_overlong_penalty_grows_over_the_last_fifth_as_dapo_has_it(num_tokens: int, taken: float) -> None:
    assert overlong_penalty(
        num_tokens, max_completion_tokens=20_480, buffer=0.2, penalty=1.0
    ) == pytest.approx(taken)


def test_the_overlong_penalty_grows_from_30k_to_32k_as_pipelinerl_has_it() -> None:
    taken = [
        overlong_penalty(n, max_completion_tokens=32_000, buffer=1 / 16, penalty=0.4)
        for n in (30_000, 31_000)
    ]
    assert taken == pytest.approx([0.0, 0.2])


def test_one_sample_a_prompt_is_compared_with_the_samples_of_its_step() -> None:
    over_step = ComputeAdvantages(AlgorithmSettings(name="one_sample"), SAMPLING)
    groups = [group((reward,)) for reward in (1.0, 0.0, 0.0, 1.0)]
    assert [over_step(each) for each in groups] == [None] * 4
    samples = [each.samples[0] for each in groups]
    assert [sample.advantage for sample in samples] == [1.0, 0.0, 0.0, 1.0]
    over_step.of_step(samples)
    size = 0.5 / (3**-0.5 + 1e-4)
    assert [sample.advantage for sample in samples] == pytest.approx([size, -size, -size, size])


def test_penalties_are_in_the_advantages_of_a_step() -> None:
    over_step = ComputeAdvantages(
        AlgorithmSettings(name="one_sample", overlong_buffer=0.5, overlong_penalty=1.0), SAMPLING
    )
    samples = group((1.0, 1.0)).samples  # of 10 and 9 tokens
    assert over_step(samples[0].group) is None
    over_step.of_step(samples)
    assert samples[0].advantage == -samples[1].advantage < 0


def test_a_step_of_one_sample_has_an_advantage_of_zero() -> None:
    (sample,) = group((1.0,)).samples
    sample.advantage = 1.0
    ComputeAdvantages(AlgorithmSettings(name="one_sample"), SAMPLING).of_step([sample])
    assert sample.advantage == 0.0
