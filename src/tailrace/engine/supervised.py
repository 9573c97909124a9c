"""An engine that outlives its processes: restarted when it dies, it continues with the newest weights.

    open -- died --> dead -- pause, start, newest weights --> open
    open -- sleep --> asleep -- wake, newest weights --> open

The requests of a dead engine are evicted with their tokens; the router gives them to another engine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from tailrace.clock import now, waiting
from tailrace.engine.base import Capabilities, EngineState, Usage
from tailrace.engine.counter import TokenCounter
from tailrace.errors import EngineDied, EnginesLost, Evicted, TailraceError
from tailrace.types import KV, Sample
from tailrace.weights.base import Weights

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses before restarts: the first, doubled each time up to the longest."""
WELL_S = 300.0
"""An engine that lived this long is restarted after the first pause again."""


class EngineLife(Protocol):
    """One life of an engine: a process, or a connection to a server. Raises EngineDied once it has ended."""

    capabilities: Capabilities
    counter: TokenCounter
    """Counts the tokens that samples gain; the owner sets it."""

    async def ready(self) -> None:
        """Wait until it can serve.

        Raises:
            TailraceError: it cannot.
        """

    async def generate(self, sample: Sample) -> None:
        """As Engine.generate."""

    async def load(self, weights: Weights, *, kv: KV) -> None:
        """As Engine.load."""

    async def sleep(self) -> None:
        """As Engine.sleep, when nothing runs."""

    async def wake(self) -> None:
        """The reverse."""

    def usage(self) -> Usage:
        """As Engine.usage, since the start of this life."""

    async def died(self) -> str:
        """Wait until it has ended or does not answer any more, and return how, in words."""

    async def close(self) -> None:
        """End it, or leave the server."""


class SupervisedEngine:
    """An `Engine` (engine/base.py) over a sequence of lives.

    Args:
        start: begins a life.
        counter: counts the tokens of all lives.
    """

    def __init__(
        self, name: str, slots: int, start: Callable[[], Awaitable[EngineLife]], counter: TokenCounter
    ) -> None:
        self.name, self.slots = name, slots
        self.capabilities = Capabilities()
        self.state: EngineState = "dead"
        self.on_state: Callable[[str], None] = lambda why: None
        self.why_dead = "it has not started"
        self._start, self._counter = start, counter
        self._life: EngineLife | None = None
        self._newest: Weights | None = None
        self._ended = Usage(num_counted=0)
        """Counters of the lives that ended."""

    async def open(self) -> None:
        """Begin the first life.

        Raises:
            TailraceError: the engine cannot start.
        """
        self._life = await self._begin()
        self.capabilities = self._life.capabilities
        self._set("open", "it has started")

    async def keep(self) -> None:
        """Restart the engine whenever it dies, until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = now()
            assert self._life is not None
            self.why_dead = await self._life.died()
            self._end_life()
            self._set("dead", self.why_dead)
            if now() - began_s > WELL_S:
                pause_s = FIRST_PAUSE_S
            while self.state == "dead":
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                try:
                    life = await self._begin()
                    await self._bring_up_to_date(life)
                except TailraceError as error:
                    self.why_dead = str(error)
                else:
                    self._life = life
                    self._set("open", "it was restarted")

    async def generate(self, sample: Sample) -> None:
        """As Engine.generate."""
        if self.state != "open" or self._life is None:
            raise Evicted(f"{self.name} is {self.state}")
        await self._life.generate(sample)

    async def load(self, weights: Weights, *, kv: KV) -> None:
        """As Engine.load."""
        self._newest = weights
        if self.state == "open" and self._life is not None:
            try:
                await self._life.load(weights, kv=kv)
            except EngineDied:
                return  # the next life loads them

    async def sleep(self) -> None:
        """As Engine.sleep."""
        if self._life is not None and self.state == "open":
            self._set("asleep", "its device is lent")
            await self._life.sleep()

    async def wake(self) -> None:
        """As Engine.wake."""
        if self._life is not None and self.state == "asleep":
            await self._life.wake()
            await self._bring_up_to_date(self._life)
            self._set("open", "its device is back")

    def usage(self) -> Usage:
        """As Engine.usage, over all lives."""
        usage = self._ended + self._life.usage() if self._life else self._ended
        return replace(usage, num_generated=self._counter.num)

    async def close(self) -> None:
        """End the life."""
        if self._life is not None:
            await self._life.close()

    def _set(self, state: EngineState, why: str) -> None:
        self.state = state
        self.on_state(why)

    def _end_life(self) -> None:
        """Keep the counters of the life that has ended. What it generated and did not report is unknown."""
        assert self._life is not None
        self._ended = replace(
            self._ended + self._life.usage(),
            num_running=0,
            num_waiting=0,
            kv_tokens=0,
            num_counted=self._counter.num,
        )
        self._life = None

    async def _begin(self) -> EngineLife:
        life = await self._start()
        life.counter = self._counter
        try:
            with waiting(f"{self.name} to start"):
                await life.ready()
        except BaseException:
            await life.close()
            raise
        return life

    async def _bring_up_to_date(self, life: EngineLife) -> None:
        """Load the newest weights, and those that are published meanwhile."""
        loaded: Weights | None = None
        while self._newest is not None and loaded is not self._newest:
            loaded = self._newest
            await life.load(loaded, kv="recompute")


async def watch_engines(engines: Sequence[SupervisedEngine], give_up_s: float, every_s: float = 1.0) -> None:
    """Keep all engines, until cancelled.

    Raises:
        EnginesLost: all were dead for `give_up_s` seconds.
    """
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(engine.keep())
        alive_s = now()
        while True:
            await asyncio.sleep(every_s)
            if any(engine.state != "dead" for engine in engines):
                alive_s = now()
            elif now() - alive_s > give_up_s:
                causes = "; ".join(f"{engine.name}: {engine.why_dead}" for engine in engines)
                raise EnginesLost(f"all engines are dead for {give_up_s:g} s (engine.give_up_s). {causes}")
