"""Window: a selection that keeps a bound on staleness. It is used by schedules.

No group is dropped and no token is generated twice: the trainer waits for the groups that are due. At most
`in_flight` groups are alive, and U groups are trained between two publications. A group whose oldest token is
of version b must be trained before version b + bound + 1 is published. A group is due within k if at most k
publications remain for it.

The selection keeps this invariant: before every step and for every k, at most (k + 1) U groups alive are due
within k. It holds at the start if in_flight <= (bound + 1) U. A group is handed out only if the invariant
holds afterwards, and new groups are due last, so it always holds. For k = 0 it is the bound. (It is not
enough to wait only for the groups that are due now: more than U can become due together.)
"""

from collections.abc import Collection
from itertools import accumulate

from tailrace.controller.run import Run
from tailrace.rollout.selection import Select
from tailrace.schedules.parameters import require
from tailrace.types import Group


def window(run: Run, groups_per_step: int, in_flight: int, bound: int) -> Select:
    """The groups that completed first and leave enough places for the groups that are due.

    Args:
        groups_per_step: groups trained between two publications (U).
        in_flight: groups alive at the same time.
        bound: staleness of a trained token, in publications.
    """
    most = (bound + 1) * groups_per_step
    problem = f"{in_flight} groups in flight cannot be trained in {bound + 1} steps of {groups_per_step}"
    require(in_flight <= most, "staleness", bound, problem, f"raise it, or keep at most {most} in flight")

    def due(group: Group) -> int:
        return bound - run.staleness(group)

    def select(ready: Collection[Group], wanted: int) -> list[Group]:
        count = [0] * (bound + 1)
        for group in run.pool.groups:
            count[max(0, due(group))] += 1
        due_within = list(accumulate(count))
        chosen: list[Group] = []
        for group in ready:
            room = wanted - len(chosen) - 1
            after = [n - (k >= due(group)) for k, n in enumerate(due_within)]
            if room >= 0 and all(n <= k * groups_per_step + room for k, n in enumerate(after[:-1])):
                chosen.append(group)
                due_within = after
        return chosen

    return select
