"""Schedules on placements whose devices change their role, in virtual time: sums by hand, and what must hold
for every schedule."""

from collections import Counter
from functools import partial

import pytest

from helpers.virtual import (
    EXACT,
    NEVER_STOP,
    ON_POLICY,
    SCHEDULES_BY_NAME,
    SETTINGS,
    SIM,
    Death,
    change,
    dying,
    regenerated,
    simulate,
    worlds,
)
from tailrace.controller.base import RunSettings
from tailrace.errors import ConfigError, NotWoken, ScheduleError, ServerRefused
from tailrace.record.events import Accumulated, EngineStateChanged, RequestEnded, RequestStarted, Stepped
from tailrace.rollout.placement import DeviceSharing
from tailrace.schedules.april import april
from tailrace.schedules.serial import serial
from tailrace.schedules.tailbatch import rollpacker
from tailrace.sim.engine import SimEngine
from tailrace.sim.trainer import SimTrainer
from tailrace.types import Sample

ONE_EACH = RunSettings(rounds=1, group_size=1)
HAND = change(
    EXACT,
    engines=change(EXACT.engines, count=2, slots=4, sleep_s=2.0, wake_s=3.0, kv_tokens=1000),
)
"""Sleeping takes 2 s and waking 3 s."""
TEN = partial(rollpacker, groups_per_round=10, prompt_speculation=1.0, response_speculation=1.0)
"""Ten groups of one response, all of them trained."""
MOVERS = [name for name in SCHEDULES_BY_NAME if name not in NEVER_STOP]
MOVING = pytest.mark.parametrize("name", MOVERS)
KINDS = pytest.mark.parametrize("kind", ["colocated", "elastic"])
TWO_ROUNDS = change(SETTINGS, rounds=2)
SMALL = change(SIM, engines=change(SIM.engines, sleep_s=0.5, wake_s=1.0))


def states(outcome) -> list[tuple[float, str, str]]:  # type: ignore[no-untyped-def]
    return [(event.time_s, event.engine, event.state) for event in outcome.of(EngineStateChanged)]


def worked(outcome) -> list[tuple[float, float, int]]:  # type: ignore[no-untyped-def]
    return [(event.start_s, event.end_s, len(event.samples)) for event in outcome.of(Accumulated)]


def lengths(*of_prompts: int):  # type: ignore[no-untyped-def]
    def length(sample: Sample) -> int:
        return of_prompts[sample.id.prompt % len(of_prompts)]

    return length


def test_colocated_engines_sleep_then_all_train_then_they_wake() -> None:
    """Rollout 10 s, sleep 2 s, 4 samples of 11 positions at 1 a second, wake 3 s; twice."""
    settings = RunSettings(rounds=2, group_size=2)
    schedule = partial(serial, groups_per_round=2, groups_per_step=2)
    outcome = simulate(schedule, settings, HAND, sharing=DeviceSharing("colocated"))
    assert worked(outcome) == [(12, 56, 4), (71, 115, 4)]
    asleep, awake = ("engine-0", "asleep"), ("engine-0", "open")
    assert [(at, who) for at, *who in states(outcome) if who[0] == "engine-0"] == [
        (10, list(asleep)), (59, list(awake)), (69, list(asleep)), (118, list(awake))
    ]  # fmt: skip


@KINDS
def test_the_trainer_sleeps_before_an_engine_wakes(kind, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    order: list[str] = []

    def note(owner: type, name: str) -> None:
        original = getattr(owner, name)

        async def noted(*args, **kwargs) -> None:  # type: ignore[no-untyped-def]
            await original(*args, **kwargs)
            order.append(name)

        monkeypatch.setattr(owner, name, noted)

    note(SimTrainer, "accumulate")
    note(SimTrainer, "sleep")
    note(SimEngine, "wake")
    simulate(
        partial(serial, groups_per_round=2, groups_per_step=2), TWO_ROUNDS, SMALL, sharing=DeviceSharing(kind)
    )
    after_training = " ".join(order).split("accumulate ")[1:]
    assert len(after_training) == 2
    assert all(what.startswith("sleep wake wake") for what in after_training)


@KINDS
@pytest.mark.parametrize(
    "why", [NotWoken("CUDA out of memory"), ServerRefused("POST http://e/wake_up", 500, "CUDA out of memory")]
)
def test_an_engine_that_cannot_wake_beside_the_trainer_ends_the_run_with_a_remedy(
    kind,  # type: ignore[no-untyped-def]
    why: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(self: SimEngine) -> None:
        raise why

    monkeypatch.setattr(SimEngine, "wake", refuse)
    schedule = partial(serial, groups_per_round=2, groups_per_step=2)
    with pytest.raises(
        ConfigError, match=rf"placement.kind = '{kind}': .*CUDA out of memory\); give the engines"
    ):
        simulate(schedule, TWO_ROUNDS, SMALL, sharing=DeviceSharing(kind))


def test_elastic_lends_half_of_the_engines_at_a_milestone_and_all_of_them_at_the_end() -> None:
    """Prompts of 1 token, lengths 10, 20, ... 100. Two of ten are done at 20 s, which is 20%: engine-1 sleeps
    until 22 s. Replica 0, half as fast, takes 22 s for 11 positions, 42 s for 21, 62 s for 31. The rollout
    ends meanwhile, and engine-0 sleeps, too. Both replicas share the rest."""
    roomy = change(HAND, engines=change(HAND.engines, slots=10))
    parts = worlds(roomy, lengths(10, 20, 30, 40, 50, 60, 70, 80, 90, 100), count=2, replicas=2)
    outcome = simulate(TEN, ONE_EACH, roomy, parts=parts, sharing=DeviceSharing("elastic"))
    assert states(outcome)[:1] == [(20, "engine-1", "asleep")]
    assert worked(outcome) == [(22, 44, 1), (44, 86, 1), (86, 148, 1), (150, 191, 1), (191, 647, 6)]
    moved = [event for event in outcome.of(RequestStarted) if event.num_tokens]
    assert [(event.engine, event.num_tokens) for event in moved] == [("engine-0", 20)] * 4
    assert regenerated(outcome.events) == []
    assert [step.end_s for step in outcome.of(Stepped)] == [647]


@pytest.mark.parametrize(("room", "first_s"), [(150, 14), (149, 15), (134, 180)])
def test_elastic_is_tested_again_at_each_milestone_until_the_cache_fits(room: int, first_s: float) -> None:
    """A response that is longer than all known ones is expected to double. At 12 s four of ten are done and
    six are expected to need 6 * 25 positions; at 13 s five need 5 * 27. That is half: the last milestone.
    With less room than that the rollout ends first, later than at 100 s because both engines preempt."""
    sim = change(HAND, engines=change(HAND.engines, slots=10, kv_tokens=room))
    table = lengths(10, 10, 11, 12, 13, 100, 100, 100, 100, 100)
    outcome = simulate(
        TEN, ONE_EACH, sim, parts=worlds(sim, table, count=2, replicas=2), sharing=DeviceSharing("elastic")
    )
    assert worked(outcome)[0][0] == first_s


@pytest.mark.parametrize(("limit", "second_s"), [(111, 40), (112, 50)])
def test_elastic_lends_at_a_share_of_the_prompts_that_follows_the_longest_response(limit, second_s) -> None:  # type: ignore[no-untyped-def]
    """Four of ten prompts are done at 40 s, whether or not the cache has room for the rest. The longest
    response has 100 tokens: less than 90% of 112, and then the next rollout lends when half are done."""
    sim = change(HAND, engines=change(HAND.engines, slots=10, kv_tokens=200))
    sharing, settings = DeviceSharing("elastic", longest=limit), RunSettings(rounds=2, group_size=1)
    parts = worlds(sim, lengths(10, 20, 30, 40, 50, 60, 70, 80, 90, 100), count=2, replicas=2)
    outcome = simulate(TEN, settings, sim, parts=parts, sharing=sharing)
    awake_s = [at for at, *who in states(outcome) if who == ["engine-1", "open"]]
    asleep_s = [at for at, *who in states(outcome) if who == ["engine-1", "asleep"]]
    assert asleep_s == [40, awake_s[0] + second_s]
    by_responses = simulate(TEN, settings, sim, parts=parts, sharing=DeviceSharing("elastic"))
    assert min(at for at, name, _ in states(by_responses) if name == "engine-1") == 100  # the end


def test_a_trainer_that_sleeps_takes_its_time_before_and_after_each_rollout() -> None:
    """As colocated above; the trainer's state comes back in 5 s, and leaves in 5 s before engines wake."""
    settings = RunSettings(rounds=2, group_size=2)
    swapped = change(HAND, trainer=change(HAND.trainer, swap_s=5.0))
    schedule = partial(serial, groups_per_round=2, groups_per_step=2)
    outcome = simulate(schedule, settings, swapped, sharing=DeviceSharing("colocated"))
    assert worked(outcome) == [(17, 61, 4), (86, 130, 4)]


def test_training_during_the_rollout_waits_for_what_it_needs_and_the_step_for_the_rest() -> None:
    """As elastic above. Replica 0 loads 3 of 5 s at 20 s. The rollout ends before 156 s, when it trains; the
    rest of the state comes in 2 s after engine-0 sleeps."""
    roomy = change(HAND, engines=change(HAND.engines, slots=10))
    roomy = change(roomy, trainer=change(roomy.trainer, swap_s=5.0, early_swap_s=3.0))
    table, sharing = lengths(10, 20, 30, 40, 50, 60, 70, 80, 90, 100), DeviceSharing("elastic")
    parts = worlds(roomy, table, count=2, replicas=2, sharing=sharing)
    outcome = simulate(TEN, ONE_EACH, roomy, parts=parts, sharing=sharing)
    assert worked(outcome)[:4] == [(25, 47, 1), (47, 89, 1), (89, 151, 1), (155, 196, 1)]


def test_four_replicas_train_early_with_two() -> None:
    """Half of the speed, as one of two has; then all."""
    roomy = change(HAND, engines=change(HAND.engines, slots=10))
    table = lengths(10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    sharing = DeviceSharing("elastic", early_replicas=2)
    outcome = simulate(TEN, ONE_EACH, roomy, parts=worlds(roomy, table, count=2, replicas=4), sharing=sharing)
    assert worked(outcome) == [(22, 44, 1), (44, 86, 1), (86, 148, 1), (150, 191, 1), (191, 647, 6)]


def test_serial_on_elastic_devices_is_serial_on_colocated_ones() -> None:
    schedule = partial(serial, groups_per_round=8, groups_per_step=4)
    ended = {
        kind: simulate(schedule, TWO_ROUNDS, SMALL, sharing=DeviceSharing(kind)).ended_s
        for kind in ("elastic", "colocated")
    }
    assert ended["elastic"] == ended["colocated"]


def test_a_launch_after_training_wakes_the_engines() -> None:
    async def twice(run) -> None:  # type: ignore[no-untyped-def]
        run.declare(staleness=0)
        async for _ in run.rounds():
            for _ in range(2):
                run.pool.launch(run.prompts(2))
                await run.train(await run.pool.take(2))
            await run.publish()

    outcome = simulate(twice, ONE_EACH, HAND, sharing=DeviceSharing("colocated"))
    assert worked(outcome) == [(12, 34, 2), (49, 71, 2)]


@KINDS
def test_training_directly_after_a_launch_waits_for_the_engines_to_wake(kind) -> None:  # type: ignore[no-untyped-def]
    async def halves(run) -> None:  # type: ignore[no-untyped-def]
        run.declare(staleness=0)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            first, second = await run.pool.take(2)
            await run.accumulate([first])
            run.pool.launch(run.prompts(1))
            await run.accumulate([second])
            await run.train(await run.pool.take(1))
            await run.publish()

    outcome = simulate(halves, ONE_EACH, HAND, sharing=DeviceSharing(kind))
    assert sum(num for _, _, num in worked(outcome)) == 3


def test_april_parks_and_continues_on_colocated_devices() -> None:
    schedule = partial(april, groups_per_round=8, groups_launched=16)
    outcome = simulate(schedule, TWO_ROUNDS, SMALL, sharing=DeviceSharing("colocated"))
    assert [event for event in outcome.of(RequestStarted) if event.num_tokens] != []
    assert regenerated(outcome.events) == []


@pytest.mark.parametrize("name", NEVER_STOP)
@KINDS
def test_a_schedule_that_never_stops_generating_is_refused(name: str, kind) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScheduleError, match=r'never stop generating.* set placement.kind = "disaggregated"'):
        simulate(SCHEDULES_BY_NAME[name], TWO_ROUNDS, SMALL, sharing=DeviceSharing(kind))


@MOVING
@KINDS
def test_no_engine_generates_while_its_device_trains_and_bounds_are_kept(name: str, kind) -> None:  # type: ignore[no-untyped-def]
    outcome = simulate(SCHEDULES_BY_NAME[name], TWO_ROUNDS, SMALL, sharing=DeviceSharing(kind))
    assert outcome.run.overtime and regenerated(outcome.events, verifies=outcome.run.verifies) == []
    if name in ON_POLICY:
        assert all(list(step.lags.publications) == [0] for step in outcome.of(Stepped))
    asleep: dict[str, float] = {}
    training = [(e.start_s, e.end_s) for e in (*outcome.of(Accumulated), *outcome.of(Stepped))]
    for event in outcome.events:
        if isinstance(event, EngineStateChanged):
            if event.state == "asleep":
                asleep[event.engine] = event.time_s
            else:
                asleep.pop(event.engine)
        elif isinstance(event, RequestStarted):
            assert event.engine not in asleep
        elif isinstance(event, Stepped):
            assert asleep.keys() == {"engine-0", "engine-1"}
        elif isinstance(event, RequestEnded) and kind == "colocated":
            assert not any(start < event.time_s < end for start, end in training)


@pytest.mark.parametrize("name", ["serial", "april", "tailbatch_dapo", "rollpacker"])
@KINDS
def test_engines_that_die_cost_no_token_on_any_placement(name: str, kind) -> None:  # type: ignore[no-untyped-def]
    clean = simulate(SCHEDULES_BY_NAME[name], TWO_ROUNDS, SMALL, sharing=DeviceSharing(kind))
    deaths = [
        Death(clean.ended_s * share, number % 2, clean.ended_s / 20)
        for number, share in enumerate((0.05, 0.1, 0.3, 0.31, 0.6))
    ]
    outcome = simulate(
        SCHEDULES_BY_NAME[name], TWO_ROUNDS, SMALL, sharing=DeviceSharing(kind), beside=dying(*deaths)
    )
    assert outcome.run.overtime and regenerated(outcome.events) == []
    samples = [sample for step in outcome.of(Stepped) for sample in step.samples]
    assert max(Counter(sample.id for sample in samples).values()) == 1


@KINDS
def test_five_runs_are_one_trace(kind) -> None:  # type: ignore[no-untyped-def]
    run = partial(simulate, SCHEDULES_BY_NAME["rollpacker"], TWO_ROUNDS, SMALL, sharing=DeviceSharing(kind))
    assert len({tuple(run().trace) for _ in range(5)}) == 1
