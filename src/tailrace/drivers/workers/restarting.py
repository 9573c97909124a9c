"""A trainer whose processes are started again when one dies, while engines generate (RobustRL, 2512.22492).

The state of a trainer follows from its newest checkpoint and the calls since then. New processes restore that
checkpoint and get these calls again, so the run loses no step; on a CPU the weights have the same bits. The
schedule waits in its next call, and engines generate as far as the bound on staleness allows.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from tailrace.clock import now, waiting
from tailrace.contracts.trainer import StepStats
from tailrace.contracts.weights import Weights
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.trainer import RemoteTrainer, TrainerJob
from tailrace.errors import WorkerDied
from tailrace.types import Sample

T = TypeVar("T")


class _Call:
    """A call that changes the trainer, and its results: of the first processes, then of those after them."""

    def __init__(self, make: Callable[[], Awaitable[Any]]) -> None:
        self.make = make
        self.results: list[Any] = []


class RestartingTrainer(RemoteTrainer):
    """A RemoteTrainer that starts its processes again, at most `job.trainer.restarts` times. `start`: starts
    new ones."""

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        job: TrainerJob,
        start: Callable[[], Awaitable[Sequence[RemoteWorker]]],
    ) -> None:
        super().__init__(workers, job)
        self._start, self._restarting, self._num_restarts = start, asyncio.Lock(), 0
        self._checkpoint: Path | None = None
        self._calls: list[_Call] = []
        """The calls since the checkpoint, or since the start."""

    async def watch(self) -> None:
        """Restart whenever a process dies. Raises a WorkerDied if one does so before it is ready, or too
        often."""
        await self.ready()
        while True:
            ends = [asyncio.ensure_future(each.exit_reason()) for each in self.workers]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in ends:
                    each.cancel()
            await self._restart()

    @override
    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        await self._changed(partial(super().accumulate, units, version=version, replicas=replicas))

    @override
    async def step(self) -> StepStats:
        return await self._changed(super().step)

    @override
    async def publish(self, version: int) -> Weights:
        return await self._changed(partial(super().publish, version))

    @override
    async def restore(self, folder: Path, *, optimizer: bool = True) -> None:
        self._checkpoint, self._calls = None, []
        await self._changed(partial(super().restore, folder, optimizer=optimizer))

    @override
    async def save(self, folder: Path) -> Awaitable[None]:
        self._calls.append(call := _Call(partial(super().save, folder)))
        await self._result(call)

        async def complete() -> None:
            while True:
                written = call.results[-1]
                try:
                    await written
                    break
                except WorkerDied:
                    await self._restart()  # which begins it again, after the calls before it
            self._checkpoint = folder
            del self._calls[: self._calls.index(call) + 1]

        completed = asyncio.ensure_future(complete())
        completed.add_done_callback(lambda done: done.cancelled() or done.exception())
        return completed

    @override
    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        return await self._asked(partial(super().ess, units, version=version))

    @override
    async def logprobs(self, sample: Sample) -> list[float]:
        return await self._asked(partial(super().logprobs, sample))

    @override
    async def reference_logprobs(self, sample: Sample) -> list[float]:
        return await self._asked(partial(super().reference_logprobs, sample))

    async def _changed(self, make: Callable[[], Awaitable[T]]) -> T:
        """Make a call that changes the trainer."""
        self._calls.append(call := _Call(make))
        result: T = await self._result(call)
        return result

    async def _result(self, call: _Call) -> Any:
        """The first result of a call, which a restart may make in its turn."""
        while not call.results:
            if self._restarting.locked():
                await self._restart()
                continue
            try:
                call.results.append(await call.make())
            except WorkerDied:
                await self._restart()
        return call.results[0]

    async def _asked(self, make: Callable[[], Awaitable[T]]) -> T:
        """Make a call that changes nothing."""
        while True:
            await self._restart()
            try:
                return await make()
            except WorkerDied:
                continue

    async def _restart(self) -> None:
        """Wait for a restart under way; start again if a process has died. Raises a WorkerDied if that was
        done too often."""
        async with self._restarting:
            began_s, limit = now(), self._job.trainer.restarts
            while dead := [each for each in self.workers if each.has_ended]:
                why = await dead[0].exit_reason()
                if self._num_restarts == limit:
                    raise WorkerDied(why)
                self._num_restarts += 1
                print(f"tailrace: {why}\ntailrace: restart {self._num_restarts} of {limit}", file=sys.stderr)
                try:
                    with waiting("the trainer to start again"):
                        await self._start_again()
                except WorkerDied:
                    continue
                print(f"tailrace: the trainer is back after {now() - began_s:.1f} s", file=sys.stderr)

    async def _start_again(self) -> None:
        await asyncio.gather(*(each.close() for each in self.workers))
        self._adopt(await self._start())
        await self.ready()
        if self._checkpoint:
            await super().restore(self._checkpoint)
        for call in self._calls:  # also those that are added meanwhile
            call.results.append(await call.make())
