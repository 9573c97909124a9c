"""Window: a selection that keeps a bound on staleness by structure. For schedules, not one itself.

Nothing is dropped and nothing regenerated: the trainer waits for what is due. At most `in_flight` groups
live at once, U are trained between two publications, and a group born at version b must be trained before
version b + bound is over. A group is due within k if that is at most k publications away.

Before every step and for every k, at most (k + 1) U living groups may be due within k; a group is handed out
only if that stays true afterwards. It is true at the start if in_flight <= (bound + 1) U, and new groups are
due last: so it is always true, and at k = 0 it is the bound. (To wait only for groups that are due now is not
enough: more than U can fall due together.)
"""

from collections.abc import Collection
from itertools import accumulate

from tailrace.rollout.selection import Select
from tailrace.controller.run import Run
from tailrace.schedules.parameters import require
from tailrace.types import Group


def window(run: Run, U: int, in_flight: int, bound: int) -> Select:
    """The earliest groups that leave room for those that are due."""
    most = (bound + 1) * U
    problem = (
        f"{in_flight} groups in flight cannot all be trained, {U} at a time, within {bound} publications"
    )
    require(in_flight <= most, "staleness", bound, problem, f"raise it, or keep at most {most} in flight")

    def due(group: Group) -> int:
        return bound - run.staleness(group)

    def select(ready: Collection[Group], wanted: int) -> list[Group]:
        count = [0] * (bound + 1)
        for group in run.pool.living:
            count[max(0, due(group))] += 1
        due_within = list(accumulate(count))
        chosen: list[Group] = []
        for group in ready:
            room = wanted - len(chosen) - 1
            after = [n - (k >= due(group)) for k, n in enumerate(due_within)]
            if room >= 0 and all(n <= k * U + room for k, n in enumerate(after[:-1])):
                chosen.append(group)
                due_within = after
        return chosen

    return select
