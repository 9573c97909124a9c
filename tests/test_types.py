"""What flows keeps its own books: spans, completeness, what of a group trains."""

import pytest

from helpers.episodes import answer, two_turns
from tailrace.contracts.sampling import SamplingSettings
from tailrace.types import (
    Group,
    Prompt,
    Sample,
    SampleId,
    SamplingParams,
    Span,
    Turn,
    batched,
    noise_seed,
    samples_of,
)


def group_of(num_samples: int, need: int | None = None) -> Group:
    group = Group(Prompt(7, [1, 2, 3]), need or num_samples, [], num_launched=num_samples)
    group.samples = [Sample(SampleId(7, 0, number), group) for number in range(num_samples)]
    return group


def finish(sample: Sample, reward: float | None = None, failure: str | None = None) -> None:
    sample.finish_reason, sample.reward, sample.failure = "stop", reward, failure
    sample.group.kept.append(sample)


def test_tokens_of_one_version_are_one_span() -> None:
    sample = group_of(1).samples[0]
    for num_tokens, version in [(3, 0), (0, 0), (2, 0), (0, 1), (4, 2), (1, 2)]:
        sample.grow(num_tokens, version)
    assert sample.spans == [Span(0, 5), Span(2, 5)]
    assert sample.num_tokens == 10 and sample.oldest_version == 0


def test_extending_keeps_ids_log_probs_and_spans_together() -> None:
    sample = group_of(1).samples[0]
    sample.extend([5, 6], [-0.5, -0.25], version=3)
    sample.extend([7], [-1.0], version=4)
    assert sample.completion_ids == [5, 6, 7]
    assert sample.behavior_logprobs == [-0.5, -0.25, -1.0]
    assert sample.spans == [Span(3, 2), Span(4, 1)]
    with pytest.raises(AssertionError):
        sample.extend([8, 9], [-1.0], version=4)


def test_a_group_is_as_old_as_its_oldest_token_wherever_it_was_made() -> None:
    group = group_of(2)
    assert group.oldest_version is None
    group.samples[0].grow(4, version=5)
    group.samples[1].grow(1, version=3)  # by an engine that got its weights later
    assert group.oldest_version == 3 and group.num_tokens == 5


def test_serving_complete_and_trainable_complete_are_two_moments() -> None:
    group = group_of(2)
    for sample in group.samples:
        finish(sample)
    assert group.serving_complete and not group.complete
    group.samples[0].reward = 1.0
    assert not group.complete
    group.samples[1].failure = "reward timeout"
    assert group.complete


def test_only_rewarded_samples_of_the_kept_train() -> None:
    group = group_of(3, need=2)
    finish(group.samples[2], reward=0.0)
    finish(group.samples[0], failure="reward raised")
    assert group.trainable == [group.samples[2]]
    assert samples_of([group, group.samples[1]]) == [group.samples[2], group.samples[1]]


def test_batches_are_consecutive_and_the_last_may_be_short() -> None:
    groups = [group_of(1) for _ in range(5)]
    assert batched(groups, 2) == [groups[:2], groups[2:4], groups[4:]]


def test_noise_depends_on_the_run_s_seed_and_the_sample_and_not_on_the_attempt() -> None:
    assert noise_seed(0, SampleId(1, 0, 2)) == 6514283261079565390
    seeds = {noise_seed(s, SampleId(p, a, n)) for s in (0, 1) for p in (0, 1) for a in (0, 1) for n in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= noise_seed(seed, SampleId(0, 0, 0)) < 2**63 for seed in range(100))


def test_the_tokens_of_an_environment_are_context_and_no_completion() -> None:
    sample = group_of(1).samples[0]
    two_turns(sample, [10, 11], [50, 51, 52], [12])
    assert sample.completion_ids == [10, 11, 12] and sample.num_tokens == 3
    assert sample.response_ids == [10, 11, 50, 51, 52, 12]
    assert (sample.num_observation_tokens, sample.num_context_tokens) == (3, 9)
    assert sample.spans == [Span(0, 2), Span(1, 1)]


def test_a_turn_continues_everything_before_it_with_noise_of_its_own() -> None:
    sample = group_of(1).samples[0]
    sample.seed = 5
    seen = []
    for ids in ([10, 11], [12], [13]):
        sample.extend(ids, [-0.5] * len(ids), 0)
        seen.append((sample.turn_context_ids, sample.turn_ids, sample.turn_start))
        sample.finish_reason = "stop"
        answer(sample, [50])
    assert seen == [
        ([1, 2, 3], [10, 11], 0),
        ([1, 2, 3, 10, 11, 50], [12], 2),
        ([1, 2, 3, 10, 11, 50, 12, 50], [13], 3),
    ]


def test_the_first_turn_has_the_seed_of_the_sample_and_each_later_one_its_own() -> None:
    first, second = group_of(2).samples
    first.seed, second.seed = 5, 6
    seeds = [first.turn_seed, second.turn_seed]
    assert seeds == [5, 6]
    for _ in range(2):
        for sample in (first, second):
            sample.extend([3], [-0.5], 0)
            sample.finish_reason = "stop"
            answer(sample, [50])
            seeds.append(sample.turn_seed)
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_verified_turn_keeps_what_follows_it_unless_it_changes() -> None:
    """Two turns of two tokens of the versions 0 and 1, and a third of version 2 that is generated."""
    sample = group_of(1).samples[0]
    sample.seed, sample.max_age, sample.in_episode = 5, 0, True
    seeds = []
    for version, ids in enumerate(([10, 11], [12, 13], [14])):
        seeds.append(sample.turn_seed)
        sample.extend(ids, [-0.5] * len(ids), version)
        if version < 2:
            sample.finish_reason = "stop"
            answer(sample, [50 + version])
    turns = sample.turns
    sample.verified_turn, sample.to_verify = 0, True
    assert (sample.turn_context_ids, sample.turn_ids, sample.turn_seed) == ([1, 2, 3], [10, 11], seeds[0])
    assert (sample.num_context_tokens, sample.turn_version) == (5, 0)
    sample.verify(2, 2, [-0.25, -0.25])
    assert sample.spans == [Span(2, 2), Span(1, 2), Span(2, 1)] and sample.to_verify  # the second turn is old
    assert sample.behavior_logprobs == [-0.25, -0.25, -0.5, -0.5, -0.5]
    sample.verified_turn = 1
    context = [1, 2, 3, 10, 11, 50]
    assert (sample.turn_context_ids, sample.turn_ids, sample.turn_seed) == (context, [12, 13], seeds[1])
    assert (sample.num_context_tokens, sample.turn_version) == (8, 1)
    sample.end_turn("length")
    assert sample.finish_reason is None  # of the third turn
    sample.verify(1, 3, [-0.125])
    assert sample.completion_ids == [10, 11, 12] and sample.num_changed == 2
    assert sample.behavior_logprobs == [-0.25, -0.25, -0.125]
    assert sample.spans == [Span(2, 2), Span(3, 1)] and sample.to_verify  # the first turn is too old for 3
    assert sample.turns is turns and [turn.num_tokens for turn in turns] == [2]
    assert (sample.verified_turn, sample.turn_ids, sample.turn_seed) == (None, [12], seeds[1])


def test_an_episode_that_has_ended_goes_on_when_a_turn_changes() -> None:
    sample = group_of(1).samples[0]
    two_turns(sample, [10, 11], [50], [12])
    sample.reward, sample.text, sample.verified_turn, sample.max_age = 1.0, "abc", 0, 0
    sample.verify(2, 5, [-0.5, -0.5])
    assert (sample.reward, sample.finish_reason, sample.in_episode) == (1.0, "stop", False)
    sample.verified_turn = 1
    sample.verify(0, 5)
    assert (sample.reward, sample.finish_reason, sample.in_episode, sample.text) == (None, None, True, "")
    assert (sample.turn_context_ids, sample.num_tokens, sample.to_verify) == ([1, 2, 3, 10, 11, 50], 2, False)


def test_an_episode_has_ended_when_its_environment_says_so() -> None:
    sample = group_of(1).samples[0]
    sample.in_episode, sample.finish_reason = True, "stop"
    assert not sample.ended
    sample.in_episode = False
    assert sample.ended


def test_an_episode_as_chat_messages() -> None:
    sample = group_of(1).samples[0]
    assert sample.messages == []
    tool: dict[str, object] = {"role": "tool", "content": "7"}
    sample.turns = [Turn(2, "stop", text="3 + 4", messages=[tool]), Turn(4, "stop", text="It is 7.")]
    assert sample.messages == [
        {"role": "assistant", "content": "3 + 4"},
        tool,
        {"role": "assistant", "content": "It is 7."},
    ]


def test_the_room_of_a_turn_ends_at_its_own_limit_or_at_that_of_the_completion() -> None:
    sample = Sample(SampleId(0, 0, 0), Group(Prompt(0, [1, 2]), 1, []))
    sample.grow(3, version=0)
    ten, three = (SamplingSettings(max_completion_tokens=limit) for limit in (10, 3))
    assert ten.room(sample) == 7 and three.room(sample) == 0
    sample.turn_limit = 5
    assert ten.room(sample) == 2
    sample.sampling = SamplingParams(max_completion_tokens=4)
    assert ten.room(sample) == 1
