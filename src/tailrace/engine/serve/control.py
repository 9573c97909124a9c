"""What changes the server's state: pauses, sleep, aborts and new weights. One change at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from tailrace.engine.serve.base import ComputingEngine
from tailrace.engine.serve.offered_weights import OfferedWeights, UpdateInfo
from tailrace.engine.serve.requests import Requests
from tailrace.engine.serve.versions import Versions
from tailrace.errors import TransferFailed, WeightsRefused
from tailrace.types import KV

PauseMode = Literal["abort", "wait", "keep"]
SleepMode = Literal["abort", "wait"]


class Control:
    """The server's state.

    Args:
        offered: checks new weights.
    """

    def __init__(
        self, engine: ComputingEngine, requests: Requests, versions: Versions, offered: OfferedWeights
    ) -> None:
        self._engine, self._requests, self._versions = engine, requests, versions
        self._offered = offered
        self._transfer: dict[str, Any] = {}
        """Fields that every update has."""
        self._lock = asyncio.Lock()
        self.paused = self.asleep = False
        self.updating = False
        """Between start and finish of an update."""
        self._kv: KV = "keep"
        """What the next load does with the KV cache; set by the pause before it."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop between two decode steps.

        Args:
            mode: what becomes of the requests under way: "abort" ends them, "wait" completes them first,
                "keep" continues them after `resume`. New requests wait for `resume`.
            clear_cache: a load during the pause drops the KV cache, which is then computed again.
        """
        async with self._lock:
            if mode == "wait":
                self._requests.admit(False)
                await self._engine.resume()
                await self._requests.drained()
            elif mode == "abort":
                self._requests.abort(None)
            await self._engine.pause()
            self.paused, self._kv = True, "recompute" if clear_cache else "keep"

    async def resume(self) -> None:
        """Go on, awake."""
        async with self._lock:
            if self.asleep:
                await self._engine.wake()
                self._versions.restart()
            await self._engine.resume()
            self._requests.admit(True)
            self.paused = self.asleep = False
            self._kv = "keep"

    async def sleep(self, mode: SleepMode) -> None:
        """Free the engine's memory until `resume`. The engine then has the weights of the start.

        Args:
            mode: as of `pause`; no request can be kept.
        """
        async with self._lock:
            if self.asleep:
                return
            self._requests.admit(False)
            if mode == "abort":
                self._requests.abort(None)
            else:
                await self._engine.resume()
            await self._requests.drained()
            await self._engine.pause()
            await self._engine.sleep()
            self.paused = self.asleep = True

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Remember fields of UpdateInfo for all updates that lack them.

        Raises:
            WeightsRefused: there are other fields: the client speaks of another transport.
        """
        if unknown := sorted(info.keys() - UpdateInfo.model_fields.keys()):
            raise WeightsRefused(
                f"the transport of this server has no {', '.join(unknown)}; see docs/serve.md"
            )
        self._transfer = info

    async def start_update(self) -> None:
        """Begin an update of the weights.

        Raises:
            WeightsRefused: one is under way.
        """
        async with self._lock:
            if self.updating:
                raise WeightsRefused("an update is under way; finish it first")
            self.updating = True

    async def update(self, info: dict[str, Any]) -> None:
        """Load weights between two decode steps. A failed update is over; the old weights stay.

        Args:
            info: of UpdateInfo.

        Raises:
            WeightsRefused: no update was started, or the weights are not those of the model.
            TransferFailed: the engine did not receive them.
        """
        async with self._lock, self._ended_by_failure():
            if not self.updating:
                raise WeightsRefused("no update was started: POST /start_weight_update comes first")
            await self._load(info)

    async def finish_update(self, label: str | None) -> None:
        """End an update.

        Args:
            label: of the loaded weights, for `weight_versions`; None: that of the weights before.

        Raises:
            WeightsRefused: no update was started.
        """
        async with self._lock:
            if not self.updating:
                raise WeightsRefused("no update was started: POST /start_weight_update comes first")
            self.updating = False
            if label is not None:
                self._versions.name(label)

    async def update_at_once(self, info: dict[str, Any], label: str) -> None:
        """Load and label weights in flight: requests go on with the KV cache they have (PipelineRL 4).

        Raises:
            WeightsRefused: an update is under way, or the weights are not those of the model.
            TransferFailed: the engine did not receive them.
        """
        async with self._lock:
            if self.updating:
                raise WeightsRefused("an update is under way; finish it first")
            await self._load(info)
            self._versions.name(label)

    async def _load(self, info: dict[str, Any]) -> None:
        if self.asleep:
            raise WeightsRefused("the server is asleep: POST /wake_up first")
        number = self._versions.number + 1
        weights, link = await asyncio.to_thread(self._offered.check, self._transfer | info, number)
        self._versions.add()
        try:
            await self._engine.load(weights, link, kv=self._kv)
        except BaseException:
            self._versions.withdraw()
            raise

    @asynccontextmanager
    async def _ended_by_failure(self) -> AsyncIterator[None]:
        try:
            yield
        except (WeightsRefused, TransferFailed):
            self.updating = False
            raise
