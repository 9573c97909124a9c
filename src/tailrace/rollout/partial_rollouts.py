"""PartialRolloutBuffer: parked groups, first in, first out. It belongs to the run, not to the schedule, so a checkpoint
saves it."""

from collections.abc import Iterable

from tailrace.types import Group


class PartialRolloutBuffer:
    """Groups that were stopped and will go on."""

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups = list(groups)

    def __len__(self) -> int:
        return len(self.groups)

    def put(self, groups: Iterable[Group]) -> None:
        self.groups.extend(groups)

    def pop(self, n: int) -> list[Group]:
        """The first n; fewer if there are fewer."""
        taken, self.groups = self.groups[:n], self.groups[n:]
        return taken
