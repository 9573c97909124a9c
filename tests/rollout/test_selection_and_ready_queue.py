"""Admission, selection, the ready queue and the partial-rollout buffer: pure functions and small
containers."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import NeverComes
from tailrace.rollout.admission import (
    AtMost,
    Frontier,
    FrontierFirst,
    ReadyQueue,
    earliest,
    feasible,
    fits,
    trained_tokens,
)
from tailrace.rollout.pool import PartialRolloutBuffer
from tailrace.types import Group, Prompt, Sample, SampleId, Turn

pytestmark = pytest.mark.virtual


def group_of(index: int, lengths: list[int], num_prompt_tokens: int = 0) -> Group:
    group = Group(Prompt(index, range(num_prompt_tokens)), len(lengths), [], num_launched=len(lengths))
    for number, length in enumerate(lengths):
        sample = Sample(
            SampleId(index, 0, number), group, num_tokens=length, reward=1.0, finish_reason="stop"
        )
        group.samples.append(sample)
        group.kept.append(sample)
    return group


def test_a_trainer_computes_prompts_too_but_not_samples_without_a_reward() -> None:
    group = group_of(0, [10, 20, 30], num_prompt_tokens=5)
    group.samples[1].reward = None
    assert trained_tokens(group) == 10 + 30 + 2 * 5


def test_a_trainer_computes_the_environments_tokens_too() -> None:
    group = group_of(0, [10, 20], num_prompt_tokens=5)
    group.samples[0].turns = [Turn(4, "stop", observation_ids=[1] * 7), Turn(10, "stop")]
    assert trained_tokens(group) == 10 + 7 + 20 + 2 * 5


SIZES = st.lists(st.integers(1, 60), max_size=30)


def fullest(groups: list[Group], replicas: int) -> int:
    """Tokens of the replica with the most, if each group in turn goes to the one with the fewest."""
    shares = [0] * replicas
    for group in groups:
        shares = [min(shares) + trained_tokens(group), *sorted(shares)[1:]]
    return max(shares)


@given(SIZES, st.integers(1, 100), st.integers(1, 3))
def test_feasible_batches_are_the_largest_prefixes_of_whole_groups_and_lose_nothing(
    sizes: list[int], tokens: int, replicas: int
) -> None:
    groups = [group_of(index, [size]) for index, size in enumerate(sizes)]
    batches = list(feasible(groups, tokens, replicas))
    assert [group for batch in batches for group in batch] == groups
    for batch, following in zip(batches, [*batches[1:], []], strict=False):
        assert fullest(batch, replicas) <= tokens or trained_tokens(batch[0]) > tokens
        if following:  # no larger prefix would have fitted
            assert fullest([*batch, following[0]], replicas) > tokens


def test_the_budget_of_a_feasible_batch_is_that_of_a_replica_not_of_all_together() -> None:
    groups = [group_of(index, [size]) for index, size in enumerate((50, 50, 40, 40))]
    sizes = [[len(batch) for batch in feasible(groups, 60, replicas)] for replicas in (1, 2, 4)]
    assert sizes == [[1, 1, 1, 1], [2, 2], [4]]


@given(SIZES, st.integers(1, 100), st.integers(1, 10), st.integers(1, 3))
def test_the_selection_is_the_first_feasible_batch_of_what_is_wanted(
    sizes: list[int], tokens: int, wanted: int, replicas: int
) -> None:
    groups = [group_of(index, [size]) for index, size in enumerate(sizes)]
    assert fits(tokens, replicas)(groups, wanted) == next(feasible(groups[:wanted], tokens, replicas), [])
    assert earliest(groups, wanted) == groups[:wanted]


class Service:
    """Who is served, for an admission to ask."""

    def __init__(self, requests: int, groups: list[Group], num_engines: int = 1) -> None:
        self.num_requests, self.groups, self.num_engines = requests, groups, num_engines

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def serves(self, group: Group) -> bool:
        return group in self.groups


def test_admissions_answer_one_pure_question() -> None:
    inside, outside = group_of(0, [1] * 4), group_of(1, [1] * 4)
    assert AtMost().admits(outside, Service(10**6, []))
    assert AtMost(requests_per_engine=3).admits(outside, Service(2, []))
    assert not AtMost(requests_per_engine=3).admits(outside, Service(3, []))
    assert AtMost(requests_per_engine=3).admits(outside, Service(5, [], num_engines=2))
    assert not AtMost(requests_per_engine=3).admits(outside, Service(6, [], num_engines=2))
    assert Frontier(groups=1).admits(inside, Service(3, [inside]))
    assert not Frontier(groups=1).admits(outside, Service(1, [inside]))
    assert Frontier(groups=2).admits(outside, Service(7, [inside]))
    assert FrontierFirst(groups=2).admits(outside, Service(7, [inside]))
    assert not FrontierFirst(groups=2).admits(outside, Service(8, [inside]))
    outside.num_replaced = 3  # its rules launched members in place of others
    assert not FrontierFirst(groups=2).admits(outside, Service(8, [inside]))


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 8))
def test_frontier_first_admits_what_fifo_with_a_cap_of_as_many_requests_admits(
    requests: int, width: int, group_size: int
) -> None:
    group = group_of(0, [1] * group_size)
    capped = AtMost(requests_per_engine=width * group_size)
    assert FrontierFirst(groups=width).admits(group, Service(requests, [])) == capped.admits(
        group, Service(requests, [])
    )


@pytest.mark.parametrize("admission", [AtMost, Frontier, FrontierFirst])
def test_no_admission_of_nothing(admission: type) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        admission(**({"requests_per_engine": 0} if admission is AtMost else {"groups": 0}))


async def test_a_full_ready_queue_drops_its_oldest_group_or_says_that_it_is_full() -> None:
    dropped: list[tuple[int, str]] = []
    ring = ReadyQueue("a ring", drop=lambda g, why: dropped.append((g.prompt.index, why)), coming=lambda: 0)
    ring.room, ring.full = 2, "block"
    groups = [group_of(index, [1]) for index in range(4)]
    ring.put(groups[0])
    assert not ring.is_full
    ring.put(groups[1])
    assert ring.is_full
    ring.full = "drop_oldest"
    assert not ring.is_full
    ring.put(groups[2])
    assert (ring.groups, dropped) == ([groups[1], groups[2]], [(0, "a ring overflow")])
    assert await ring.take(1) == [groups[1]]
    assert ring.clear() == [groups[2]] and len(ring) == 0


async def test_a_ready_group_may_get_an_older_version_by_a_sample_that_left_it() -> None:
    queue = ReadyQueue("the queue", drop=lambda group, reason: None, coming=lambda: 0)
    group = group_of(0, [10])
    group.oldest_version = 2
    raced = Sample(SampleId(0, 0, 1), group)
    queue.put(group)
    raced.grow(3, version=1)  # its abort brings the last tokens
    assert queue.by_version == {2: {group: 0}}
    assert await queue.take(1) == [group]
    assert queue.by_version == {}


async def test_waiting_for_groups_leaves_them_in_the_queue_and_ends_if_they_cannot_come() -> None:
    queue = ReadyQueue("the queue", drop=lambda group, reason: None, coming=lambda: 1)
    waiting = asyncio.create_task(queue.wait_for(2))
    queue.put(first := group_of(0, [10]))
    await asyncio.sleep(1)
    assert not waiting.done()
    queue.put(second := group_of(1, [10]))
    await waiting
    assert queue.groups == [first, second]
    with pytest.raises(NeverComes, match="4 groups are wanted, 2 are ready and 1 in flight"):
        await queue.wait_for(4)


def test_the_partial_rollout_buffer_is_first_in_first_out() -> None:
    groups = [group_of(index, [1]) for index in range(3)]
    partial_rollouts = PartialRolloutBuffer(groups[:1])
    partial_rollouts.put(groups[1:])
    assert partial_rollouts.pop(2) == groups[:2]
    assert partial_rollouts.pop(2) == groups[2:] and len(partial_rollouts) == 0
