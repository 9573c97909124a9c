"""The window counts groups as they change, and chooses as if it looked at all of them."""

from collections.abc import Collection
from functools import partial
from itertools import accumulate

import pytest

from helpers.virtual import SETTINGS, SIM, ZERO_VARIANCE, change, simulate
from tailrace.controller.run import Run
from tailrace.rollout.admission import Select
from tailrace.schedules.dora import dora
from tailrace.schedules.window import Window, due_counts
from tailrace.types import Group

U = 4
SLOW_LOADS = change(SIM, engines=change(SIM.engines, slots=9, load_s=60.0))
"""Groups wait for a slot, without tokens, while the weights arrive."""


def counted(run: Run, bound: int) -> list[int]:
    count = [0] * (bound + 1)
    for group in run.pool.groups:
        count[max(0, bound - run.staleness(group))] += 1
    return list(accumulate(count))[:-1]


def exhaustive(run: Run, bound: int, ready: Collection[Group], wanted: int) -> list[Group]:
    """The invariant of the window, checked for every ready group."""
    due_within, chosen = counted(run, bound), list[Group]()
    for group in ready:
        room = wanted - len(chosen) - 1
        after = [n - (k >= bound - run.staleness(group)) for k, n in enumerate(due_within)]
        if room >= 0 and all(n <= k * U + room for k, n in enumerate(after)):
            chosen.append(group)
            due_within = after
    return chosen


@pytest.mark.parametrize("bound", [1, 3])
def test_the_choice_and_the_counts_are_those_of_looking_at_every_group(bound: int) -> None:
    counts: set[tuple[int, ...]] = set()
    held_over: list[int] = []

    def checked(run: Run, select: Select) -> Select:
        def choose(ready: Collection[Group], wanted: int) -> list[Group]:
            counts.add(tuple(due_counts(run, bound)))
            assert due_counts(run, bound) == counted(run, bound)
            held_over.append(len(run.pool.ages.may_start_older))
            chosen = select(ready, wanted)
            assert chosen == exhaustive(run, bound, ready, wanted)
            return chosen

        return choose

    async def schedule(run: Run) -> None:
        run.declare(staleness=bound)
        in_flight = (bound + 1) * U
        select = checked(run, Window(run, U, in_flight, bound).select)
        async for number in run.rounds():
            run.pool.launch(run.parked.pop(len(run.parked)))
            run.pool.launch(run.prompts(in_flight - len(run.pool)))
            async for groups in run.pool.stream(U, select):
                await run.accumulate(groups)
            await run.step()
            if number == 2:
                await run.pool.park()
            await run.publish()

    simulate(schedule, change(SETTINGS, rounds=6), SLOW_LOADS, algorithm=ZERO_VARIANCE)
    assert len(counts) > 4 and len(set(held_over)) > 1


@pytest.mark.parametrize("bound", [1, 3])
def test_the_oldest_version_to_begin_on_is_that_of_trying_each_version(
    bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that begins on an older version makes its group due earlier. From then on until the group was
    due before there must be a place left."""
    ages, oldest = set[int](), Window.oldest

    def checked(window: Window, group: Group) -> int:
        run, found = window._run, oldest(window, group)
        left = [k * U + window._places - n for k, n in enumerate(counted(run, bound))]
        before = bound - run.staleness(group)
        versions = range(run.version - bound, run.version + 1)
        allowed = [v for v in versions if all(left[k] > 0 for k in range(bound - run.version + v, before))]
        assert allowed == [*range(found, run.version + 1)]
        ages.add(run.version - found)
        return found

    monkeypatch.setattr(Window, "oldest", checked)
    one_engine = change(SLOW_LOADS, engines=change(SLOW_LOADS.engines, count=1, slots=30))
    schedule = partial(dora, groups_per_step=U, groups_in_flight=6, staleness=bound)
    simulate(schedule, change(SETTINGS, rounds=6), one_engine)
    assert ages == {*range(bound + 1)}
