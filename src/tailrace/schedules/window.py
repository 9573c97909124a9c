"""Window: a selection that keeps a bound on staleness, and the body of the schedules that fill their pool up
after each step.

No group is dropped and no token is generated twice: the trainer waits for the groups that are due. At most
`in_flight` groups are alive, and U groups are trained between two publications. A group whose oldest token is
of version b must be trained before version b + bound + 1 is published. A group is due within k if at most k
publications remain for it.

The selection keeps this invariant: before every step and for every k, at most (k + 1) U groups alive are due
within k. It holds at the start if in_flight <= (bound + 1) U. A group is handed out only if the invariant
holds afterwards, and new groups are due last, so it always holds. For k = 0 it is the bound. (It is not
enough to wait only for the groups that are due now: more than U can become due together.)
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice

from tailrace.controller.run import Run
from tailrace.schedules.parameters import require
from tailrace.types import Group, Stale


async def in_flight(
    run: Run,
    groups_per_step: int,
    groups_in_flight: int,
    staleness: int,
    *,
    stale: Stale = "wait",
    pinned: int = 0,
    max_cuts: int = 0,
    publish: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Accumulate groups as they complete, step, publish, and fill the pool up again.

    Args:
        groups_per_step, groups_in_flight, staleness: of `Window`.
        stale: "mask": groups are trained in the order of their completion, and any number may be in flight.
        pinned: as in `Run.declare`.
        max_cuts: with "verify", of `VerifiedWindow`.
        publish: what follows a step. None: `run.publish` to every engine.
    """
    run.declare(staleness=staleness, stale=stale, pinned=pinned)
    stream: Callable[[], AsyncIterator[list[Group]]] = partial(run.pool.stream, groups_per_step)
    if stale == "wait":
        stream = Window(run, groups_per_step, groups_in_flight, staleness).stream
    if stale == "verify":
        select = VerifiedWindow(run, groups_per_step, max_cuts, groups_in_flight).select
        stream = partial(run.pool.stream, groups_per_step, select)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(groups_in_flight - len(run.pool)))
        async for groups in stream():
            await run.accumulate(groups)
        await run.step()
        await (publish or run.publish)()


class Window:
    """The groups that completed first and leave enough places for the groups that are due.

    Args:
        groups_per_step: groups trained between two publications (U).
        in_flight: groups alive at the same time.
        bound: staleness of a trained token, in publications.
    """

    def __init__(self, run: Run, groups_per_step: int, in_flight: int, bound: int) -> None:
        most = (bound + 1) * groups_per_step
        problem = f"{in_flight} groups in flight cannot be trained in {bound + 1} steps of {groups_per_step}"
        require(in_flight <= most, "staleness", bound, problem, f"raise it, or keep at most {most} in flight")
        self._run, self._groups_per_step, self._bound = run, groups_per_step, bound
        self._places = groups_per_step  # of the step under way that no group has yet

    def stream(self) -> AsyncIterator[list[Group]]:
        """The groups of a step, as they become complete."""
        self._places = self._groups_per_step
        return self._run.pool.stream(self._groups_per_step, self.select)

    @property
    def room(self) -> int:
        """The groups that may be launched beside those in the pool."""
        return self._bound * self._groups_per_step + self._places - len(self._run.pool)

    def oldest(self, group: Group) -> int:
        """The oldest version on which a sample of a group may begin, so that all groups still find places."""
        run, U, bound = self._run, self._groups_per_step, self._bound
        before, counts = bound - run.staleness(group), enumerate(due_counts(run, bound))
        full = [k for k, n in counts if k < before and n >= k * U + self._places]
        return run.version - bound + max(full, default=-1) + 1

    def select(self, ready: Collection[Group], wanted: int) -> list[Group]:
        run, bound = self._run, self._bound
        due_within = due_counts(run, bound)
        chosen: list[Group] = []
        queues = [iter(groups.items()) for groups in run.pool.ready.by_version.values()]
        heads = [(number, group, queue) for queue in queues for group, number in islice(queue, 1)]
        heapify(heads)
        while heads and len(chosen) < wanted:
            _, group, queue = heappop(heads)
            due = bound - run.staleness(group)
            room = wanted - len(chosen) - 1
            after = [n - (k >= due) for k, n in enumerate(due_within)]
            # If one group is refused, those of its version are, too: to hand out others leaves no more room.
            if all(n <= k * self._groups_per_step + room for k, n in enumerate(after)):
                chosen.append(group)
                due_within = after
                for group, number in islice(queue, 1):
                    heappush(heads, (number, group, queue))
        self._places = wanted - len(chosen)
        return chosen


class VerifiedWindow:
    """A window for groups that are verified, by cuts in place of staleness: a group that versions have cut
    c times must be trained before it is cut more than `max_cuts` times, and each publication may cut it once.
    Else a long response could be cut for ever. `alive`, named `key`: groups in the pool.
    """

    def __init__(
        self, run: Run, groups_per_step: int, max_cuts: int, alive: int, key: str = "groups_in_flight"
    ) -> None:
        most = (max_cuts + 1) * groups_per_step
        problem = f"groups of which {groups_per_step} are trained in a step may be cut verify_max_cuts times"
        require(alive <= most, key, alive, problem, f"raise that, or keep at most {most} in flight")
        self._run, self._groups_per_step, self._max_cuts = run, groups_per_step, max_cuts

    def due(self, group: Group) -> int:
        """Publications before which a group must be trained. One that awaits a verification may be cut."""
        run = self._run
        awaits = run.staleness(group) > (run.declared or 0) and group.last_cut != run.version
        return max(0, self._max_cuts - group.cuts - awaits)

    def select(self, ready: Collection[Group], wanted: int) -> list[Group]:
        count = [0] * (self._max_cuts + 1)
        for group in self._run.pool.groups:
            count[min(self.due(group), self._max_cuts)] += 1
        due_within = list(accumulate(count))[:-1]
        chosen: list[Group] = []
        for group in ready:
            room, due = wanted - len(chosen) - 1, self.due(group)
            before = enumerate(due_within[:due])  # one that is due is never refused: all might wait for ever
            if room >= 0 and all(n <= k * self._groups_per_step + room for k, n in before):
                chosen.append(group)
                due_within = [n - (k >= due) for k, n in enumerate(due_within)]
        return chosen


def due_counts(run: Run, bound: int) -> list[int]:
    """The number of groups in the pool that are due within k publications, for each k below the bound."""
    ages, count = run.pool.ages, [0] * (bound + 1)
    count[max(0, bound - 1)] += len(ages.may_start_older)
    for version, num_groups in ages.by_version.items():
        count[max(0, bound - run.version + version)] += num_groups
    return list(accumulate(count))[:-1]
