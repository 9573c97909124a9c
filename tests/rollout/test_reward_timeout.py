"""The adaptive time limit: min(max(T_min, lambda T_anchor), T_max)."""

import asyncio

import pytest

from tailrace import clock
from tailrace.contracts.reward import TimeoutSettings
from tailrace.rollout.reward_timeout import Anchors
from tailrace.types import Group, Prompt, Sample, SampleId

pytestmark = pytest.mark.virtual

SETTINGS = TimeoutSettings()


def sample(index: int = 0, row: int | None = 7, number: int = 0) -> Sample:
    return Sample(SampleId(index, 0, number), Group(Prompt(index, [], row_number=row), 1, []))


def test_the_limit_follows_the_longest_correct_response_between_its_bounds() -> None:
    anchors = Anchors()
    assert anchors.limit_s(sample(), 0, SETTINGS) == 30.0  # nothing is known
    limits = []
    for seconds in (0.5, 4.0, 3.0, 25.0):
        anchors.observe(sample(), [seconds])
        limits.append(anchors.limit_s(sample(), 0, SETTINGS))
    assert limits == [2.0, 6.0, 6.0, 30.0]


def test_a_fast_test_case_beside_a_slow_one_has_a_limit_of_its_own() -> None:
    """1.5 x 1.6 s and 1.5 x 8 s. The third test case has never ended in a correct response."""
    anchors = Anchors()
    anchors.observe(sample(), [1.6, 3.0])
    anchors.observe(sample(), [0.1, 8.0])
    limits = [anchors.limit_s(sample(), case, SETTINGS) for case in range(3)]
    assert limits == [pytest.approx(2.4), 12.0, 30.0]


def test_a_correct_response_changes_the_limits_of_its_own_test_cases_only() -> None:
    anchors = Anchors()
    with anchors.limit(sample(), 0, SETTINGS) as fast, anchors.limit(sample(), 1, SETTINGS) as slow:
        anchors.observe(sample(), [1.0, 8.0])
        assert (fast.seconds, slow.seconds) == (2.0, 12.0)


def test_a_prompt_is_known_by_its_row_in_every_epoch() -> None:
    anchors = Anchors()
    anchors.observe(sample(index=1, row=7), [4.0])
    assert anchors.limit_s(sample(index=99, row=7), 0, SETTINGS) == 6.0
    assert anchors.limit_s(sample(index=1, row=8), 0, SETTINGS) == 30.0
    anchors.observe(sample(index=5, row=None), [8.0])
    assert anchors.limit_s(sample(index=5, row=None), 0, SETTINGS) == 12.0


def test_evaluations_neither_learn_nor_have_a_limit_that_was_learnt() -> None:
    anchors = Anchors()
    anchors.observe(sample(index=-1), [4.0])
    assert anchors.longest_s == {}
    anchors.observe(sample(), [4.0])
    assert anchors.limit_s(sample(index=-1), 0, SETTINGS) == 30.0


@pytest.mark.parametrize(("reference_s", "limit_s"), [(0.3, 2.0), (4.0, 8.0), (20.0, 30.0)])
def test_a_reference_time_is_the_anchor_before_the_first_response_and_after(
    reference_s: float, limit_s: float
) -> None:
    """min(max(2 x reference, 2), 30), as in the published code; a correct response changes nothing."""
    anchors, settings = Anchors(), TimeoutSettings(reference_column="reference_time", factor=2.0)
    for each in (sample(), sample(index=-1)):
        assert anchors.limit_s(each, 0, settings, reference_s) == limit_s
        with anchors.limit(each, 0, settings, reference_s) as limit:
            anchors.observe(sample(), [14.0])
            assert limit.seconds == limit_s
        assert anchors.limit_s(each, 0, settings, reference_s) == limit_s


def test_a_fixed_limit_stays() -> None:
    anchors = Anchors()
    anchors.observe(sample(), [4.0])
    assert anchors.limit_s(sample(), 0, TimeoutSettings(adaptive=False, max_s=5.0)) == 5.0


def test_anchors_return_to_an_earlier_state() -> None:
    anchors = Anchors()
    anchors.observe(sample(), [4.0])
    before = dict(anchors.longest_s)
    anchors.observe(sample(), [9.0])
    anchors.restore(before)
    assert anchors.longest_s == {7: [4.0]}


async def test_a_correct_response_lowers_the_limit_of_test_cases_that_run() -> None:
    """The limit is 30 s, from second 3 on 1.5 x 4 = 6 s, and from second 8 on 2 s for what began at 7."""
    anchors = Anchors()

    async def run(begin_s: float, seconds: float, row: int) -> tuple[float, bool]:
        await asyncio.sleep(begin_s)
        with anchors.limit(sample(row=row), 0, SETTINGS) as limit:
            try:
                async with limit.enforced():
                    await asyncio.sleep(seconds)
            except TimeoutError:
                return clock.now(), False
        return clock.now(), True

    async def observe(at_s: float, row: int, seconds: float) -> None:
        await asyncio.sleep(at_s)
        anchors.observe(sample(row=row), [seconds])

    *ends, _, _ = await asyncio.gather(
        run(0, 60, row=1),
        run(1, 5, row=1),
        run(0, 60, row=2),
        run(7, 60, row=3),
        run(0, 60, row=3),
        observe(3, row=1, seconds=4.0),
        observe(8, row=3, seconds=1.0),
    )
    assert ends == [(6.0, False), (6.0, True), (30.0, False), (9.0, False), (8.0, False)]


def test_a_limit_that_rises_again_is_at_most_the_first_one() -> None:
    anchors = Anchors()
    anchors.observe(sample(), [4.0])
    with anchors.limit(sample(), 0, SETTINGS) as limit:
        anchors.observe(sample(), [10.0])
        assert (limit.seconds, anchors.limit_s(sample(), 0, SETTINGS)) == (6.0, 15.0)
