"""vLLM over HTTP where each publication is a LoRA adapter.

A publication is loaded by /v1/load_lora_adapter under a name of its own, and a request names the adapter with
which it is served. An update ends the requests in flight, and they go on from their tokens under the new
adapter. So each request has one version, whatever the server says about the weights below the adapter.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import httpx

from tailrace.engine.dialect import Attempt, Chunk, call
from tailrace.engine.settings import SamplingSettings
from tailrace.engine.vllm import DEV_MODE, Vllm, detect_as
from tailrace.errors import ServerRefused
from tailrace.types import KV
from tailrace.weights.base import Link, Weights

RUNTIME_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_ADAPTERS = f"start the server with {RUNTIME_ADAPTERS}=1, --enable-lora and --max-lora-rank"
_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allows as the highest rank."""


def max_rank(rank: int) -> int | None:
    """Return the least highest rank of a server that takes adapters of a rank; None: there is none."""
    return next((limit for limit in _MAX_RANKS if rank <= limit), None)


@dataclass(slots=True)
class VllmAdapters(Vllm):
    """As Vllm. Before the first update requests are served without an adapter."""

    ends_requests: bool = True
    _adapter: str | None = field(default=None, init=False)
    """The name of the newest one."""
    routes: ClassVar[Mapping[str, str]] = dict.fromkeys(("/pause", "/resume"), DEV_MODE) | dict.fromkeys(
        (_LOAD, _UNLOAD), _ADAPTERS
    )
    backend: ClassVar[str | None] = None

    def request(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
        """As Dialect.request."""
        route, body = Vllm.request(self, attempt)
        return route, body | {"model": self._adapter or self.model_name}

    def chunk(self, event: Mapping[str, Any], num_received: int) -> Chunk:
        """As Dialect.chunk. The server's version spans are those of the weights below the adapter."""
        return replace(Vllm.chunk(self, event, num_received), spans=())

    async def pause(self, kv: KV) -> None:
        """End all requests at once. A prefix cache is of one adapter: the server knows it by its name."""
        await call(self.client, "POST", "/pause", params={"mode": "abort", "clear_cache": "false"})

    async def update(self, weights: Weights, link: Link) -> None:
        """As Dialect.update. A name is never used twice: the server may keep what it knows under it. It drops
        the tensors of an older adapter when it needs their place (`--max-loras`, `--max-cpu-loras`)."""
        name = f"tailrace-{weights.version}-{os.urandom(6).hex()}"
        await call(self.client, "POST", _LOAD, body={"lora_name": name, "lora_path": weights.location})
        old, self._adapter = self._adapter, name
        if old:
            with suppress(ServerRefused):  # it has forgotten the name already; the new adapter is loaded
                await call(self.client, "POST", _UNLOAD, body={"lora_name": old})


async def detect(
    client: httpx.AsyncClient, sampling: SamplingSettings, end_of_text: Collection[int]
) -> VllmAdapters:
    """As `vllm.detect_as`. The server needs a route to abort a request: without it, a request that reaches
    the paused server would hold up the update for ever."""
    found = await detect_as(VllmAdapters, client, sampling, end_of_text)
    if found.abort_route is None:
        found.missing += ("the route /abort_requests: update vLLM",)
    return found
