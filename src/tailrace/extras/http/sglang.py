"""SGLang over HTTP, and the command line of a server that a run starts. What a server can do is read from its
OpenAPI page and from what it says of its flags."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from typing_extensions import override

from tailrace.contracts.engine import Capabilities
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.weights import Link, Weights
from tailrace.errors import ServerRefused, TransferFailed
from tailrace.extras.http.dialect import (
    Attempt,
    Chunk,
    Dialect,
    Launch,
    call,
    find_interpreter,
    finish_of,
    label_of,
    spans_of,
)
from tailrace.extras.http.settings import SglangEngineSettings
from tailrace.types import KV

GENERATE = "/generate"
UPDATE = "/update_weights_from_disk"
_ROUTES = (GENERATE, "/abort_request", "/pause_generation", "/continue_generation", UPDATE)
_NO_OVERLAP = (
    "the flag --disable-overlap-schedule: without it a forward pass may still run while weights are loaded"
)


@dataclass(slots=True, kw_only=True)
class Sglang(Dialect):
    """The dialect of one SGLang server. Made by `detect`."""

    salt_field: str
    """The field that separates the prefix caches."""
    can_retract: bool
    """The cache can be flushed while retracted requests wait. Older servers end when they try."""
    alive_route: str | None = "/model_info"
    """/health would generate a token, and fail while the server is paused."""
    _flush: bool = field(default=False, init=False)
    _loaded: bool = field(default=False, init=False)
    """The weights are no longer those that the server started with."""

    @override
    def request(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
        """`ignore_eos` would ignore the stop tokens, too."""
        sampling: dict[str, Any] = {
            "max_new_tokens": attempt.max_tokens,
            "temperature": attempt.temperature_or(self.sampling.temperature),
            "top_p": attempt.top_p or self.sampling.top_p,
            "top_k": self.sampling.top_k or -1,
            "sampling_seed": attempt.seed,
            "stop_token_ids": self.stop_token_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if self.sampling.stop:
            sampling["stop"] = list(self.sampling.stop)
        body = {
            "rid": attempt.id,
            "input_ids": list(attempt.ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            self.salt_field: attempt.salt,
        }
        return GENERATE, body

    @override
    def chunk(self, event: Mapping[str, Any], num_received: int) -> Chunk:
        """An event has all tokens so far or, with --incremental-streaming-output, the latest ones.
        `completion_tokens` tells them apart; it may be behind where an event has all tokens.
        """
        if error := event.get("error"):
            raise ServerRefused(f"POST {GENERATE}", int(error.get("code") or 500), str(error.get("message")))
        meta, ids = event["meta_info"], event["output_ids"]
        reason = meta["finish_reason"] or {}
        if (status := reason.get("status_code") or 0) >= 400:
            raise ServerRefused(f"POST {GENERATE}", status, str(reason.get("message")))
        start = max(0, meta["completion_tokens"] - len(ids))
        if start > num_received:
            raise ValueError(f"tokens from {start} on came after {num_received}")
        new = ids[num_received - start :]
        entries = meta["output_token_logprobs"][-len(new) :] if new else []
        if [entry[1] for entry in entries] != new:
            raise ValueError(f"{new} came with the log-probs {entries}")
        finish = finish_of(reason.get("type"))
        logprobs = [float(entry[0]) for entry in entries]
        if not finish:
            return Chunk(new, logprobs)
        return Chunk(new, logprobs, finish, spans_of(meta.get("weight_versions")), meta.get("cached_tokens"))

    @override
    async def abort(self, attempt: Attempt) -> bool:
        """The server aborts every request whose id begins with this one."""
        await call(self.client, "POST", "/abort_request", body={"rid": attempt.id}, timeout_s=5.0)
        return True

    @override
    async def pause(self, kv: KV) -> None:
        """To recompute the KV cache, requests go back to the queue; where the server cannot
        flush its cache then, it gives them back, and they are continued with their tokens."""
        self._flush = kv == "recompute"
        recompute = "retract" if self.can_retract else "abort"
        mode = recompute if self._flush else "in_place"
        await call(self.client, "POST", "/pause_generation", body={"mode": mode})

    @override
    async def resume(self) -> None:
        await call(self.client, "POST", "/continue_generation", body={"torch_empty_cache": False})

    @override
    async def update(self, weights: Weights, link: Link) -> None:
        """The server reads a folder (drivers/weights/filesystem.py)."""
        if not Path(weights.location).is_dir():
            problem = f"{self.server} reads weights from a folder, and {weights.location} is none"
            raise TransferFailed(f'{problem}; set weights.transport = "filesystem"')
        await self._load(weights.location, label_of(weights.version), flush=self._flush)
        self._loaded = True

    @override
    async def sleep(self) -> None:
        """The server ends if a request runs while its memory is released."""
        await call(self.client, "POST", "/pause_generation", body={"mode": "abort"})
        await call(self.client, "POST", "/release_memory_occupation", body={})

    @override
    async def wake(self) -> None:
        """Take the memory back. The weights are lost and must be loaded."""
        await call(self.client, "POST", "/resume_memory_occupation", body={})
        if not self._loaded:
            info = await call(self.client, "GET", "/model_info") or {}
            await self._load(str(info["model_path"]), label_of(0), flush=True)
        await self.resume()

    @override
    async def health(self) -> None:
        """The reply comes from the process that computes."""
        await call(self.client, "GET", "/server_info")

    async def _load(self, folder: str, label: str, *, flush: bool) -> None:
        body = {"model_path": folder, "weight_version": label, "flush_cache": flush}
        reply = await call(self.client, "POST", UPDATE, body=body)
        if not isinstance(reply, dict) or not reply.get("success"):
            raise ServerRefused(f"POST {self.client.base_url}{UPDATE}", 200, str(reply))


async def detect(
    client: httpx.AsyncClient, sampling: SamplingSettings, end_of_text: Collection[int]
) -> Sglang:
    """Find out what a server can do.

    Args:
        end_of_text: the model's tokens that end a text.

    Raises:
        EngineDied: it cannot be reached.
        ServerRefused: it is no SGLang server.
    """
    page = await call(client, "GET", "/openapi.json") or {}
    paths, schemas = page.get("paths", {}), page.get("components", {}).get("schemas", {})
    config = await call(client, "GET", "/server_info") if "/server_info" in paths else None
    config = config if isinstance(config, dict) else {}
    models = await call(client, "GET", "/v1/models") if "/v1/models" in paths else None
    (model, *_) = (models or {}).get("data") or [{}]
    fields = schemas.get("GenerateReqInput", {}).get("properties", {})
    salts = [name for name in ("cache_salt", "extra_key") if name in fields]
    missing = [f"the route {route}: update SGLang" for route in _ROUTES if route not in paths]
    missing += [] if salts else ["the field cache_salt: update SGLang"]
    missing += [_NO_OVERLAP] if config.get("disable_overlap_schedule") is False else []
    return Sglang(
        client=client,
        sampling=sampling,
        stop_token_ids=sorted({*end_of_text, *sampling.stop_token_ids}),
        server=f"SGLang {config.get('version', 'of an unknown version')}",
        dtype=None if config.get("dtype") == "auto" else config.get("dtype"),
        max_context=model.get("max_model_len"),
        salt_field=salts[0] if salts else "cache_salt",
        can_retract="/begin_weight_update" in paths,  # both came with the same version
        capabilities=Capabilities(
            exact_versions="WeightVersionSpan" in schemas,
            sleep=bool(config.get("enable_memory_saver")),
            top_p=True,
            sampling_mask=True,  # its log-probs are those before top_p and top_k
        ),
        missing=tuple(missing),
    )


def launch(settings: SglangEngineSettings, *, model: Path, max_context: int, port: int) -> Launch:
    """The command line of one server on the loopback interface. `max_context` counts a prompt and its
    completion together."""
    flags = {
        "--model-path": str(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": settings.dtype,
        "--context-length": str(max_context),
        "--max-running-requests": str(settings.max_num_seqs),
        "--tensor-parallel-size": str(settings.tensor_parallel_size),
    }
    words = [word for flag in flags.items() for word in flag]
    command = (find_interpreter(settings), "-m", "sglang.launch_server", *words, "--disable-overlap-schedule")
    return Launch((*command, *settings.args), {"HF_HUB_OFFLINE": "1"} | settings.env)
