"""The pool: what goes in comes out, is parked or has a reason, whatever happens at whatever moment."""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from helpers.virtual import (
    EXACT,
    SETTINGS,
    SIM,
    ZERO_VARIANCE,
    Death,
    change,
    dying,
    in_service,
    simulate,
    worlds,
)
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.run import Run
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.errors import NeverComes, RewardFailed, ScheduleError, StalenessError
from tailrace.record.events import GroupEnded, GroupReady, RequestEnded, RequestStarted, SampleScored
from tailrace.rollout.admission import AtMost, Frontier
from tailrace.schedules import SCHEDULES
from tailrace.schedules.rolloutpipe import rolloutpipe
from tailrace.sim.settings import SimRewardSettings
from tailrace.types import Group, Sample

ONE_ROUND = RunSettings(rounds=1, group_size=2)


def staggered(sample: Sample) -> int:
    """Group g ends after g + 1 seconds."""
    return sample.prompt.index + 1


STAGGERED = worlds(EXACT, staggered)


def prompts_of(groups: list[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


def test_take_gives_the_first_to_complete_and_stream_gives_them_as_they_come() -> None:
    taken: list[Any] = []

    async def schedule(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(list(reversed(run.prompts(6))))
            taken.append(prompts_of(await run.pool.take(3)))
            await asyncio.sleep(2.5)
            async for groups in run.pool.stream(3):
                taken.append(prompts_of(groups))

    with pytest.raises(Exception, match=r"prompts \[0, 1, 2, 3, 4, 5\] were taken"):
        simulate(schedule, ONE_ROUND, EXACT, parts=STAGGERED)
    assert taken == [[0, 1, 2], [3, 4], [5]]


def test_a_take_that_nothing_in_flight_can_satisfy_is_an_error_at_once() -> None:
    async def greedy(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(4))
            await asyncio.sleep(2.5)
            await run.pool.take(5)

    with pytest.raises(NeverComes, match="the pool: 5 groups are wanted, 2 are ready and 2 in flight"):
        simulate(greedy, ONE_ROUND, EXACT, parts=STAGGERED)


def test_a_stream_that_asks_for_more_than_there_is_says_so_before_it_waits() -> None:
    async def greedy(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            async for groups in run.pool.stream(3):
                await run.train(groups)

    with pytest.raises(NeverComes, match="3 groups are wanted"):
        simulate(greedy, ONE_ROUND, EXACT, parts=STAGGERED)


def test_cancelling_a_take_loses_no_group() -> None:
    async def impatient(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(8))
            groups: list[Group] = []
            while not groups:
                try:
                    async with asyncio.timeout(1.7):
                        groups = await run.pool.take(8)
                except TimeoutError:
                    pass
            await run.train(groups)
            await run.publish()

    assert len(simulate(impatient).trained) == 24


def test_cancelling_park_does_not_stop_the_parking() -> None:
    async def impatient(run: Run) -> None:
        async for _ in run.rounds():
            groups = run.parked.pop(8)
            run.pool.launch(groups + run.prompts(8 - len(groups)))
            batch = await run.pool.take(4)
            try:
                async with asyncio.timeout(0.01):  # an abort takes 0.05 s
                    await run.pool.park()
            except TimeoutError:
                await run.pool.settled()
            assert len(run.parked) == 4
            await run.train(batch)
            await run.publish()

    assert len(simulate(impatient).trained) == 12


def test_park_waits_for_a_parking_that_begins_while_it_waits() -> None:
    parked = []

    async def twice(run: Run) -> None:
        async def again() -> None:
            await asyncio.sleep(0.01)  # an abort takes 0.05 s
            run.pool.launch(run.prompts(1))
            await run.pool.park()

        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            await asyncio.sleep(1)
            second = asyncio.create_task(again())
            await run.pool.park()
            parked.append(len(run.parked))
            await second

    simulate(twice, ONE_ROUND)
    assert parked == [3]


def test_park_keeps_complete_groups_first_then_the_order_of_launch_and_all_tokens() -> None:
    seen: list[Any] = []

    async def schedule(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(list(reversed(run.prompts(6))))
            batch = await run.pool.take(1)
            await asyncio.sleep(1.5)  # 1 is complete too; the others have two tokens
            await run.pool.park()
            assert len(run.pool) == 0
            seen.append([(g.prompt.index, g.complete, g.num_tokens, g.deferrals) for g in run.parked.groups])
            await run.train(batch)

    simulate(schedule, ONE_ROUND, EXACT, parts=STAGGERED)
    assert seen == [[(1, True, 4, 1), (5, False, 4, 1), (4, False, 4, 1), (3, False, 4, 1), (2, False, 4, 1)]]


def test_a_task_cancelled_before_its_first_step_leaves_nothing_behind() -> None:
    async def hasty(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.parked.pop(8) + run.prompts(8 - len(run.parked)))
            await run.pool.park()
            assert run.pool.num_requests == 0 and len(run.parked) == 8
            run.pool.launch(run.parked.pop(8))
            await run.train(await run.pool.take(8))
            await run.publish()

    assert len(simulate(hasty).trained) == 24


def test_a_race_keeps_the_first_to_finish_and_stops_the_others_at_once() -> None:
    lengths = [9, 3, 7, 5]
    parts = worlds(EXACT, lambda sample: lengths[sample.id.number])

    async def race(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1, samples=4))
            (group,) = await run.pool.take(1)
            assert [sample.id.number for sample in group.kept] == [1, 3]
            assert group.samples == [group.kept[0], group.kept[1]]
            await run.train([group])

    outcome = simulate(race, ONE_ROUND, EXACT, parts=parts)
    assert outcome.totals.wasted_tokens == {"raced": 5 + 5}
    assert [e.time_s for e in outcome.of(RequestEnded) if e.outcome == "cancelled"] == [5, 5]


def test_a_complete_group_that_was_parked_counts_its_failed_samples_once() -> None:
    sim = change(
        SIM, rewards=change(SIM.rewards, failing=0.4, median_s=0.0), engines=change(SIM.engines, slots=64)
    )

    async def schedule(run: Run) -> None:
        async for _ in run.rounds():
            groups = run.parked.pop(12)
            run.pool.launch(groups + run.prompts(12 - len(groups)))
            batch = await run.pool.take(4)
            await asyncio.sleep(40)
            await run.pool.park()
            await run.train(batch)
            await run.publish()

    outcome = simulate(schedule, sim=sim)
    assert outcome.totals.wasted_tokens["reward raised"] > 0


def test_a_group_parked_while_it_is_scored_is_not_scored_twice() -> None:
    sim = change(EXACT, rewards=change(EXACT.rewards, median_s=5.0, sigma=0.0))

    async def schedule(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            await asyncio.sleep(11)
            await run.pool.park()
            await asyncio.sleep(1)
            run.pool.launch(run.parked.pop(2))
            await run.train(await run.pool.take(2))

    outcome = simulate(schedule, ONE_ROUND, sim)
    assert [event.time_s for event in outcome.of(SampleScored)] == [15] * 4


def test_a_group_restarted_while_it_is_scored_gets_nothing_from_its_former_life() -> None:
    sim = change(EXACT, rewards=change(EXACT.rewards, median_s=5.0, sigma=0.0))

    async def schedule(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            await asyncio.sleep(11)
            await run.pool.park()
            run.pool.launch(run.restart(run.parked.pop(2), reason="deferred"))
            groups = await run.pool.take(2)
            assert [[sample.id.attempt for sample in group.kept] for group in groups] == [[1, 1]] * 2
            await run.train(groups)

    outcome = simulate(schedule, ONE_ROUND, sim)
    assert outcome.totals.wasted_tokens == {"deferred": 40}
    assert [event.time_s for event in outcome.of(GroupReady)] == [26, 26]


def test_a_drafted_request_gives_its_slot_up_to_a_launched_one_and_is_not_handed_out() -> None:
    """The engine has four slots. The two samples of the drafted group stop when a second group is launched at
    5 s, and go on when that has ended at 15 s. They are launched at 60 s, when 50 of 100 tokens are there."""
    sim = change(EXACT, engines=change(EXACT.engines, slots=4))
    lengths = {0: 50, 1: 100, 2: 10}

    async def schedule(run: Run) -> None:
        run.declare(staleness=0, stale="verify")
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            run.pool.draft(run.prompts(1))
            await asyncio.sleep(5)
            run.pool.launch(run.prompts(1))
            assert (len(run.pool), prompts_of(run.pool.drafted)) == (2, [1])
            with pytest.raises(NeverComes, match="3 groups are wanted, 0 are ready and 2 in flight"):
                await run.pool.take(3)
            groups = await run.pool.take(2)
            assert prompts_of(groups) == [2, 0] and run.pool.is_idle and not run.pool.is_serving
            await asyncio.sleep(10)
            assert [group.is_drafted for group in (*run.pool.drafted, *groups)] == [True, False, False]
            run.pool.launch(run.pool.drafted)
            assert (len(run.pool), run.pool.drafted, run.pool.is_idle) == (1, [], False)
            await run.train([*groups, *await run.pool.take(1)])

    outcome = simulate(schedule, ONE_ROUND, sim, parts=worlds(sim, lambda each: lengths[each.prompt.index]))
    starts = [(each.time_s, each.sample.prompt, each.num_tokens) for each in outcome.of(RequestStarted)]
    assert starts[::2] == [(0, 0, 0), (0, 1, 0), (5, 2, 0), (15, 1, 5)]
    assert {event.prompt: event.time_s for event in outcome.of(GroupReady)} == {2: 15, 0: 50, 1: 110}


def test_drafted_requests_leave_slots_that_died_to_launched_ones() -> None:
    """Two engines of two slots serve the launched group 0 on one and the drafted group 1 on the other, or a
    member of each. When one dies at 5 s, both members of group 0 end on the other as they would have."""
    sim = change(EXACT, engines=change(EXACT.engines, slots=2))

    async def schedule(run: Run) -> None:
        run.declare(staleness=0, stale="verify")
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            run.pool.draft(run.prompts(1))
            await run.train(await run.pool.take(1))

    parts = worlds(sim, lambda each: 50, count=2)
    outcome = simulate(schedule, ONE_ROUND, sim, parts=parts, beside=dying(Death(5, 0, 1000)))
    assert {event.prompt: event.time_s for event in outcome.of(GroupReady)} == {0: 50}


def test_a_schedule_that_does_not_verify_may_not_draft() -> None:
    async def schedule(run: Run) -> None:
        run.declare(staleness=0)
        async for _ in run.rounds():
            run.pool.draft(run.prompts(1))

    with pytest.raises(ScheduleError, match=r'run.pool.draft: .* declare stale="verify"'):
        simulate(schedule, ONE_ROUND, EXACT)


class OddRewards:
    """Scores 1 to even samples; what it does to odd ones and to whole prompts can be said."""

    def __init__(self, *, hopeless: set[int] = frozenset(), constant: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.hopeless, self.constant = hopeless, constant

    async def score(self, sample: Sample) -> float:
        if sample.prompt.index in self.hopeless:
            raise RewardFailed("raised" if sample.id.number else "nan")
        return 1.0 if sample.prompt.index in self.constant else float(sample.id.number % 2)


def with_rewards(**odd: set[int]) -> Any:
    return lambda: replace(simulated_parts(EXACT, seed=0), rewards=OddRewards(**odd))


def test_a_group_none_of_whose_samples_can_be_rewarded_is_dropped_and_replaced() -> None:
    settings = RunSettings(rounds=1, group_size=3)
    outcome = simulate(
        partial(rolloutpipe, groups_per_round=4, groups_per_step=4),
        settings,
        EXACT,
        parts=with_rewards(hopeless={1, 4}),
    )
    assert sorted(outcome.trained) == [0, 2, 3, 5]
    dropped = [event for event in outcome.of(GroupEnded) if event.fate == "dropped"]
    assert [(event.prompt, event.reason) for event in dropped] == [(1, "reward raised"), (4, "reward raised")]
    assert outcome.totals.groups == {"trained": 4, "dropped": 2}


def test_r_counts_trainable_groups_and_a_filtered_one_is_replaced_in_the_same_round() -> None:
    parts = with_rewards(constant={0, 3})
    schedule = partial(rolloutpipe, groups_per_round=4, groups_per_step=2)
    outcome = simulate(schedule, ONE_ROUND, EXACT, parts=parts, algorithm=ZERO_VARIANCE)
    assert sorted(outcome.trained) == [1, 2, 4, 5]
    assert outcome.totals.wasted_tokens == {"zero variance": 40}
    assert outcome.totals.groups == {"trained": 4, "filtered": 2}


def test_feed_keeps_the_admission_full_and_draws_no_prompt_before_it_is_needed() -> None:
    drawn: list[int] = []

    async def schedule(run: Run) -> None:
        run.pool.admission = AtMost(requests_per_engine=6)
        run.pool.feed(lambda n: (drawn.append(n), run.prompts(n))[1], room=4, full="block")
        assert (run.pool.num_requests, drawn) == (6, [1, 1, 1])
        async for _ in run.rounds():
            await run.train(await run.pool.take(2))
            assert run.pool.num_requests == 6
            await run.publish()

    quick = change(EXACT, trainer=change(EXACT.trainer, tokens_per_s=1000.0))
    simulate(schedule, RunSettings(rounds=3, group_size=2), quick)


def test_a_full_ring_holds_generation_but_for_what_is_in_flight_until_somebody_takes() -> None:
    sizes: list[int] = []

    async def schedule(run: Run) -> None:
        run.pool.admission = AtMost(requests_per_engine=2)
        run.pool.feed(run.prompts, room=3, full="block")
        async for _ in run.rounds():
            await asyncio.sleep(100)
            sizes.extend((len(run.pool.ready), len(run.pool.scoring)))
            assert run.pool.num_requests == 0
            groups = await run.pool.take(2)
            assert run.pool.num_requests == 2
            await run.train(groups)

    outcome = simulate(schedule, RunSettings(rounds=1, group_size=2), EXACT)
    assert sizes == [3, 1] and outcome.totals.groups == {"trained": 2}


def test_a_take_of_more_groups_than_have_room_says_so_and_does_not_wait_for_ever() -> None:
    async def schedule(run: Run) -> None:
        run.pool.feed(run.prompts, room=3, full="block")
        async for _ in run.rounds():
            await run.train(await run.pool.take(4))

    with pytest.raises(NeverComes, match=r"4 groups are wanted, and 3 have room; raise it"):
        simulate(schedule, ONE_ROUND, EXACT)


def test_a_dropping_ring_throws_the_oldest_out_and_counts_it() -> None:
    async def schedule(run: Run) -> None:
        run.pool.admission = AtMost(requests_per_engine=2)
        run.pool.feed(run.prompts, room=3, full="drop_oldest")
        async for _ in run.rounds():
            await asyncio.sleep(75)  # 7 groups of 10 s, one after the other
            batch = await run.pool.take(3)
            assert prompts_of(batch) == [4, 5, 6]
            await run.pool.park()
            await run.train(batch)

    outcome = simulate(schedule, ONE_ROUND, EXACT)
    assert outcome.totals.wasted_tokens == {"ready overflow": 80}
    assert outcome.totals.groups == {"trained": 3, "dropped": 4}


def test_parking_ends_what_feed_began_its_room_included() -> None:
    async def schedule(run: Run) -> None:
        run.pool.feed(run.prompts, room=1, full="drop_oldest")
        await run.pool.park()
        async for _ in run.rounds():
            groups = run.parked.pop(4)
            run.drop(run.parked.pop(len(run.parked)), "not needed")
            run.pool.launch(groups)
            await run.train(await run.pool.take(4))

    outcome = simulate(schedule, ONE_ROUND, change(EXACT, engines=change(EXACT.engines, slots=12)))
    assert outcome.totals.wasted_tokens.total() == 0 and len(outcome.trained) == 4


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_strict_frontier_serves_its_width_lowest_order_first(width: int) -> None:
    schedule = partial(rolloutpipe, groups_per_round=16, groups_per_step=4, admission=Frontier(groups=width))
    outcome = simulate(schedule, SETTINGS, SIM)
    widths = [len({id.prompt for id in serving}) for serving in in_service(outcome.events)]
    assert max(widths) == width
    first_service = list(dict.fromkeys(event.sample.prompt for event in outcome.of(RequestStarted)))
    assert first_service == sorted(first_service)


def test_an_engine_that_returns_while_nothing_is_served_is_given_work() -> None:
    """All engines are away when the groups are launched."""

    async def schedule(run: Run) -> None:
        async for _ in run.rounds():
            await asyncio.sleep(5)
            run.pool.launch(run.prompts(2))
            assert run.pool.num_requests == 0
            await run.train(await run.pool.take(2))

    outcome = simulate(schedule, ONE_ROUND, EXACT, beside=dying(Death(1.0, 0, 10.0)))
    assert [event.time_s for event in outcome.of(RequestStarted)] == [11] * 4


def test_an_engine_that_breaks_ends_the_run_with_its_own_error_and_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(RuntimeError):
        pass

    async def breaks(parts: RunComponents, run: Run) -> None:
        async def generate(sample: Sample) -> None:
            raise Broken("a defect of an engine")

        parts.engines[0].generate = generate  # type: ignore[method-assign]

    with caplog.at_level(logging.ERROR, logger="asyncio"), pytest.raises(Broken):
        simulate(partial(rolloutpipe, groups_per_round=16, groups_per_step=4), beside=breaks)
    assert caplog.records == []


def test_a_lie_about_staleness_is_an_error_on_the_first_stale_token() -> None:
    async def liar(run: Run) -> None:
        run.declare(staleness=0)
        async for _ in run.rounds():
            groups = run.parked.pop(16)
            run.pool.launch(groups + run.prompts(16 - len(groups)))
            batch = await run.pool.take(8)
            await run.pool.park()
            await run.train(batch)
            await run.publish()

    with pytest.raises(StalenessError, match="tokens 1 publications old and the schedule declared at most 0"):
        simulate(liar)


@pytest.mark.parametrize("synchronous", [False, True])
def test_synchronous_rewards_wait_until_no_request_is_served(synchronous: bool) -> None:
    """The baseline of RollPacker 4.3. Four groups of 3 on five slots, so that requests wait."""
    rewards = SimRewardSettings(workers=1000, median_s=1.0, sigma=0.0, synchronous=synchronous)
    engines = change(EXACT.engines, slots=5)
    settings = RunSettings(rounds=2, group_size=3)
    schedule = partial(SCHEDULES["serial"], groups_per_round=4, groups_per_step=4)
    outcome = simulate(schedule, settings, change(EXACT, engines=engines, rewards=rewards))
    ends = [event.time_s for event in outcome.of(RequestEnded)]
    scored = [event.time_s for event in outcome.of(SampleScored)]
    assert len(scored) == 24
    if synchronous:
        assert scored == [max(ends[:12]) + 1.0] * 12 + [max(ends) + 1.0] * 12
    else:
        assert scored == [end + 1.0 for end in ends]
