"""The branches of an episode whose history was rewritten."""

from helpers.episodes import answer, two_turns
from tailrace.turns import Branch, Turn, branches_of
from tailrace.types import Group, Prompt, Sample, SampleId


def rewritten() -> Sample:
    """Turns [10, 11] and [12] in one context, then [13, 14] and [15] in another one."""
    sample = Sample(SampleId(0, 0, 0), Group(Prompt(0, [1, 2]), 1, []), seed=5)
    two_turns(sample, [10, 11], [50], [12])
    sample.turns.pop()
    answer(sample, [1, 60, 61], begins_branch=True)
    two_turns(sample, [13, 14], [51, 52], [15])
    return sample


def test_an_episode_without_a_rewriting_is_one_branch() -> None:
    turns = [Turn(0, "stop", observation_ids=[3]), Turn(2, "stop", observation_ids=[50]), Turn(3, "stop")]
    assert branches_of([1, 2], turns, 3) == [Branch([1, 2], 0, 3, [(0, [3]), (2, [50])])]
    assert branches_of([1, 2], [], 3) == [Branch([1, 2], 0, 3, [])]


def test_a_rewritten_history_begins_a_branch_with_its_own_context() -> None:
    sample = rewritten()
    first, second = sample.branches
    assert (first, second) == (
        Branch([1, 2], 0, 3, [(2, [50])]),
        Branch([1, 60, 61], 3, 6, [(5, [51, 52])]),
    )
    assert first.response_ids(sample.completion_ids) == [10, 11, 50, 12]
    assert second.response_ids(sample.completion_ids) == [13, 14, 51, 52, 15]
    assert (first.num_tokens, second.num_tokens) == (6, 8)


def test_engines_and_reward_functions_see_the_last_branch_and_trainers_see_all() -> None:
    sample = rewritten()
    assert sample.context_ids == [1, 60, 61, 13, 14, 51, 52, 15]
    assert sample.turn_context_ids == [1, 60, 61, 13, 14, 51, 52] and sample.turn_ids == [15]
    assert sample.response_ids == sample.scored_ids == [13, 14, 51, 52, 15]
    assert (sample.num_context_tokens, sample.num_sequence_tokens) == (8, 14)


def test_the_first_turn_of_a_branch_has_noise_of_its_own() -> None:
    sample = rewritten()
    seeds = [sample.turn_seed]
    while sample.turns.pop().num_tokens > 2:
        seeds.append(sample.turn_seed)
    assert len(set(seeds)) == 3 and len(seeds) == 4, "the last turn has no observation after it"


def test_messages_are_those_of_the_last_branch() -> None:
    sample = rewritten()
    for turn, text in zip(sample.turns, "abcd", strict=True):
        turn.text, turn.messages = text, [{"role": "user", "content": text.upper()}]
    assert [message["content"] for message in sample.messages] == ["c", "C", "d", "D"]
