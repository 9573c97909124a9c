"""The choice of the tensor-parallel size, by hand and in virtual time."""

from functools import partial

import pytest

from helpers.virtual import EXACT, change, simulate, worlds
from tailrace.controller.base import RunSettings
from tailrace.record.events import EngineStateChanged, Preempted, RoundStarted
from tailrace.rollout.placement import Shared, TensorParallelRule, lendable
from tailrace.rollout.progress import KnownLengths, peak_kv
from tailrace.schedules.serial import serial
from tailrace.types import Sample


def widths(*rounds: tuple[str, int], largest: int = 8) -> list[int]:
    rule = TensorParallelRule(largest)
    return [rule.round_ended(count, is_race=kind == "short") for kind, count in rounds]


def test_preemptions_that_rise_by_more_than_a_twentieth_double_the_size() -> None:
    assert widths(("long", 100), ("long", 105), ("long", 111), ("long", 200)) == [1, 1, 2, 4]


def test_a_rise_from_zero_is_a_rise_and_the_first_round_is_none() -> None:
    assert widths(("long", 50), ("long", 0), ("long", 1)) == [1, 1, 2]


def test_short_rounds_are_compared_with_short_rounds() -> None:
    """179 preemptions of a short round after 100 of a long one are no rise."""
    assert widths(("short", 179), ("long", 100), ("short", 179), ("long", 100)) == [1, 1, 1, 1]


def test_a_rise_in_a_short_round_doubles_the_size_after_the_next_long_round() -> None:
    assert widths(("short", 10), ("short", 20), ("short", 20), ("long", 5), ("short", 20)) == [1, 1, 1, 2, 2]


def test_four_rounds_without_preemption_halve_the_size_down_to_one() -> None:
    rising = [("long", 1), ("long", 2), ("long", 4)]
    assert widths(*rising, *[("long", 0)] * 9) == [1, 2, 4, *[4] * 3, 2, 2, 2, 2, 1, 1]


def test_the_size_is_at_most_the_largest() -> None:
    assert widths(*[("long", 2**number) for number in range(4)], largest=2) == [1, 2, 2, 2]


SIM = change(
    EXACT,
    engines=change(
        EXACT.engines,
        count=4, slots=8, base_s=0.5, slope_s=0.5, kv_tokens=30, weight_tokens=20,
        communication_s=0.25, regroup_s=100.0, sleep_s=0.0, wake_s=0.0,
    ),
    trainer=change(EXACT.trainer, tokens_per_s=1e30),
)  # fmt: skip


def test_engines_that_preempt_more_are_joined() -> None:
    """Rounds of 8 responses on 4 engines, two on each: of 10 tokens, and of 20, which do not fit into 30
    positions beside each other. Two joined devices have 2 * 30 + 20 positions. A step of n requests takes
    0.5 + 0.5 n s on one device and half of it + 0.25 s on two."""
    table = [10, 20, 20, 20]

    def length_of(sample: Sample) -> int:
        return table[sample.id.prompt // 8]

    outcome = simulate(
        partial(serial, groups_per_round=8, groups_per_step=8),
        RunSettings(rounds=4, group_size=1),
        SIM,
        parts=worlds(SIM, length_of, count=4),
        shared=Shared(max_width=4),
    )
    assert [event.time_s for event in outcome.of(RoundStarted)][:2] == [0, 15]
    states = [(event.engine, event.state) for event in outcome.of(EngineStateChanged)]
    assert states[:4] == [(f"engine-{number}", "asleep") for number in range(4)]
    assert sorted(states[4:]) == [("engine-0", "open"), ("engine-2", "open")]
    assert [engine.width for engine in outcome.parts.engines] == [2, 0, 2, 0]
    starts = [event.time_s for event in outcome.of(RoundStarted)]
    assert starts[3] - starts[2] == 20 * ((0.5 + 0.5 * 4) / 2 + 0.25)
    assert sum(usage.num_preempted for usage in outcome.usages) == 4
    counted = [(event.engine, event.num_requests) for event in outcome.of(Preempted)]
    assert counted == [(f"engine-{number}", 1) for number in range(4)]


def test_the_largest_cache_is_when_a_request_ends() -> None:
    """3 requests with contexts 10, 20, 30; 5, 1 and 2 tokens to come: after 1, 2 and 5 steps they have
    60 + 3, 42 - 0 + ... positions."""
    assert peak_kv([10, 20, 30], [5, 1, 2]) == 63
    assert peak_kv([10, 10], [1, 30]) == 40
    assert peak_kv([], []) == 0


def test_what_a_response_will_gain_is_learnt_from_longer_ones() -> None:
    known = KnownLengths([10, 20, 60])
    assert known.expected_more([0, 10, 30, 60]) == [30, 30, 30, 60]
    assert KnownLengths().expected_more([4]) == [4]


@pytest.mark.parametrize(
    ("widths", "shared", "lent"),
    [
        ([1, 1], [False, True], [False, True]),
        ([2, 0, 2, 0], [False, False, True, True], [False, False, True, False]),
        ([2, 0, 1, 1], [False, True, True, True], [False] * 4),  # a group would be split
        ([2, 0], [False, True], [False, False]),
    ],
)
def test_a_tensor_parallel_group_is_lent_whole_or_not_at_all(
    widths: list[int], shared: list[bool], lent: list[bool]
) -> None:
    assert lendable(widths, shared) == lent
