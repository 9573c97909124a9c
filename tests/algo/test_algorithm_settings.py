"""The [algorithm] section: presets, and settings that contradict each other."""

import math
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tailrace.algo.base import PRESETS, AlgorithmSettings, Preset, check_algorithm
from tailrace.contracts.sampling import SamplingSettings
from tailrace.errors import ConfigError


def algorithm(**settings: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(settings)


def said(group_size: int = 4, sampling: SamplingSettings | None = None, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_algorithm(algorithm(**settings), group_size=group_size, sampling=sampling)
    return str(caught.value)


@pytest.mark.parametrize("name", get_args(Preset))
def test_a_preset_sets_its_fields_and_passes_the_check(name: str) -> None:
    preset = algorithm(name=name)
    assert {key: getattr(preset, key) for key in PRESETS[name]} == PRESETS[name]  # type: ignore[index]
    sampling = SamplingSettings(max_completion_tokens=10)
    check_algorithm(preset, group_size=1 if name in ("ppo", "one_sample") else 2, sampling=sampling)


def test_presets_are_all_different() -> None:
    made = [algorithm(name=name).model_dump(exclude={"name"}) for name in get_args(Preset)]
    assert all(made.count(settings) == 1 for settings in made)


def test_a_field_of_the_section_wins_over_the_preset() -> None:
    dapo = algorithm(name="dapo", clip_high=0.3, filter="none")
    assert (dapo.clip_high, dapo.filter, dapo.normalize) == (0.3, "none", "token_mean")
    again = algorithm(**dapo.model_dump())
    assert again == dapo


@pytest.mark.parametrize("name", ["grop", 3, ["grpo"]])
def test_an_unknown_preset_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="name"):
        algorithm(name=name)


@pytest.mark.parametrize("advantage", ["group", "none", "rloo"])
def test_a_group_of_one_needs_a_critic_or_the_samples_of_its_step(advantage: str) -> None:
    assert said(1, advantage=advantage) == (
        f"algorithm.advantage = '{advantage}': a group of one sample always has an advantage of zero; "
        "raise run.group_size, compare the samples of a step: 'batch', or use a critic: 'gae'"
    )


def test_filtering_equal_rewards_needs_more_than_one_sample_a_group() -> None:
    assert "every group would be filtered" in said(1, name="ppo", filter="zero_variance")


def test_a_correction_of_recorded_log_probs_by_themselves_is_refused() -> None:
    message = said(correction="truncate", old_policy="recorded")
    assert message.startswith("algorithm.correction = 'truncate': the ratio of grpo already has the")
    check_algorithm(algorithm(correction="truncate", old_policy="recomputed"), group_size=2, sampling=None)


def test_a_correction_of_the_kl_belongs_in_the_loss() -> None:
    assert "a KL in the reward is not differentiated" in said(kl_in="reward", kl_bias_correction=True)


def test_reinforce_has_no_old_policy() -> None:
    assert "reinforce has no ratio to an old policy" in said(name="rloo", old_policy="recomputed")


@pytest.mark.parametrize("normalize", ["token_mean", "sample_sum", "fixed_length"])
def test_gspo_counts_a_sequence_once(normalize: str) -> None:
    assert "choose 'sample_mean'" in said(name="gspo", normalize=normalize)


def test_an_overlong_penalty_needs_a_buffer() -> None:
    assert said(overlong_penalty=1.0).startswith("algorithm.overlong_buffer = 0.0")


@pytest.mark.parametrize("truncated", [{"top_p": 0.9}, {"top_k": 40}])
def test_importance_weights_of_a_truncated_sampling_distribution_are_refused(truncated: Any) -> None:
    sampling = SamplingSettings(max_completion_tokens=10, **truncated)
    assert "sampled from a truncated distribution" in said(sampling=sampling, name="reinforce")
    check_algorithm(algorithm(name="grpo"), group_size=2, sampling=sampling)


@pytest.mark.parametrize(
    "field", ["clip_low", "clip_high", "gamma", "overlong_penalty", "correction_cap", "kl_coef"]
)
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_a_number_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=field):
        algorithm(**{field: value})
