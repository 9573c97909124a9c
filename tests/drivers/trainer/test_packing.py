from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.packing import MicroBatch, pack, share, take_full
from tailrace.types import SampleId


def sample(index: int, prompt_length: int, length: int) -> TrainingSample:
    return TrainingSample(
        SampleId(0, 0, index),
        list(range(100, 100 + prompt_length)),
        list(range(length)),
        [-float(t) for t in range(length)],
        advantage=index + 0.5,
        num_masked=max(0, min(index, length - 1)),
        is_carried=index > 0,
    )


def make_samples(lengths: list[tuple[int, int]]) -> list[TrainingSample]:
    return [sample(i, *pair) for i, pair in enumerate(lengths)]


def load(batch: list[TrainingSample]) -> int:
    """Input tokens: each prompt counts once."""
    complete = [sample for sample in batch if sample.completion_ids]
    prompts = {tuple(sample.prompt_ids) for sample in complete}
    own = sum(sample.num_input_tokens - len(sample.prompt_ids) for sample in complete)
    return sum(map(len, prompts)) + own


lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), max_size=30)
"""Lengths of prompt and completion."""
limits = st.integers(1, 100)


@given(lengths, limits)
def test_every_sample_with_a_completion_is_packed_once(lengths: list[tuple[int, int]], limit: int) -> None:
    samples = make_samples(lengths)
    packed = Counter(s.id for batch in pack(samples, limit) for s in batch)
    assert packed == Counter(s.id for s in samples if s.completion_ids)


def test_a_sample_without_a_token_in_the_loss_is_not_computed() -> None:
    masked, other = replace(sample(0, 3, 2), num_masked=2), sample(1, 3, 2)
    assert pack([masked, other], 100) == [[other]]
    assert take_full([masked], 1, 100) == ([], [masked]), "it waits for the step, which counts it"


@given(lengths, limits)
def test_only_a_single_sample_exceeds_the_limit(lengths: list[tuple[int, int]], limit: int) -> None:
    assert all(load(batch) <= limit or len(batch) == 1 for batch in pack(make_samples(lengths), limit))


@given(lengths, limits, st.integers(1, 5))
def test_ranks_compute_equally_often_and_every_sample_once(
    lengths: list[tuple[int, int]], limit: int, num_ranks: int
) -> None:
    samples = make_samples(lengths)
    shares = [share(samples, limit, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    num_rounds = -(-len(pack(samples, limit)) // num_ranks)
    assert [len(own) for own in shares] == [num_rounds] * num_ranks
    packed = Counter(s.id for own in shares for batch in own for s in batch)
    assert packed == Counter(s.id for s in samples if s.completion_ids)
    assert all(load(batch) <= limit or len(batch) == 1 for own in shares for batch in own)


@given(lengths, limits)
def test_one_rank_has_the_micro_batches_of_pack(lengths: list[tuple[int, int]], limit: int) -> None:
    samples = make_samples(lengths)
    assert share(samples, limit, rank=0, num_ranks=1) == pack(samples, limit)


def test_ranks_have_even_shares_where_the_limit_allows_it() -> None:
    samples = make_samples([(1, 10), (2, 6), (3, 4), (4, 2)])
    assert [[load(batch) for batch in share(samples, 100, rank=r, num_ranks=2)] for r in (0, 1)] == [
        [15],
        [13],
    ]
    assert share(samples[:1], 100, rank=1, num_ranks=2) == [[]], "a filler"


@given(lengths, limits)
def test_no_two_micro_batches_fit_into_one(lengths: list[tuple[int, int]], limit: int) -> None:
    """Without one that both share, and unless they have too many keys."""
    batches = pack(make_samples(lengths), limit)
    for i, one in enumerate(batches):
        for other in batches[:i]:
            num_keys = sum(sample.num_input_tokens for sample in (*one, *other))
            assert load(one) + load(other) > limit or num_keys > 2 * limit


@given(lengths, limits)
def test_packing_is_the_same_at_every_call(lengths: list[tuple[int, int]], limit: int) -> None:
    samples = make_samples(lengths)
    assert pack(samples, limit) == pack(samples, limit)


def test_the_longest_sample_is_packed_first_and_others_fill_its_micro_batch() -> None:
    samples = [sample(0, 1, 4), sample(1, 2, 8), sample(2, 3, 4), sample(3, 4, 1)]
    assert [[s.id.number for s in batch] for batch in pack(samples, 13)] == [[1, 0], [2, 3]]


def test_the_samples_of_a_prompt_are_packed_together_and_it_counts_once() -> None:
    lengths = [(5, 4), (2, 20), (5, 3), (5, 1), (5, 9)]  # input tokens: 8, 21, 7, 5, 13
    samples = make_samples(lengths)
    assert [[s.id.number for s in batch] for batch in pack(samples, 22)] == [[1], [4, 0, 2, 3]]
    assert [load(batch) for batch in pack(samples, 22)] == [21, 18]


def test_a_shared_prompt_is_copied_for_a_bounded_number_of_sequences() -> None:
    samples = make_samples([(20, 2)] * 9)  # 21 tokens, then 1 more for each
    assert [len(batch) for batch in pack(samples, 40)] == [3, 3, 3]
    assert [len(batch) for batch in pack(samples, 95)] == [9]


def test_even_shares_of_a_prompt_have_a_bounded_number_of_sequences_too() -> None:
    samples = make_samples([(20, 2)] * 8)
    shares = [share(samples, 40, rank=rank, num_ranks=2) for rank in (0, 1)]
    assert [[len(batch) for batch in own] for own in shares] == [[2, 2], [2, 2]]
    assert [len(batch) for batch in share(samples, 95, rank=0, num_ranks=2)] == [4]


def test_a_group_that_exceeds_the_limit_is_computed_with_its_prompt_in_each_micro_batch() -> None:
    samples = make_samples([(5, 4)] * 4)
    assert [[s.id.number for s in batch] for batch in pack(samples, 11)] == [[0, 1], [2, 3]]
    halves = [share(samples, 99, rank=rank, num_ranks=2) for rank in (0, 1)]
    assert sorted(s.id.number for half in halves for batch in half for s in batch) == [0, 1, 2, 3]


def test_a_micro_batch_lays_samples_end_to_end() -> None:
    batch = MicroBatch.of([sample(0, 2, 3), sample(1, 1, 1), sample(2, 3, 2)], torch.device("cpu"))
    assert [id.number for id in batch.ids] == [0, 1, 2]
    assert batch.input_ids.tolist() == [[100, 101, 0, 1, 100, 100, 101, 102, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 3]]
    assert batch.boundaries.tolist() == batch.key_boundaries.tolist() == [0, 4, 5, 9]
    assert batch.lengths == batch.key_lengths == [4, 1, 4]
    assert batch.keys.tolist() == list(range(9))
    assert batch.predictors.tolist() == [1, 2, 3, 4, 7, 8]
    assert batch.targets.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.behavior_logprobs.tolist() == [0.0, -1.0, -2.0, 0.0, 0.0, -1.0]
    assert batch.masked.tolist() == [False, False, False, False, True, False]
    assert batch.carried.tolist() == [False, True, True]
    assert batch.advantages.tolist() == [0.5, 1.5, 2.5]
    assert batch.num_tokens.tolist() == [3, 1, 2]


def test_sequences_with_the_same_context_share_its_input_tokens() -> None:
    samples = [sample(0, 3, 4), sample(1, 1, 2), sample(2, 3, 1), sample(3, 3, 3)]
    batch = MicroBatch.of(samples, torch.device("cpu"))
    assert batch.input_ids.tolist() == [[100, 101, 102, 0, 1, 2, 100, 0, 0, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 3, 4]]
    assert batch.boundaries.tolist() == [0, 6, 8, 10], "a completion of one token has no input token"
    assert batch.lengths == [6, 2, 2]
    assert batch.keys.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 8, 9]
    assert batch.key_boundaries.tolist() == [0, 6, 8, 13]
    assert batch.key_lengths == [6, 2, 5]
    assert batch.predictors.tolist() == [2, 3, 4, 5, 6, 7, 2, 2, 8, 9]
    assert batch.targets.tolist() == [0, 1, 2, 3, 0, 1, 0, 0, 1, 2]
    assert batch.num_tokens.tolist() == [4, 2, 1, 3]


def test_an_observation_before_the_first_turn_follows_the_shared_context() -> None:
    first, second = (
        TrainingSample(
            SampleId(0, 0, i), [100, 101], [0, 1], [-0.5, -1.5], advantage=1.0, observations=[(0, [50 + i])]
        )
        for i in range(2)
    )
    batch = MicroBatch.of([first, second], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[100, 101, 50, 0, 51, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 3]]
    assert batch.predictors.tolist() == [2, 3, 4, 5]
    assert batch.keys.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]


def masked_episode(**more: Any) -> TrainingSample:
    ids, logprobs = [0, 1, 2, 3], [-0.5, -1.5, -2.5, -3.5]
    return TrainingSample(SampleId(0, 0, 0), [100, 101], ids, logprobs, advantage=1.0, num_masked=3, **more)


def test_observations_are_inputs_and_no_targets() -> None:
    episode = masked_episode(observations=[(1, [50, 51]), (3, [52])])
    batch = MicroBatch.of([episode, sample(1, 1, 2)], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[100, 101, 0, 50, 51, 1, 2, 52, 100, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]]
    assert batch.boundaries.tolist() == [0, 8, 10] and batch.lengths == [8, 2]
    assert batch.predictors.tolist() == [1, 4, 5, 7, 8, 9]
    assert batch.targets.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.behavior_logprobs.tolist() == [-0.5, -1.5, -2.5, -3.5, 0.0, -1.0]
    assert batch.masked.tolist() == [True, True, True, False, True, False]
    assert batch.num_tokens.tolist() == [4, 2]


def test_the_branches_of_a_sample_are_sequences_and_its_tokens_are_those_of_one_sample() -> None:
    episode = masked_episode(observations=[(1, [50]), (3, [52])], branches=[(2, [100, 60, 61])])
    batch = MicroBatch.of([episode, sample(1, 1, 2)], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[100, 101, 0, 50, 100, 60, 61, 2, 52, 100, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]]
    assert batch.boundaries.tolist() == [0, 4, 9, 11] and batch.lengths == [4, 5, 2]
    assert batch.predictors.tolist() == [1, 3, 6, 8, 9, 10]
    assert batch.targets.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.masked.tolist() == [True, True, True, False, True, False]
    assert (batch.num_tokens.tolist(), batch.advantages.tolist()) == ([4, 2], [1.0, 1.5])
    assert [[s.id.number for s in bin] for bin in pack([episode], 5)] == [[0]], "means need the whole sample"


def test_the_limit_of_a_micro_batch_counts_observations() -> None:
    plain = sample(0, 1, 3)
    episode = replace(plain, id=SampleId(0, 0, 1), observations=[(1, [50] * 5)])
    assert (plain.num_input_tokens, episode.num_input_tokens) == (3, 8)
    assert [[s.id.number for s in bin] for bin in pack([plain, episode], 9)] == [[1], [0]]
    assert [[s.id.number for s in bin] for bin in pack([plain, episode], 10)] == [[1, 0]]


@given(st.lists(lengths, max_size=6), st.integers(1, 200), st.integers(1, 100))
def test_groups_wait_until_their_micro_batches_are_full(
    groups: list[list[tuple[int, int]]], min_tokens: int, max_tokens: int
) -> None:
    waiting: list[TrainingSample] = []
    computed = Counter[SampleId]()
    for group in groups:
        given = [*waiting, *make_samples(group)]
        now, waiting = take_full(given, min_tokens, max_tokens)
        computed.update(s.id for s in now if s.completion_ids)
        assert load(waiting) < min_tokens
        if sum(load(batch) for batch in pack(given, max_tokens)) < min_tokens:
            assert waiting == given
    computed.update(s.id for s in waiting if s.completion_ids)
    assert computed == Counter(s.id for group in groups for s in make_samples(group) if s.completion_ids)


def test_what_does_not_fill_a_micro_batch_waits_for_the_next_group() -> None:
    samples = make_samples([(prompt, 7 - prompt) for prompt in range(1, 7)])  # six tokens each
    now, rest = take_full(samples, 18, 18)
    assert (load(now), load(rest)) == (36, 0)
    now, rest = take_full(samples, 24, 24)
    assert (load(now), load(rest)) == (24, 12)
    now, rest = take_full(samples, 12, 24)
    assert (load(now), load(rest)) == (36, 0)
