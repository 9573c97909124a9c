"""The adaptive time limit of test cases (RollPacker 4.3), live and in virtual time."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import zip_longest

from tailrace import clock
from tailrace.contracts.reward import TimeoutSettings
from tailrace.types import Sample


class TimeLimit:
    """The time limit of a test case, in seconds. While the test case runs it may be lowered."""

    def __init__(self, seconds: float) -> None:
        self.seconds = self._most_s = seconds
        self._start_s = 0.0
        self._running: asyncio.Timeout | None = None

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Bound the time of the block, from here. Raises a TimeoutError if it has not ended in time."""
        self._start_s = clock.now()
        async with asyncio.timeout(self.seconds) as self._running:
            try:
                yield
            finally:
                self._running = None

    def change(self, seconds: float) -> None:
        """Set another limit, at most the first one."""
        self.seconds = min(seconds, self._most_s)
        if self._running and not self._running.expired():  # it cannot be changed once it has expired
            self._running.reschedule(self._start_s + self.seconds)


class Anchors:
    """The longest run of each test case among the correct responses to each prompt, in seconds.

    A prompt is known by its row of the data, or by its index where the data has no epochs; a test case by its
    place among those of the prompt.
    """

    def __init__(self) -> None:
        self.longest_s: dict[int, list[float]] = {}
        self._running: defaultdict[tuple[int, int], list[tuple[TimeLimit, TimeoutSettings]]] = defaultdict(
            list
        )

    def restore(self, longest_s: Mapping[int, list[float]]) -> None:
        """Return to an earlier state."""
        self.longest_s = dict(longest_s)

    def limit_s(
        self, sample: Sample, case: int, settings: TimeoutSettings, reference_s: float | None = None
    ) -> float:
        """Return the time limit of a test case of a response: min(max(T_min, lambda T_anchor), T_max).
        `reference_s`: the anchor of the row; None: it is learnt."""
        # Rows of the evaluation set have numbers of their own.
        anchors_s = [] if sample.id.is_held_out else self.longest_s.get(_key(sample), [])
        anchor_s = next(iter(anchors_s[case : case + 1]), None) if reference_s is None else reference_s
        if anchor_s is None or not settings.adaptive:
            return settings.max_s
        return min(max(settings.min_s, settings.factor * anchor_s), settings.max_s)

    @contextmanager
    def limit(
        self, sample: Sample, case: int, settings: TimeoutSettings, reference_s: float | None = None
    ) -> Iterator[TimeLimit]:
        """Yield the time limit of a test case that runs inside. Correct responses meanwhile lower it, unless
        the row has a reference time."""
        limit = TimeLimit(self.limit_s(sample, case, settings, reference_s))
        if sample.id.is_held_out or reference_s is not None:
            yield limit
            return
        key, entry = (_key(sample), case), (limit, settings)
        self._running[key].append(entry)
        try:
            yield limit
        finally:
            self._running[key].remove(entry)
            if not self._running[key]:
                del self._running[key]

    def observe(self, sample: Sample, seconds: Sequence[float]) -> None:
        """Record a correct response. `seconds`: of each of its test cases."""
        if sample.id.is_held_out:
            return
        key = _key(sample)
        known_s = self.longest_s.get(key, [])
        self.longest_s[key] = [max(pair) for pair in zip_longest(seconds, known_s, fillvalue=0.0)]
        for case in range(len(seconds)):
            for limit, settings in self._running.get((key, case), ()):
                limit.change(self.limit_s(sample, case, settings))


def _key(sample: Sample) -> int:
    row = sample.prompt.row_number
    return sample.prompt.index if row is None else row
