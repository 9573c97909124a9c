"""A host that engines, trainer and judge share: each may slow the others down while it works."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from tailrace.clock import now
from tailrace.sim.settings import SimHostSettings

Part = Literal["engine", "trainer", "judge"]


class Host:
    """The parts that work at present, and how much they slow each other down."""

    def __init__(self, settings: SimHostSettings) -> None:
        self._settings = settings
        self._working: Counter[Part] = Counter()
        self._waiting: set[asyncio.Future[None]] = set()  # of trainer and judges: done when something changes
        self.listeners: list[Callable[[], None]] = []
        """Called when one of the three begins to work or ends."""

    def begin(self, part: Part) -> None:
        self._working[part] += 1
        if self._working[part] == 1:
            self._notify()

    def end(self, part: Part) -> None:
        self._working[part] -= 1
        if not self._working[part]:
            self._notify()

    @contextmanager
    def working(self, part: Part) -> Iterator[None]:
        self.begin(part)
        try:
            yield
        finally:
            self.end(part)

    @property
    def engine_slowdown(self) -> float:
        """Factor on the time of a decode step."""
        settings = self._settings
        by_trainer = settings.engine_slowdown if self._working["trainer"] else 1.0
        return by_trainer * (settings.judge_slowdown if self._working["judge"] else 1.0)

    async def work(self, part: Literal["trainer", "judge"], seconds: float) -> float:
        """Do work that takes some seconds while no engine decodes, and return the seconds that it took."""
        begin_s, settings = now(), self._settings
        beside_engine = settings.trainer_slowdown if part == "trainer" else settings.judged_slowdown
        with self.working(part):
            while seconds > 0:
                slowdown = beside_engine if self._working["engine"] else 1.0
                start_s, change = now(), asyncio.get_running_loop().create_future()
                self._waiting.add(change)
                done, _ = await asyncio.wait({change}, timeout=seconds * slowdown)
                self._waiting.discard(change)
                seconds = seconds - (now() - start_s) / slowdown if done else 0.0
        return now() - begin_s

    def _notify(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)
        for listener in self.listeners:
            listener()
