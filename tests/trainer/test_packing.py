from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from tailrace.trainer.packing import (
    WORTH_SHARING,
    Family,
    MicroBatch,
    by_prompt,
    fed_tokens,
    pack,
    share,
)
from tailrace.trainer.wire import TrainingSample
from tailrace.types import SampleId


def sample(index: int, prompt_length: int, length: int) -> TrainingSample:
    return TrainingSample(
        SampleId(0, 0, index),
        list(range(100, 100 + prompt_length)),
        list(range(length)),
        [-float(t) for t in range(length)],
        advantage=index + 0.5,
    )


def alone(sample: TrainingSample) -> int:
    """Fed tokens of a family of one."""
    return fed_tokens([sample])


lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), max_size=30)
"""Those of a prompt and of a completion. Prompts of one length are equal."""


def make_families(lengths: list[tuple[int, int]]) -> list[Family]:
    return by_prompt([sample(i, *pair) for i, pair in enumerate(lengths)])


@given(lengths, st.integers(1, 100))
def test_every_sample_with_a_completion_is_packed_once(lengths: list[tuple[int, int]], budget: int) -> None:
    unit = make_families(lengths)
    packed = Counter(s.id for batch in pack(unit, budget) for family in batch for s in family)
    assert packed == Counter(s.id for family in unit for s in family if s.completion_ids)


@given(lengths, st.integers(1, 100))
def test_only_a_sample_alone_exceeds_the_budget(lengths: list[tuple[int, int]], budget: int) -> None:
    for batch in pack(make_families(lengths), budget):
        assert sum(map(fed_tokens, batch)) <= budget or [len(family) for family in batch] == [1]


@given(lengths, st.integers(1, 100))
def test_no_two_micro_batches_would_fit_in_one(lengths: list[tuple[int, int]], budget: int) -> None:
    loads = [sum(map(fed_tokens, batch)) for batch in pack(make_families(lengths), budget)]
    assert all(a + b > budget for i, a in enumerate(loads) for b in loads[:i])


@given(lengths, st.integers(1, 100))
def test_packing_is_the_same_at_every_call(lengths: list[tuple[int, int]], budget: int) -> None:
    unit = make_families(lengths)
    assert pack(unit, budget) == pack(unit, budget)


@given(lengths)
def test_a_family_has_all_samples_with_its_prompt(lengths: list[tuple[int, int]]) -> None:
    unit = make_families(lengths)
    prompts = [{tuple(s.prompt_ids) for s in family} for family in unit]
    assert all(len(of_one) == 1 for of_one in prompts)
    assert len(set().union(*prompts)) == len(unit)
    assert sorted(s.id.number for family in unit for s in family) == list(range(len(lengths)))


def test_longest_goes_first_and_others_fill_its_room() -> None:
    unit = [sample(0, 1, 3), sample(1, 1, 8), sample(2, 1, 5), sample(3, 1, 2)]
    packed = pack([[s] for s in unit], 10)
    assert [[s.id.number for family in batch for s in family] for batch in packed] == [[1, 3], [2, 0]]


def test_a_family_that_exceeds_the_budget_is_cut_into_several_that_do_not() -> None:
    unit = [[sample(0, 5, 4), sample(1, 5, 3), sample(2, 5, 5), sample(3, 5, 1)]]
    packed = pack(unit, 10)
    assert [[[s.id.number for s in family] for family in batch] for batch in packed] == [[[0, 1]], [[2, 3]]]
    assert [fed_tokens(family) for batch in packed for family in batch] == [10, 9]


def test_a_micro_batch_lays_samples_end_to_end() -> None:
    batch = MicroBatch.of([[sample(0, 2, 3)], [sample(1, 1, 1)]], torch.device("cpu"))
    assert [id.number for id in batch.ids] == [0, 1]
    assert batch.input_ids.tolist() == [[100, 101, 0, 1, 100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0]]
    assert batch.boundaries.tolist() == [0, 4, 5]
    assert batch.max_length == 4
    assert batch.predictors.tolist() == [1, 2, 3, 4]
    assert batch.targets.tolist() == [0, 1, 2, 0]
    assert batch.recorded_logprobs.tolist() == [0.0, -1.0, -2.0, 0.0]
    assert batch.advantages.tolist() == [0.5, 1.5]
    assert batch.num_tokens.tolist() == [3, 1]


def test_a_family_has_its_prompt_once_and_each_completion_goes_on_from_it() -> None:
    family = [sample(0, 2, 3), sample(1, 2, 1), sample(2, 2, 2)]
    batch = MicroBatch.of([family, [sample(3, 1, 2)]], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[100, 101, 0, 1, 0, 100, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert batch.boundaries.tolist() == [0, 2, 4, 5, 7]  # that of one token is only predicted
    assert batch.predictors.tolist() == [1, 2, 3, 1, 1, 4, 5, 6]
    assert batch.targets.tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    assert batch.num_tokens.tolist() == [3, 1, 2, 2]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 200)), max_size=30), st.integers(1, 4))
def test_what_is_shared_is_in_one_part_each_and_no_part_is_dearer_by_more_than_a_sample(
    lengths: list[tuple[int, int]], num_parts: int
) -> None:
    unit = [sample(i, *pair) for i, pair in enumerate(lengths)]
    parts = share(unit, num_parts, alone)
    assert Counter(s.id for part in parts for s in part) == Counter(s.id for s in unit)
    if sum(map(alone, unit)) < WORTH_SHARING:
        assert len(parts) == 1
    else:
        costs = [sum(map(alone, part)) for part in parts]
        assert len(parts) == num_parts
        assert max(costs) - min(costs) <= max(map(alone, unit))
