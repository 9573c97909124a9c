"""A trainer whose processes are started again when one dies, while engines generate (RobustRL, 2512.22492).

The state of a trainer follows from its newest checkpoint and the calls since then. New processes restore that
checkpoint, publish the version that it has, and get these calls again. So the run loses no step; on a CPU the
weights have the same bits. The schedule waits in its next call, and engines generate as far as the bound on
staleness allows. An engine that loads a version meanwhile waits until it is published again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from typing_extensions import override

from tailrace.clock import Signal, now, waiting
from tailrace.contracts.trainer import StepStats
from tailrace.contracts.weights import KEPT_VERSIONS, Weights
from tailrace.drivers.weights.transfers import Transfers
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.trainer import RemoteTrainer, TrainerJob
from tailrace.errors import TransferFailed, WorkerDied, say
from tailrace.types import Sample

T = TypeVar("T")


@dataclass(eq=False)
class _Call(Generic[T]):
    """A call, and its results: of the first processes, then of those after them."""

    make: Callable[[], Awaitable[T]]
    results: list[T] = field(default_factory=list)


class RestartingTrainer(RemoteTrainer):
    """A RemoteTrainer that starts its processes again.

    Args:
        start: starts new ones.
        watches: of the run; `watch` is added.
    """

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        job: TrainerJob,
        start: Callable[[], Awaitable[Sequence[RemoteWorker]]],
        watches: list[Callable[[], Coroutine[Any, Any, None]]],
    ) -> None:
        super().__init__(workers, job)
        watches.append(self.watch)
        self.transfers = Transfers(self.send, find=self._find)
        self._start, self._num_restarts, self._is_restarting, self._restarted = start, 0, False, Signal()
        self._checkpoint: Path | None = None
        self._calls: list[_Call[Any]] = []  # since the checkpoint, or the start, and the publication before

    async def watch(self) -> None:
        """Restart whenever one dies. Raises a WorkerDied if that is before it was ready, or too often. No
        call does so itself: one that is cancelled would leave a trainer that has not all calls."""
        await self.ready()
        while True:
            ends = [asyncio.ensure_future(each.exit_reason()) for each in self.workers]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._is_restarting = True
            await self._restart()
            self._is_restarting = False
            self._restarted.fire()

    @override
    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        make = partial(super().accumulate, units, version=version, replicas=replicas)
        await self._result(_Call(make))

    @override
    async def step(self) -> StepStats:
        return await self._result(_Call(super().step))

    @override
    async def publish(self, version: int) -> Weights:
        return await self._result(_Call(partial(super().publish, version)))

    async def _find(self, version: int) -> Weights:
        """Return a version as the present processes have it. Raises a TransferFailed if they do not."""
        await self._alive()
        published = [each for call in self._calls for each in call.results[-1:] if isinstance(each, Weights)]
        kept = {each.version: each for each in published[-KEPT_VERSIONS:]}
        if version not in kept:
            raise TransferFailed(f"the trainer has versions {[*kept]} of the weights, and not {version}")
        return kept[version]

    @override
    async def restore(self, folder: Path, *, optimizer: bool = True) -> None:
        self._checkpoint, self._calls = None, []
        await self._result(_Call(partial(super().restore, folder, optimizer=optimizer)))

    @override
    async def save(self, folder: Path) -> Awaitable[None]:
        await self._result(call := _Call(partial(super().save, folder)))

        async def complete() -> None:
            while self._checkpoint != folder:
                await self._alive()  # a restart begins it again, after the calls before it
                with suppress(WorkerDied):
                    await call.results[-1]
                    self._checkpoint = folder
            place = self._calls.index(call)
            earlier = [each for each in self._calls[:place] if each.results]
            self._calls[: place + 1] = [each for each in earlier if isinstance(each.results[0], Weights)][-1:]

        completed = asyncio.ensure_future(complete())
        completed.add_done_callback(lambda done: done.cancelled() or done.exception())
        return completed

    @override
    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        return await self._result(_Call(partial(super().ess, units, version=version)), is_kept=False)

    @override
    async def logprobs(self, sample: Sample) -> list[float]:
        return await self._result(_Call(partial(super().logprobs, sample)), is_kept=False)

    @override
    async def reference_logprobs(self, sample: Sample) -> list[float]:
        return await self._result(_Call(partial(super().reference_logprobs, sample)), is_kept=False)

    async def _result(self, call: _Call[T], *, is_kept: bool = True) -> T:
        """The first result of a call. A restart makes those that are kept in their turn."""
        self._calls += [call] if is_kept else []
        while not call.results:
            await self._alive()
            if not call.results:
                with suppress(WorkerDied):
                    call.results.append(await call.make())
        return call.results[0]

    async def _alive(self) -> None:
        """Wait until processes that have died are replaced, and have all calls."""
        while self._is_restarting or any(each.has_ended for each in self.workers):
            await self._restarted.wait("the trainer to start again")

    async def _restart(self) -> None:
        """Replace the processes if one has died. Raises a WorkerDied if that was done too often."""
        began_s, limit = now(), self._job.trainer.restarts
        while dead := [each for each in self.workers if each.has_ended]:
            why = await dead[0].exit_reason()
            if self._num_restarts == limit:
                raise WorkerDied(why)
            self._num_restarts += 1
            with suppress(WorkerDied), waiting("the trainer to start again"):
                await asyncio.gather(*(each.close() for each in self.workers))
                self._adopt(await self._start())
                await self.ready()
                if self._checkpoint:
                    await super().restore(self._checkpoint)
                for call in self._calls:  # also those that are added meanwhile
                    call.results.append(await call.make())
            say(why)
            say(f"restart {self._num_restarts} of {limit}, after {now() - began_s:.1f} s")
