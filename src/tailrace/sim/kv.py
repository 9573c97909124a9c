"""The KV cache of aborted requests, which an engine keeps while no running request needs the room."""

from tailrace.types import Sample


class Suspended:
    """Positions of the cache by the aborted sample that they belong to, the oldest first."""

    def __init__(self) -> None:
        self._positions: dict[Sample, int] = {}
        self._total = 0

    def keep(self, sample: Sample, positions: int) -> None:
        self._positions[sample] = positions
        self._total += positions

    def forget(self, sample: Sample) -> int:
        """Return the positions that were kept of a sample, which are no longer counted here."""
        kept = self._positions.pop(sample, 0)
        self._total -= kept
        return kept

    def shrink(self, room: int) -> None:
        """Forget the oldest samples until the others fit into so many positions."""
        while self._positions and self._total > room:
            self.forget(next(iter(self._positions)))

    def clear(self) -> None:
        self._positions.clear()
        self._total = 0
