"""The choice of the tensor-parallel size, by hand and in virtual time."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from helpers.virtual import EXACT, change, simulate, worlds
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.record.events import (
    EngineStateChanged,
    Preempted,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
)
from tailrace.rollout.placement import DeviceSharing, TensorParallelRule, sharing_engines
from tailrace.rollout.progress import KnownLengths, peak_kv
from tailrace.schedules.serial import serial
from tailrace.schedules.tailbatch import tailbatch
from tailrace.sim.engine import SimEngine
from tailrace.types import Sample


def widths(*counts: int, largest: int = 8, start: int = 1) -> list[int]:
    """The width after each round."""
    rule = TensorParallelRule(largest, start)
    return [rule.round_ended(count) for count in counts]


def test_preemptions_that_rise_by_more_than_a_twentieth_double_the_size() -> None:
    assert widths(100, 105, 111, 200) == [1, 1, 2, 4]


def test_a_rise_from_zero_is_a_rise_and_the_first_round_is_none() -> None:
    assert widths(50, 0, 1) == [1, 1, 2]


def test_four_rounds_without_preemption_halve_the_size_down_to_one() -> None:
    assert widths(1, 2, 4, *[0] * 9) == [1, 2, 4, *[4] * 3, 2, 2, 2, 2, 1, 1]


def test_the_size_may_fall_below_the_start_value() -> None:
    assert widths(*[0] * 4, start=2) == [2, 2, 2, 1]


def test_the_size_is_at_most_the_largest() -> None:
    assert widths(1, 2, 4, 8, largest=2) == [1, 2, 2, 2]


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
        sharing=DeviceSharing(max_width=4),
    )
    assert [event.time_s for event in outcome.of(RoundStarted)][:2] == [0, 15]
    assert {event.engine for event in outcome.of(RequestStarted)} == {f"engine-{n}" for n in range(4)}
    assert "evicted" not in {event.outcome for event in outcome.of(RequestEnded)}
    states = [(event.engine, event.state) for event in outcome.of(EngineStateChanged)]
    assert states[:4] == [(f"engine-{number}", "asleep") for number in range(4)]
    assert sorted(states[4:]) == [("engine-0", "open"), ("engine-2", "open")]
    assert [engine.width for engine in outcome.parts.engines] == [2, 0, 2, 0]
    starts = [event.time_s for event in outcome.of(RoundStarted)]
    joined_s = 20 * ((0.5 + 0.5 * 4) / 2 + 0.25)
    assert [starts[3] - starts[2], outcome.ended_s - starts[3]] == [100 + joined_s, joined_s]
    assert sum(usage.num_preempted for usage in outcome.usages) == 4
    counted = [(event.engine, event.num_requests) for event in outcome.of(Preempted)]
    assert counted == [(f"engine-{number}", 1) for number in range(4)]


def test_the_start_value_depends_on_the_requests_that_the_first_round_needs() -> None:
    asked: list[float] = []

    def start_width(num_requests: float) -> int:
        asked.append(num_requests)
        return 2

    outcome = simulate(
        partial(tailbatch, groups_per_round=4),
        RunSettings(rounds=1, group_size=1),
        SIM,
        parts=worlds(SIM, lambda sample: 10, count=4),
        sharing=DeviceSharing(max_width=4, start_width=start_width),
    )
    assert asked == [4]
    assert [engine.width for engine in outcome.parts.engines] == [2, 0, 2, 0]
    assert {event.engine for event in outcome.of(RequestStarted)} == {"engine-0", "engine-2"}


class Starting(SimEngine):
    """An engine that opens some time after it was regrouped, the later the larger its number."""

    async def resize(self, width: int) -> None:
        await super().resize(width)
        if width:
            self.die()
            asyncio.get_running_loop().call_later(10.0 * (1 + int(self.name[-1])), self.revive)


def test_requests_wait_until_all_engines_have_their_size() -> None:
    """Engines 0 and 2 open 10 s and 30 s after 100 s of regrouping."""

    def parts() -> RunComponents:
        engines = [Starting(f"engine-{n}", SIM.engines, lambda _: 10, 100) for n in range(4)]
        return replace(simulated_parts(SIM, 0), engines=engines)

    outcome = simulate(
        partial(serial, groups_per_round=8, groups_per_step=8),
        RunSettings(rounds=1, group_size=1),
        SIM,
        parts=parts,
        sharing=DeviceSharing(max_width=2, start_width=lambda num_requests: 2),
    )
    started = [(event.time_s, event.engine) for event in outcome.of(RequestStarted)]
    assert sorted(started) == [(130.0, "engine-0")] * 4 + [(130.0, "engine-2")] * 4


@pytest.mark.parametrize("kind", ["disaggregated", "colocated", "elastic"])
def test_short_and_long_rounds_switch_between_their_sizes(kind) -> None:  # type: ignore[no-untyped-def]
    """Four prompts of two samples win in a short round, of five with three each, on 4 engines. Prompts of
    even number have 10 tokens, the others 14. Later short rounds have longer responses and preempt more."""

    def length_of(sample: Sample) -> int:
        return 10 + 2 * (sample.id.prompt // 5) + 8 * (sample.id.prompt % 5 == 4)

    outcome = simulate(
        partial(tailbatch, groups_per_round=4),
        RunSettings(rounds=6, group_size=2),
        SIM,
        parts=worlds(SIM, length_of, count=4, replicas=2 if kind == "elastic" else 1),
        sharing=DeviceSharing(kind, max_width=2),
    )
    widths, width, is_race = [], 1, []
    for event in outcome.events:
        if isinstance(event, EngineStateChanged) and "devices of 2" in event.why:
            width = 2
        if isinstance(event, EngineStateChanged) and "devices of 1" in event.why:
            width = 1
        if isinstance(event, RoundEnded):
            widths.append(width)
            is_race.append(event.round % 5 != 4)
    assert len(set(widths)) == 2
    short = {width for width, race in zip(widths, is_race, strict=True) if race}
    assert widths[4] == 1 and short == {1, 2}, widths
    assert outcome.run.overtime


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
    ("widths", "shared", "shares"),
    [
        ([1, 1], [False, True], [False, True]),
        ([2, 0, 2, 0], [False, False, True, True], [False, False, True, False]),
        ([2, 0, 1, 1], [False, True, True, True], [False] * 4),  # a group would be split
        ([2, 0], [False, True], [False, False]),
    ],
)
def test_a_tensor_parallel_group_sleeps_whole_or_not_at_all(
    widths: list[int], shared: list[bool], shares: list[bool]
) -> None:
    assert sharing_engines(widths, shared) == shares
