"""A race of groups: the first ones win, and all others stop (RollPacker 3)."""

from collections.abc import Collection
from dataclasses import dataclass

from tailrace.types import Group


@dataclass(slots=True)
class Race:
    """A race that goes on until `num_places` more groups have won it."""

    num_places: int
    scored: bool
    """Whether a group wins when it is complete; else it wins when all required samples are generated."""

    def losers(self, in_flight: Collection[Group], num_ready: int) -> list[Group]:
        """The groups in flight that have not won; none while a place is left. `num_ready`: complete groups
        that no take has got."""
        losers = [group for group in in_flight if self.scored or not group.serving_complete]
        return losers if num_ready + len(in_flight) - len(losers) >= self.num_places else []
