"""Groups whose first tokens may be older than the published version."""

from tailrace.rollout.pool import Ages
from tailrace.types import Group, Prompt, Sample, SampleId


def group_of(index: int) -> Group:
    group = Group(Prompt(index, [1]), 2, [])
    group.samples = [Sample(SampleId(index, 0, number), group) for number in range(2)]
    return group


def test_groups_without_tokens_are_held_over_by_a_publication_until_it_has_arrived() -> None:
    ages, has_arrived = Ages(), False
    before, grows, leaves, has_tokens = (group_of(index) for index in range(4))
    has_tokens.samples[0].grow(1, 0)
    ages.published([before, grows, leaves, has_tokens], lambda: has_arrived)
    assert ages.may_start_older == {before, grows, leaves}
    grows.samples[0].grow(1, 0)
    ages.remove([leaves])
    assert ages.may_start_older == {before}
    has_arrived = True
    assert ages.may_start_older == set()
