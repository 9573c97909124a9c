"""The partial-rollout buffer: parked groups, first in, first out (APRIL 2.2; RollPacker 3: long-prompt
queue).

It belongs to the run, so checkpoints save it.
"""

from collections.abc import Iterable

from tailrace.types import Group


class PartialRolloutBuffer:
    """Groups that were stopped and will continue."""

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups = list(groups)

    def __len__(self) -> int:
        return len(self.groups)

    def put(self, groups: Iterable[Group]) -> None:
        self.groups.extend(groups)

    def pop(self, n: int) -> list[Group]:
        """The first n groups, or all if there are fewer."""
        taken, self.groups = self.groups[:n], self.groups[n:]
        return taken
