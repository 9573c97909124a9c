"""The routes that change the server's state, as in vLLM, and PipelineRL's two: pauses, sleep, aborts and new
weights. One change at a time.

New weights are safetensors files below one folder, or come over a process group.
They are checked before the engine is asked to load them. Nothing else is read: no pickle, and no file from
elsewhere.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query
from pydantic import AfterValidator, BaseModel, Field, StrictInt, ValidationError, model_validator
from safetensors import SafetensorError

from tailrace.contracts.weights import Address, Link, TensorInfo, Weights
from tailrace.drivers.weights.manifest import check_tensors
from tailrace.drivers.workers.engine import EngineWorker
from tailrace.errors import ConfigError, TransferFailed, WeightsRefused
from tailrace.extras.serve.formats import Name, first_defect
from tailrace.extras.serve.generation import FIRST, ServedEngine
from tailrace.model_folder import tensor_headers, weight_files
from tailrace.types import KV

Info = dict[str, Any]
Embedded = Annotated[Info, Body(embed=True)]
Ids = Annotated[list[str] | None, Body(embed=True)]

_DTYPES = {"F32": "float32", "BF16": "bfloat16"}


class OfferedUpdate(BaseModel):
    """Body of an update. The client of extras/http/vllm.py puts all but the link into `weights`.

    Args:
        location: a safetensors file, or a folder of such files; or the location of a streamed publication.
        tensors: name, shape and type of each tensor of a streamed publication, in the order of sending.
        link: the fields of the Link of a streamed publication, in order.
    """

    location: str
    tensors: list[tuple[str, tuple[int, ...], str]] = []
    link: Link = Link(("engine",), 0)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, body: Info) -> Info:
        weights = body.get("weights")
        return body | weights if isinstance(weights, dict) else body


MAX_RANKS = 65_536
"""Processes of a group that a request may name, at most."""


class OfferedGroup(BaseModel):
    """Body of /init_process_group: the group that torch.distributed.init_process_group makes at
    tcp://master_address:master_port, in which this engine has the rank `rank_offset`."""

    master_address: Annotated[str, Field(min_length=1)]
    master_port: Annotated[int, Field(ge=1, le=65_535)]
    rank_offset: Annotated[int, Field(ge=1, lt=MAX_RANKS)]
    world_size: Annotated[int, Field(ge=2, le=MAX_RANKS)]
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0


class ParameterInfo(BaseModel):
    """One tensor that will be broadcast, with its type as torch spells it."""

    name: str
    shape: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
    dtype: Annotated[str, AfterValidator(lambda name: name.removeprefix("torch."))]


class RequestedUpdate(BaseModel):
    """Body of /request_weight_update: tensors in the order of their broadcasts, or files in place of them
    (`location`). `clear_cache`: the KV cache of requests under way is computed again."""

    version: StrictInt
    parameters_info: list[ParameterInfo] = []
    location: str | None = None
    clear_cache: bool = False


class OfferedWeights:
    """Turns what clients send into what the engine loads. All files lie below `root`, also those that
    symbolic links lead to; None: no files are read."""

    def __init__(self, root: Path | None, expected: Iterable[TensorInfo]) -> None:
        self._root, self._expected = root and root.resolve(), tuple(expected)

    def check(self, body: Info, number: int) -> tuple[Weights, Link]:
        """Check a publication, which gets `number` as its version. Raises WeightsRefused if it cannot be
        read, or its tensors are not those of the model."""
        try:
            info = OfferedUpdate.model_validate(body)
        except ValidationError as why:
            raise WeightsRefused(first_defect(why)) from None
        weights, link = Weights(number, info.location, _infos(info.tensors)), info.link
        if not weights.is_streamed:
            path = self._path(info.location)
            weights = Weights(number, str(path), tuple(_headers(self._files(path))))
        check_tensors(weights.tensors, self._expected)
        return weights, link

    def _path(self, location: str) -> Path:
        if self._root is None:
            raise WeightsRefused("this server reads no files; start it with --weights-folder")
        try:
            path = (self._root / location).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            path = None
        if path is None or not path.is_relative_to(self._root):
            raise WeightsRefused(f"there is no {location!r} below the server's --weights-folder")
        return path

    def _files(self, path: Path) -> list[Path]:
        try:
            files = weight_files(path) if path.is_dir() else [path]
        except ConfigError as why:
            raise WeightsRefused(why.problem) from None
        for file in files:
            if file.suffix != ".safetensors" or not file.is_file():
                raise WeightsRefused(f"{file.name!r} is not a .safetensors file; no other format is read")
            self._path(str(file))
        return files


def _infos(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, shape, dtype) for name, shape, dtype in tensors)  # type: ignore[arg-type]


def _headers(files: Iterable[Path]) -> Iterable[TensorInfo]:
    """Return the manifest of the files, without reading a tensor."""
    for file in files:
        try:
            headers = [(name, shape, _DTYPES.get(kind, kind)) for name, shape, kind in tensor_headers(file)]
        except (SafetensorError, OSError) as why:
            raise WeightsRefused(f"{file.name!r} cannot be read: {why}") from None
        yield from _infos(headers)


class Control:
    """The server's state. `offered` checks new weights."""

    def __init__(self, engine: ServedEngine, offered: OfferedWeights) -> None:
        self._engine, self._call, self._offered = engine, engine.worker.call, offered
        self.labels = [FIRST]
        """Labels of the weights, by the engine's number of each load; without one, the label before."""
        self._groups = itertools.count(1)
        self._transfer: Info = {}
        """Fields that every update has."""
        self._lock = asyncio.Lock()
        self.paused = self.asleep = False
        self._is_updating = False
        """Whether an update has started and not finished."""
        self._kv: KV = "keep"
        """Whether the next load keeps the KV cache; set by the pause before it."""

    def add_to(self, router: APIRouter) -> None:
        """Add the routes."""
        endpoints: Mapping[str, Callable[..., Awaitable[Info | None]]] = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/abort_requests": self.abort_requests,
            "/inference/v1/abort_requests": self.abort_generations,
            "/init_weight_transfer_engine": self.init_transfer,
            "/start_weight_update": self.start_update,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish_update,
            "/init_process_group": self.init_process_group,
            "/request_weight_update": self.update_at_once,
        }
        for path, endpoint in endpoints.items():
            router.add_api_route(path, endpoint, methods=["POST"])

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> Info:
        """Stop between two decode steps.

        Args:
            mode: what becomes of the requests under way: "abort" ends them, "wait" completes them first,
                "keep" continues them after `resume`. New requests wait for `resume`.
            clear_cache: a load during the pause drops the KV cache, which is then computed again.
        """
        async with self._lock:
            if mode == "wait":
                self._engine.admitting.clear()
                await self._call(EngineWorker.resume)
                await self._engine.drained()
            elif mode == "abort":
                self._engine.abort(None)
            await self._call(EngineWorker.pause)
            self.paused, self._kv = True, "recompute" if clear_cache else "keep"
        return {"status": "paused"}

    async def resume(self) -> Info:
        """Go on, awake."""
        async with self._lock:
            if self.asleep:
                await self._call(EngineWorker.wake)
                self.labels.append(self.labels[0])
            await self._call(EngineWorker.resume)
            self._engine.admitting.set()
            self.paused = self.asleep = False
            self._kv = "keep"
        return {"status": "resumed"}

    async def wake_up(self) -> Info:
        """Resume generation, under vLLM's name of the route."""
        await self.resume()
        return {"status": "awake"}

    async def sleep(
        self, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Literal["abort", "wait"] = "abort"
    ) -> Info:
        """Free the engine's memory until `resume`. The engine then has the weights of the start. `mode` is as
        of `pause`; no request can be kept."""
        async with self._lock:
            if not self.asleep:
                self._engine.admitting.clear()
                if mode == "abort":
                    self._engine.abort(None)
                else:
                    await self._call(EngineWorker.resume)
                await self._engine.drained()
                await self._call(EngineWorker.pause)
                await self._call(EngineWorker.sleep)
                self.paused = self.asleep = True
        return {"status": "sleeping", "level": level}

    async def abort_requests(self, request_ids: Ids = None) -> Info:
        """End requests now; without ids all."""
        return {"status": "aborted", "aborted": self._engine.abort(request_ids or None)}

    async def abort_generations(self, request_ids: Annotated[list[str], Body(embed=True)]) -> None:
        """End these requests now."""
        self._engine.abort(request_ids)

    async def init_transfer(self, init_info: Embedded) -> Info:
        """Remember fields of OfferedUpdate for all updates that lack them. Others are refused: the client
        speaks of another transport."""
        if unknown := sorted(init_info.keys() - OfferedUpdate.model_fields.keys()):
            raise WeightsRefused(f"the transport of this server has no {', '.join(unknown)}")
        self._transfer = init_info
        return {"message": "Weight transfer initialized"}

    async def init_process_group(self, group: OfferedGroup) -> Info:
        """Make the group of `/request_weight_update` (PipelineRL 4). It waits for rank 0, the trainer."""
        if (rank := group.rank_offset) >= group.world_size:
            raise WeightsRefused(f"rank_offset = {rank} is not below world_size = {group.world_size}")
        place = group.backend, group.master_address, group.master_port
        location = str(Address(*place, 0, group.timeout_s))
        link = Link(("served",), next(self._groups), group.world_size - 1, standalone=True, first_rank=rank)
        await self._call(EngineWorker.connect, location, link)  # without the lock: the trainer may never come
        self._transfer = {"location": location, "link": link}
        return {"status": "ok"}

    async def start_update(self) -> Info:
        """Begin an update of the weights."""
        async with self._lock:
            self._refuse_second_update()
            self._is_updating = True
        return {"message": "Weight update started"}

    async def update(self, update_info: Embedded) -> Info:
        """Load weights between two decode steps. A failed update is over; the old weights stay."""
        async with self._lock:
            self._require_update()
            try:
                await self._load(update_info, self._kv)
            except (WeightsRefused, TransferFailed):
                self._is_updating = False
                raise
        return {"message": "Weights updated"}

    async def finish_update(self, weight_version: Annotated[Name | None, Body(embed=True)] = None) -> Info:
        """End an update, and name the loaded weights for `weight_versions`."""
        async with self._lock:
            self._require_update()
            self._is_updating = False
            if weight_version is not None:
                self.labels[-1] = weight_version
        return {"message": "Weight update finished"}

    async def update_at_once(self, update: RequestedUpdate) -> Info:
        """Load and name weights in flight: requests go on (PipelineRL 4)."""
        tensors = [(each.name, each.shape, each.dtype) for each in update.parameters_info]
        info: Info = {"tensors": tensors} if update.location is None else {"location": update.location}
        async with self._lock:
            self._refuse_second_update()
            if "location" not in self._transfer | info:
                raise WeightsRefused("there is no process group: POST /init_process_group first")
            await self._load(info, kv="recompute" if update.clear_cache else "keep")
            self.labels[-1] = str(update.version)
        return {"status": "ok"}

    def _refuse_second_update(self) -> None:
        if self._is_updating:
            raise WeightsRefused("an update is under way; finish it first")

    def _require_update(self) -> None:
        if not self._is_updating:
            raise WeightsRefused("no update was started: POST /start_weight_update comes first")

    async def _load(self, info: Info, kv: KV) -> None:
        if self.asleep:
            raise WeightsRefused("the server is asleep: POST /wake_up first")
        number = len(self.labels)
        weights, link = await asyncio.to_thread(self._offered.check, self._transfer | info, number)
        self.labels.append(self.labels[-1])
        try:
            await self._call(EngineWorker.load, weights, link, kv)
        except BaseException:
            self.labels.pop()
            raise
