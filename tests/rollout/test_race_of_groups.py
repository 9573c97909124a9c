"""Who loses a race of groups, and when."""

import pytest

from tailrace.rollout.race import Race
from tailrace.types import Group, Prompt, Sample, SampleId


def group_of(index: int, *, generated: bool) -> Group:
    group = Group(Prompt(index, [1]), 1, [])
    group.samples = [Sample(SampleId(index, 0, 0), group)]
    group.kept = group.samples[:] if generated else []
    return group


@pytest.mark.parametrize(
    ("num_places", "scored", "num_ready", "losers"),
    [
        (2, False, 0, []),  # one is generated
        (2, False, 1, [1, 2]),
        (1, False, 0, [1, 2]),
        (1, True, 0, []),  # it is not scored
        (2, True, 2, [0, 1, 2]),
        (3, True, 2, []),
    ],
)
def test_all_that_have_not_won_lose_once_all_places_are_taken(
    num_places: int, scored: bool, num_ready: int, losers: list[int]
) -> None:
    in_flight = [group_of(index, generated=index == 0) for index in range(3)]
    found = Race(num_places, scored).losers(in_flight, num_ready)
    assert [group.prompt.index for group in found] == losers
