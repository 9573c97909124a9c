"""The versions of the weights that engines serve, and the version of each pinned sample.

A pinned sample ends on the version that it began with. Held-out samples are pinned under every schedule.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from tailrace.contracts.engine import Engine, with_version
from tailrace.errors import VersionGone
from tailrace.rollout.loads import EngineLoads
from tailrace.types import Group, Sample


class PinnedVersions:
    """The versions of each engine, by its number in the sequence, and where pinned samples go on or begin.

    Args:
        loads: of these engines.
        version: the published version, which all of them serve.
    """

    def __init__(self, engines: Sequence[Engine], loads: EngineLoads, version: int) -> None:
        self._engines, self._loads = engines, loads
        self.pinned = 0
        """An engine serves the last so many versions that it loaded, and every sample ends on the version
        that it began with. 0: samples go on with new weights."""
        self.kept = 1
        """An engine keeps the last so many versions at least, for held-out samples."""
        self.oldest_to_begin: Callable[[Group], float] = lambda group: inf
        """The oldest version on which pinned samples of a group may begin, if the newest has no slot."""
        self.batch = inf
        """Samples that may begin on an engine of an older version, of all since it loaded that."""
        self.num_begun = [0] * len(engines)
        """Samples for training that began on each engine since it loaded its newest version."""
        self.newest = version
        """The published version."""
        self.served: list[tuple[int, ...]] = [(version,) for _ in engines]
        """The versions that each engine serves, the oldest first."""

    @property
    def num_kept(self) -> int:
        """Versions that an engine goes on to serve when it loads others."""
        return max(self.kept, self.pinned)

    def has_room(self, sample: Sample, num_requests: int) -> bool:
        """Whether a sample may be served now. `num_requests`: how many the pool has sent."""
        if not self.pinned or sample.spans:
            return True
        on_the_way = max(0, num_requests - sum(self._loads.requests))
        room = self._room(self.serving(self.newest))
        return room > on_the_way or room + self._room(self._older(sample)) > on_the_way

    def pin(self, sample: Sample) -> list[int]:
        """Choose the version of a sample; return the engines that serve it. Empty: the sample waits for an
        engine that is open, and a held-out one for one of the newest version.

        Raises:
            VersionGone: no engine serves the version of its tokens any more.
        """
        version = self.newest if sample.pin is None or not sample.id.is_held_out else sample.pin
        version = sample.spans[0].version if sample.spans else version
        able = self.serving(version)
        if not able and (sample.spans or version != self.newest):
            raise VersionGone(f"no engine serves version {version} any more")
        if not sample.spans and not self._room(able):
            waits = self.pinned and sample.id.is_held_out and len(able) < self._loads.num_open
            able = [] if waits else self._older(sample) or able
        least = min(able, key=self._loads.shares.__getitem__, default=None)
        if least is None or self._loads.shares[least] == inf:
            return []
        sample.pin = version if version in self.served[least] else self.served[least][-1]
        sample.group.begun(sample.pin)
        return [number for number in able if sample.pin in self.served[number]]

    def make_room(self, number: int, version: int) -> tuple[int, ...]:
        """Return the versions that an engine goes on to serve while it loads another one and after that."""
        self.served[number] = kept = (*self.served[number], version)[-self.num_kept : -1]
        return kept

    def loaded(self, number: int, version: int) -> None:
        """Note that an engine has loaded a version, or will before it opens."""
        before = self.served[number] if self._engines[number].state == "open" else ()
        self.served[number] = with_version(before, version, self.num_kept)
        self.num_begun[number] = 0

    def refused(self, number: int, version: int | None) -> None:
        """Note that an engine does not serve a version: it knows better."""
        self.served[number] = tuple(each for each in self.served[number] if each != version)

    def restarted(self, number: int) -> None:
        """Note that an engine may have started again, with the newest of its versions alone."""
        self.served[number] = self.served[number][-1:]

    def serving(self, version: int) -> list[int]:
        """The numbers of the engines that serve a version."""
        return [number for number, versions in enumerate(self.served) if version in versions]

    def _older(self, sample: Sample) -> list[int]:
        """The engines of older versions on which a sample may begin; none while an engine loads."""
        is_open = [n for n, share in enumerate(self._loads.shares) if share < inf]
        if not all(self.served[n] for n in is_open):
            return []
        oldest = self.oldest_to_begin(sample.group)
        older = [n for n in is_open if self.newest not in self.served[n] and self.served[n][-1] >= oldest]
        return [n for n in older if self._num_free(n) and self.num_begun[n] < self.batch]

    def _room(self, numbers: Iterable[int]) -> int:
        return sum(map(self._num_free, numbers))

    def _num_free(self, number: int) -> int:
        """The slots of an engine that are free, and for which its KV cache has room; 0 if it is not open."""
        if self._loads.shares[number] == inf:
            return 0
        engine = self._engines[number]
        return max(0, engine.usage().num_fitting(engine.slots) - self._loads.requests[number])
