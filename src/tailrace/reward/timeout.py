"""The adaptive time limit of test cases (RollPacker 4.3), live and in virtual time."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from tailrace import clock
from tailrace.reward.base import TimeoutSettings
from tailrace.types import Sample


class TimeLimit:
    """The time limit of a test case, in seconds. While the test case runs it may be lowered."""

    def __init__(self, seconds: float) -> None:
        self.seconds = self._most_s = seconds
        self._start_s = 0.0
        self._running: asyncio.Timeout | None = None

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """End what runs inside in time. The time counts from here.

        Raises:
            TimeoutError: it has not ended in time.
        """
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
    """The longest test case of the correct responses to each prompt, in seconds.

    A prompt is known by its row of the data, or by its index where the data has no epochs.
    """

    def __init__(self) -> None:
        self.longest_s: dict[int, float] = {}
        self._running: defaultdict[int, list[tuple[TimeLimit, TimeoutSettings]]] = defaultdict(list)

    def restore(self, longest_s: Mapping[int, float]) -> None:
        """Return to an earlier state."""
        self.longest_s = dict(longest_s)

    def limit_s(self, sample: Sample, settings: TimeoutSettings) -> float:
        """Return the time limit of the test cases of a response."""
        anchor_s = None if _is_evaluation(sample) else self.longest_s.get(_key(sample))
        if anchor_s is None or not settings.adaptive:
            return settings.max_s
        return min(max(settings.min_s, settings.factor * anchor_s), settings.max_s)

    @contextmanager
    def limit(self, sample: Sample, settings: TimeoutSettings) -> Iterator[TimeLimit]:
        """Yield the time limit of a test case that runs inside. Correct responses that end meanwhile lower
        it."""
        limit = TimeLimit(self.limit_s(sample, settings))
        if _is_evaluation(sample):
            yield limit
            return
        key, entry = _key(sample), (limit, settings)
        self._running[key].append(entry)
        try:
            yield limit
        finally:
            self._running[key].remove(entry)
            if not self._running[key]:
                del self._running[key]

    def observe(self, sample: Sample, longest_s: float) -> None:
        """Record a correct response.

        Args:
            longest_s: its longest test case, in seconds.
        """
        if not _is_evaluation(sample):
            key = _key(sample)
            self.longest_s[key] = max(longest_s, self.longest_s.get(key, 0.0))
            for limit, settings in self._running.get(key, ()):
                limit.change(self.limit_s(sample, settings))


def _key(sample: Sample) -> int:
    row = sample.prompt.row_number
    return sample.prompt.index if row is None else row


def _is_evaluation(sample: Sample) -> bool:
    """Rows of the evaluation set have numbers of their own."""
    return sample.id.prompt < 0
