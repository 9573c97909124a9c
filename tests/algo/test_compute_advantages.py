"""From the rewards of a group to the advantages of its samples."""

import pytest

from tailrace.algo.base import AlgorithmSettings
from tailrace.algo.compute_advantages import ComputeAdvantages
from tailrace.types import Group, Prompt, Sample, SampleId

REWARDS = (1.0, 0.0, 0.5, None)
LENGTHS = (10, 9, 2, 4)


def group(rewards: tuple[float | None, ...] = REWARDS) -> Group:
    """Finished samples of unequal lengths; one without a reward has failed."""
    made = Group(Prompt(0, [1]), need=len(rewards), samples=[])
    for number, (reward, length) in enumerate(zip(rewards, LENGTHS, strict=False)):
        sample = Sample(SampleId(0, 0, number), made, reward=reward)
        sample.failure = "reward raised" if reward is None else None
        sample.extend([1] * length, [-1.0] * length, version=0)
        sample.reference_logprobs = [-1.5] * length
        made.samples.append(sample)
    made.kept = list(made.samples)
    return made


def advantages(made: Group, **settings: object) -> list[float]:
    assert ComputeAdvantages(AlgorithmSettings.model_validate(settings), max_tokens=10)(made) is None
    return [sample.advantage for sample in made.trainable]


def test_only_samples_with_a_reward_are_compared() -> None:
    made = group()
    assert advantages(made, advantage="none") == [0.5, -0.5, 0.0]
    assert made.samples[3].advantage == 0.0


def test_a_group_of_equal_rewards_is_filtered_if_it_is_to_be() -> None:
    equal = group((1.0, 1.0, None, 1.0))
    assert ComputeAdvantages(AlgorithmSettings(filter="zero_variance"), 10)(equal) == "zero variance"
    assert advantages(equal) == [0.0, 0.0, 0.0]


def test_length_is_punished_in_the_advantage_and_the_task_s_reward_stays() -> None:
    made = group()
    # The last half of 10 tokens: 10 tokens lose 0.8, 9 tokens 0.64, 2 none.
    found = advantages(made, advantage="gae", overlong_buffer=0.5, overlong_penalty=0.8)
    assert found == pytest.approx([0.2, -0.64, 0.5])
    assert [sample.reward for sample in made.samples] == list(REWARDS)


def test_lengths_do_not_save_a_group_from_the_filter() -> None:
    dapo = ComputeAdvantages(AlgorithmSettings(name="dapo"), max_tokens=10)
    assert dapo(group((0.0, 0.0, 0.0, 0.0))) == "zero variance"


def test_the_kl_is_taken_from_the_reward_before_advantages_are_made() -> None:
    # k1 is 0.5 a token: 5, 4.5 and 1 nats.
    kl = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    shaped = [1.0 - 0.5, 0.0 - 0.45, 0.5 - 0.1]
    assert advantages(group(), advantage="gae", **kl) == pytest.approx(shaped)
    mean = sum(shaped) / 3
    assert advantages(group(), advantage="none", **kl) == pytest.approx([r - mean for r in shaped])


def test_a_kl_in_the_loss_leaves_the_reward_alone() -> None:
    assert advantages(group(), advantage="gae", kl_coef=0.1) == [1.0, 0.0, 0.5]
