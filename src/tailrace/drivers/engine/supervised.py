"""An engine that outlives its processes: restarted when it dies, it continues with the newest weights.

    open -- died, hung, weights refused --> dead -- pause, start, newest weights --> open
    open -- sleep --> asleep -- wake, newest weights --> open

The requests of an engine that is dead or asleep are evicted with their tokens; the router gives them to
another engine. An engine that dies asleep is restarted when it is woken.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from typing_extensions import override

from tailrace.clock import Signal, ended, now, waiting
from tailrace.contracts.engine import (
    Arrival,
    Capabilities,
    Engine,
    EngineProcess,
    EngineState,
    TokenCounter,
    Usage,
)
from tailrace.contracts.weights import Weights
from tailrace.errors import EngineDied, EnginesLost, Evicted, NotArrived, TailraceError, TransferFailed
from tailrace.types import KV, Sample

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses before restarts: the first, doubled each time up to the longest."""
WELL_S = 60.0
"""An engine that lived this long is restarted after the first pause again."""
TRANSFERS, TRANSFER_PAUSE_S = 3, 1.0
"""Attempts to load weights before the engine counts as dead, and the pause between two of them."""


class SupervisedEngine(Engine):
    """An engine over a sequence of processes.

    Args:
        start: begins a process.
        counter: counts the tokens of all processes.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        start: Callable[[], Awaitable[EngineProcess]],
        counter: TokenCounter,
        versions: int = 1,
    ) -> None:
        self.name, self.slots, self.width, self.versions = name, slots, 1, versions
        self._slots_of_one = slots
        self.capabilities = Capabilities()
        self.state: EngineState = "dead"
        self.on_state: Callable[[str], None] = lambda why: None
        self.on_arrival: Callable[[Arrival], None] = lambda arrival: None
        self.why_dead = "it has not started"
        self._start, self._counter = start, counter
        self._process: EngineProcess | None = None
        self._end: asyncio.Future[str]
        """Why the present process is over, once that is known."""
        self._changed = Signal()
        """Set when a process was ended, weights were loaded, the state changed, or the device is back."""
        self._calls: dict[asyncio.Future[None], None] = {}
        """Requests of the present process."""
        self._newest: Weights | None = None
        self._num_asked = self._num_loaded = 0
        """Calls of `load`, and those whose weights, or newer ones, the present process has."""
        self._asleep = False
        """Whether it was put to sleep and not woken."""
        self._ended = Usage(num_counted=0)
        """Counters of the processes that ended."""

    async def open(self) -> None:
        """Begin the first process. Raises TailraceError if the engine cannot start."""
        self._adopt(await self._begin(), "it has started")

    async def keep(self, restart_timeout_s: float) -> None:
        """Restart the engine whenever it dies, until cancelled. A restart that takes longer than
        `restart_timeout_s` is given up and begun again."""
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = now()
            await self._end_of_life()
            if now() - began_s >= WELL_S:
                pause_s = FIRST_PAUSE_S
            while self._process is None:
                while self._asleep:
                    await self._changed.wait(f"the device of {self.name}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                await self._restart(restart_timeout_s)

    @override
    async def generate(self, sample: Sample) -> None:
        number = self._num_asked  # the request is for these weights, also if their first transfer fails
        while self._num_loaded < number and self.state == "open":
            await self._changed.wait(f"{self.name} to load its newest weights")
        process = self._process
        if process is None or self.state != "open":
            raise Evicted(f"{self.name} is {self.state}")
        # A task of its own can be cancelled without the caller.
        self._calls[call := asyncio.ensure_future(process.generate(sample))] = None
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            await _cancelled([call])
            raise
        finally:
            del self._calls[call]
        if call.cancelled():
            raise Evicted(f"{self.name} is {self.state}")
        try:
            call.result()
        except EngineDied as died:
            self._doom(process, str(died))
            raise

    @override
    async def load(self, weights: Weights, *, kv: KV) -> None:
        """A transfer that fails is repeated; after TRANSFERS failures the engine is dead.

        A request that follows the call gets no token of older weights. When the call returns, no request of
        this engine gains one any more.
        """
        self._newest = weights
        self._num_asked += 1
        process = self._process
        if process is None:
            return
        if self.state == "open":
            try:
                await self._send_newest(process, kv)
            except (EngineDied, TransferFailed) as error:
                self._doom(process, str(error))
            except BaseException:  # nobody sends them again: requests go on with what is there
                self._num_loaded = self._num_asked
                self._changed.fire()
                raise
        while self._process is process and self._end.done():
            await self._changed.wait(f"{self.name} to end")

    @override
    async def sleep(self) -> None:
        if self._asleep:
            return
        self._asleep = True
        self._set("asleep", "its device is lent")
        await self._evict()
        process = self._process
        if process is not None and not self._end.done():
            try:
                await process.sleep()
            except EngineDied as died:
                self._doom(process, str(died))

    @override
    async def wake(self) -> None:
        """An engine that died is only started; it opens when it can."""
        if not self._asleep or not self.width:
            return
        self._asleep = False
        self._changed.fire()
        process = self._process
        if process is None or self._end.done():
            self._set("dead", self.why_dead)
            return
        try:
            await process.wake()
            await self._send_newest(process, "recompute")
        except (EngineDied, TransferFailed) as error:
            self._doom(process, str(error))
        if self.state == "asleep" and not self._asleep:
            self._set("open", "its device is back")

    async def score(self, ids: Sequence[int], num_prefix: int) -> list[float]:
        """Compute the log-probs of a probe. Raises Evicted if it is dead."""
        if self._process is None:
            raise Evicted(f"{self.name} is {self.state}")
        return await self._process.score(ids, num_prefix)

    @override
    async def resize(self, width: int) -> None:
        """End its process; with another width a new one begins, as after a death."""
        self._asleep, self.why_dead = True, "its tensor-parallel size changes"
        if self.state != "asleep":
            self._set("asleep", self.why_dead)
        await self._evict()
        process = self._process
        if process is not None and not self._end.done():
            self._end.set_result(self.why_dead)
        while process is not None and self._process is process:
            await self._changed.wait(f"{self.name} to end")
        self.width, self.slots = width, self._slots_of_one * max(width, 1)
        await self.wake()

    @override
    def usage(self) -> Usage:
        usage = self._ended + self._process.usage() if self._process else self._ended
        return msgspec.structs.replace(usage, num_generated=self._counter.num)

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.close()

    def _set(self, state: EngineState, why: str) -> None:
        self.state = state
        self._changed.fire()
        self.on_state(why)

    def _adopt(self, process: EngineProcess, why: str) -> None:
        self._process, self._end = process, asyncio.get_running_loop().create_future()
        self.capabilities = process.capabilities
        self._set("open", why)

    def _doom(self, process: EngineProcess, why: str) -> None:
        """Send no more requests to a process; `keep` ends it."""
        if self._process is process and not self._end.done():
            self.why_dead = why
            self._end.set_result(why)
            if not self._asleep:
                self._set("dead", why)

    async def _end_of_life(self) -> None:
        """Wait until the process is over, give its requests back and keep its counters."""
        process, end = self._process, self._end
        assert process is not None
        died = asyncio.ensure_future(process.died())
        try:
            await asyncio.wait([died, end], return_when=asyncio.FIRST_COMPLETED)
            self._doom(process, end.result() if end.done() else died.result())
        finally:
            died.cancel()
        await process.close()
        await self._evict()
        # Tokens that it generated and did not report are in no count.
        self._ended = msgspec.structs.replace(
            self._ended + process.usage(),
            num_running=0,
            num_waiting=0,
            kv_tokens=0,
            kv_capacity=None,  # the next process may have another
            num_counted=self._counter.num,
        )
        self._process = None
        self._changed.fire()

    async def _restart(self, restart_timeout_s: float) -> None:
        """Try to begin a process. A failure is in `why_dead`. Raises NotArrived if the new process does not
        get the newest weights either."""
        width = self.width
        try:
            async with asyncio.timeout(restart_timeout_s):
                process = await self._begin()
        except TimeoutError:
            self.why_dead = f"it did not start within {restart_timeout_s:g} s"
        except NotArrived as why:
            raise NotArrived(f"{why}; neither did {TRANSFERS} attempts nor a restart help") from why
        except (TailraceError, OSError) as error:
            self.why_dead = str(error)
        else:
            if self._asleep or self.width != width:  # meanwhile
                await process.close()
            else:
                self._adopt(process, "it was restarted")

    async def _begin(self) -> EngineProcess:
        """Start a process, up to the newest weights."""
        process = await self._start()
        process.counter = self._counter
        try:
            with waiting(f"{self.name} to start"):
                await process.ready()
                await self._send_newest(process, "recompute")
        except BaseException:
            await process.close()
            raise
        return process

    async def _send_newest(self, process: EngineProcess, kv: KV) -> None:
        """Load the newest weights, and those that are published meanwhile. Raises TransferFailed if all
        attempts fail, the last one by a NotArrived if they were loaded and are not proven."""
        num_failed, loaded = 0, None
        while self._newest is not None and loaded is not self._newest:
            weights, number = self._newest, self._num_asked
            try:
                await process.load(weights, kv=kv)
                self._examine(process.arrival)
                loaded, self._num_loaded = weights, max(number, self._num_loaded)
                self._changed.fire()
            except TransferFailed as failed:
                num_failed += 1
                if isinstance(failed, NotArrived):
                    kv = "recompute"
                if num_failed == TRANSFERS:
                    raise
                await asyncio.sleep(TRANSFER_PAUSE_S)

    def _examine(self, arrival: Arrival | None) -> None:
        """Raise NotArrived if a publication has not arrived."""
        if arrival is None:
            return
        self.on_arrival(arrival)
        if arrival.cause:
            raise NotArrived(f"{self.name}: version {arrival.version} has not arrived: {arrival.cause}")

    async def _evict(self) -> None:
        """Give all requests back once their tokens are in their samples."""
        await _cancelled(list(self._calls))


async def _cancelled(calls: Sequence[asyncio.Future[None]]) -> None:
    """Cancel calls and wait for their end."""
    for call in calls:
        call.cancel()
    try:
        await ended(*calls)
    finally:
        for call in calls:
            if not call.cancelled() and not isinstance(call.exception(), Evicted | None):
                call.result()  # a defect


async def watch_engines(
    engines: Sequence[SupervisedEngine], recovery_timeout_s: float, every_s: float = 1.0
) -> None:
    """Keep all engines, until cancelled. Raises EnginesLost if all are dead for `recovery_timeout_s`, and
    NotArrived if one does not get the newest weights after a restart either."""
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(engine.keep(recovery_timeout_s))
        alive_s = now()
        while True:
            await asyncio.sleep(every_s)
            # An engine of width 0 sleeps as long as another one has its devices, even if that one is dead.
            owners = [engine for engine in engines if engine.width]
            if not owners or any(engine.state != "dead" for engine in owners):
                alive_s = now()
            elif now() - alive_s >= recovery_timeout_s:
                causes = "; ".join(f"{engine.name}: {engine.why_dead}" for engine in engines)
                raise EnginesLost(
                    f"all engines are dead for {recovery_timeout_s:g} s (engine.recovery_timeout_s). {causes}"
                )
