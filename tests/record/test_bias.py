"""What was trained against what was drawn, counted by hand."""

import pytest

from helpers.record_story import Story, make_group, rows_of
from tailrace.record.bias import BiasMeter
from tailrace.record.events import (
    GroupDrawn,
    GroupEnded,
    RequestEnded,
    RoundEnded,
    RoundStarted,
    SampleScored,
    TokensWasted,
)
from tailrace.types import Group, Prompt, Sample, SampleId


def drawn(prompt: int, num: int = 1, *, source: str = "", round: int = 0) -> Group:
    """A group of which nothing is generated yet."""
    group = Group(Prompt(prompt, [1], source=source), num, [], round_drawn=round)
    group.samples = [Sample(SampleId(prompt, 0, number), group) for number in range(num)]
    return group


def left(prompt: int, number: int, num_tokens: int, attempt: int = 0) -> RequestEnded:
    return RequestEnded(
        0.0, SampleId(prompt, attempt, number), "engine-0", num_tokens, num_tokens, "cancelled"
    )


def scored(prompt: int, number: int, num_tokens: int, reward: float, attempt: int = 0) -> SampleScored:
    return SampleScored(0.0, SampleId(prompt, attempt, number), reward, None, num_tokens)


def trained(group: Group) -> Story:
    story = Story()
    story.train(group, 1, 2, 3)
    return story


def meter_of(*told: object) -> BiasMeter:
    meter = BiasMeter()
    for event in told:
        meter.on(event)  # type: ignore[arg-type]
    return meter


def test_a_schedule_that_trains_all_that_it_drew_has_no_bias() -> None:
    group = drawn(0, 2)
    events = GroupDrawn(0.0, group), scored(0, 0, 4, 1.0), scored(0, 1, 8, 0.0)
    figures = meter_of(*events, *trained(make_group(0, [4, 8], [1.0, 0.0])).events).figures()
    assert figures == {"bias/length": 0.0, "bias/reward": 0.0, "bias/delay": 0.0}


def test_a_response_that_a_verification_has_cut_counts_as_it_is_in_the_end() -> None:
    group, id = drawn(0), SampleId(0, 0, 0)
    events = [GroupDrawn(0.0, group), scored(0, 0, 100, 1.0), TokensWasted(0.0, id, 90, "changed")]
    ended = left(0, 0, 40), scored(0, 0, 40, 0.0), TokensWasted(0.0, SampleId(7, 0, 0), 5, "changed")
    figures = meter_of(*events, *ended, *trained(make_group(0, [40], [0.0])).events).figures()
    assert figures == {"bias/length": 0.0, "bias/reward": 0.0, "bias/delay": 0.0}


def test_a_response_that_is_not_complete_is_longer_than_it_is() -> None:
    """Responses of 4 and 8 tokens are complete; two are under way, with 4 and 6. At 4 one of four ends: a
    quarter of the mass. At 8 the only one that is left has the rest. So the mean is 4 / 4 + 8 * 3 / 4 = 7."""
    group = drawn(0, 4)
    events = [scored(0, 0, 4, 1.0), scored(0, 1, 8, 0.0), left(0, 2, 4), left(0, 3, 6)]
    short = trained(make_group(0, [4], [1.0])).events[-1]
    figures = meter_of(GroupDrawn(0.0, group), *events, short).figures()
    assert figures["bias/length"] == 4 / 7 - 1
    assert figures["bias/reward"] == 1.0 - 0.5


def test_what_lies_beyond_the_longest_response_counts_as_long_as_that() -> None:
    group = drawn(0, 2)
    short = trained(make_group(0, [4], [1.0])).events[-1]
    meter = meter_of(GroupDrawn(0.0, group), scored(0, 0, 4, 1.0), left(0, 1, 10), short)
    assert meter.figures()["bias/length"] == 4 / 7 - 1, "4 / 2 + 10 / 2"


@pytest.mark.parametrize("late", [False, True])
def test_a_member_that_was_given_up_counts_also_when_its_abort_outlives_the_group(late: bool) -> None:
    wasted = TokensWasted(0.0, SampleId(0, 0, 1), 10, "overflow")
    end = [GroupEnded(0.0, 0, "dropped", "overflow"), left(0, 1, 10), wasted]
    events = end if late else [left(0, 1, 10), wasted, end[0]]
    short = trained(make_group(1, [4], [1.0])).events
    before = [GroupDrawn(0.0, drawn(0, 2)), GroupDrawn(0.0, drawn(1)), scored(0, 0, 4, 0.0)]
    figures = meter_of(*before, *events, scored(1, 0, 4, 1.0), *short).figures()
    assert figures["bias/length"] == pytest.approx(4 / 6 - 1), "4 * 2 / 3 + 10 / 3"


def test_a_member_that_began_again_counts_once() -> None:
    """The first attempt is wasted with 6 of its 8 tokens, the second one ends."""
    begun, end = drawn(0), scored(0, 0, 8, 1.0, attempt=1)
    wasted = TokensWasted(0.0, SampleId(0, 0, 0), 6, "deferred")
    figures = meter_of(
        GroupDrawn(0.0, begun), left(0, 0, 6), wasted, end, *trained(make_group(0, [8], [1.0])).events
    )
    assert figures.figures()["bias/length"] == 0.0


def test_a_process_that_goes_on_counts_what_the_earlier_one_has_generated() -> None:
    taken_up = make_group(0, [4, 8], [1.0, 0.0])
    short = trained(make_group(0, [4], [1.0])).events[-1]
    figures = meter_of(GroupDrawn(0.0, taken_up), short).figures()
    assert (figures["bias/length"], figures["bias/reward"]) == (4 / 6 - 1, 0.5)


def test_shares_of_sources_are_compared() -> None:
    """Two of three prompts drawn are of "code", and none of them is trained."""
    group = make_group(0, [4], [1.0])
    object.__setattr__(group.prompt, "source", "math")
    draws = [GroupDrawn(0.0, each) for each in (group, drawn(1, source="code"), drawn(2, source="code"))]
    figures = meter_of(*draws, *trained(group).events).figures()
    assert figures["bias/source/code"] == -2 / 3
    assert figures["bias/source/math"] == pytest.approx(1 - 1 / 3)


def test_long_responses_that_are_trained_later_are_a_delay() -> None:
    """A response of 4 tokens has the age 0, one of 12 tokens the age 2: by tokens 1.5, by samples 1."""
    story = trained(make_group(0, [4], [1.0]))
    later = trained(make_group(1, [12], [1.0]))
    meter = meter_of(RoundStarted(0.0, 0, 0), *story.events, RoundStarted(4.0, 2, 0), *later.events)
    assert meter.figures()["bias/delay"] == 24 / 16 - 2 / 2


def test_a_steps_row_has_the_figures() -> None:
    story, group = Story(), make_group(0, [4, 8], [1.0, 0.0])
    story.tell(RoundStarted(0.0, 0, 0), GroupDrawn(0.0, group), GroupDrawn(0.0, make_group(1, [24], [1.0])))
    story.train(group, 1, 2, 3)
    story.tell(RoundEnded(4.0, 0))
    (row,) = [row for row in rows_of(story.events) if "loss" in row]
    assert row["bias/length"] == 6 / 12 - 1
