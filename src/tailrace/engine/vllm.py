"""vLLM over HTTP, from 0.18 on. What a server can do is read from its OpenAPI page and from its config.

Generation is /inference/v1/generate where the server streams it, else /v1/completions with token ids.

With LoRA each publication can be an adapter. It is loaded by /v1/load_lora_adapter under a name of its own,
and a request names the adapter with which it is served. An update ends the requests in flight, and they go on
from their tokens under the new adapter. So each request has one version, whatever the server says about the
weights below the adapter.
"""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import httpx

from tailrace.engine.base import Capabilities
from tailrace.engine.dialect import (
    Attempt,
    Chunk,
    ServedModel,
    VersionSpan,
    call,
    describe,
    finish_of,
    label_of,
)
from tailrace.engine.settings import SamplingSettings
from tailrace.errors import ConfigError, EngineDied, ServerRefused
from tailrace.types import KV
from tailrace.weights.base import Link, Weights
from tailrace.weights.vllm_plugin import BACKEND

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
DEV_MODE = "start the server with the environment variable VLLM_SERVER_DEV_MODE=1"
_TOKEN_PREFIX = "token_id:"
_ABSENT = -9999.0
"""The log-prob that vLLM writes where it has none."""


def logprobs_mode(sampling: SamplingSettings) -> str:
    """The mode in which log-probs are those of the whole vocabulary at the sampling temperature.

    Raw log-probs leave the temperature out. Processed ones are renormalised over what top_p and top_k keep.
    """
    truncated = sampling.top_p < 1 or sampling.top_k > 0
    return "raw_logprobs" if truncated else "processed_logprobs"


def check_sampling(sampling: SamplingSettings) -> None:
    """Refuse sampling for which vLLM cannot give the log-probs that the trainer needs.

    Raises:
        ConfigError: top_p or top_k together with a temperature.
    """
    if logprobs_mode(sampling) == "raw_logprobs" and sampling.temperature != 1:
        key, value = ("top_p", sampling.top_p) if sampling.top_p < 1 else ("top_k", sampling.top_k)
        problem = (
            "vLLM reports the log-probs of what remains after it, or those without the temperature; both are "
            "not those of the policy that is trained"
        )
        raise ConfigError(f"sampling.{key}", value, problem, "remove it, or set sampling.temperature = 1")


V = TypeVar("V", bound="Vllm")


@dataclass(slots=True)
class Vllm:
    """The dialect of one vLLM server (engine/dialect.py). Made by `detect`.

    Args:
        route: GENERATE or COMPLETIONS.
        stop_token_ids: every token that ends a completion.
        abort_route: where requests are aborted; None: nowhere.
        has_start: an update has a start and a finish.
        has_label: the finish of an update takes the label of the weights.
        asks_spans: version spans must be asked for.
        config: what /server_info says.
    """

    client: httpx.AsyncClient
    sampling: SamplingSettings
    stop_token_ids: list[int]
    server: str
    model_name: str
    max_context: int | None
    route: str
    abort_route: str | None
    has_start: bool
    has_label: bool
    asks_spans: bool
    config: Mapping[str, Any]
    capabilities: Capabilities
    alive_route: str = "/health"
    ends_requests: bool = False
    missing: tuple[str, ...] = ()
    _initialised: bool = field(default=False, init=False)
    routes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("/pause", "/resume", "/init_weight_transfer_engine", "/update_weights"), DEV_MODE
    )
    """Those that a run needs, and what adds each."""
    backend: ClassVar[str | None] = BACKEND
    """Of weight transfer; None: any."""

    def request(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
        """As Dialect.request, without the seed. With one, vLLM draws for each request alone, which is slow,
        and its noise would still depend on interruptions. On a CPU, version 0.32 dies if it computes the
        prompt of such a request in parts (`CPU Generator does not use offset`)."""
        sampling: dict[str, Any] = {
            "max_tokens": attempt.max_tokens,
            "temperature": attempt.temperature_or(self.sampling.temperature),
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "logprobs": 1,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": True,  # the ids above are all that end a completion
            "skip_special_tokens": False,
        }
        if self.sampling.stop:
            sampling["stop"] = list(self.sampling.stop)
        body: dict[str, Any] = {
            "request_id": attempt.id,
            "model": self.model_name,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": attempt.salt,
        }
        if self.route == GENERATE:
            sampling["detokenize"] = bool(self.sampling.stop)
            return GENERATE, body | {"token_ids": list(attempt.ids), "sampling_params": sampling}
        body |= {"prompt": list(attempt.ids), "return_token_ids": True} | sampling
        return COMPLETIONS, body | ({"return_weight_versions": True} if self.asks_spans else {})

    def chunk(self, event: Mapping[str, Any], num_received: int) -> Chunk:
        """As Dialect.chunk."""
        if error := event.get("error"):
            raise ServerRefused(self.route, int(error.get("code") or 500), str(error.get("message")))
        cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        if not event["choices"]:
            return Chunk(num_cached=cached)
        (choice,) = event["choices"]
        ids = list(choice.get("token_ids") or ())
        logprobs = _generate_logprobs(choice, ids) if self.route == GENERATE else _completion_logprobs(choice)
        if len(logprobs) != len(ids) or _ABSENT in logprobs:
            raise ValueError(f"{len(ids)} tokens came with the log-probs {logprobs}")
        spans = tuple(
            VersionSpan(str(span["version"]), int(span["start"]), int(span["end"]))
            for span in choice.get("weight_versions") or ()
        )
        return Chunk(ids, logprobs, finish_of(choice.get("finish_reason")), spans, cached)

    async def abort(self, attempt: Attempt) -> bool:
        """As Dialect.abort."""
        if self.abort_route is None:
            return False
        name = f"generate-tokens-{attempt.id}" if self.route == GENERATE else f"cmpl-{attempt.id}-0"
        await call(self.client, "POST", self.abort_route, body={"request_ids": [name]}, timeout_s=5.0)
        return True

    async def pause(self, kv: KV) -> None:
        """As Dialect.pause. The reply comes once no batch is being computed. The caches are cleared only when
        asked to; the default of the server depends on its version."""
        clear, mode = "true" if kv == "recompute" else "false", "abort" if self.ends_requests else "keep"
        await call(self.client, "POST", "/pause", params={"mode": mode, "clear_cache": clear})

    async def resume(self) -> None:
        """As Dialect.resume."""
        await call(self.client, "POST", "/resume")

    async def update(self, weights: Weights, link: Link) -> None:
        """As Dialect.update. Needs the backend of weights/vllm_plugin.py."""
        if not self._initialised:
            await call(self.client, "POST", "/init_weight_transfer_engine", body={"init_info": {}})
            self._initialised = True
        if self.has_start:
            await self._start_update()
        info = {"weights": asdict(weights), "link": list(link)}
        await call(self.client, "POST", "/update_weights", body={"update_info": info})
        label = {"weight_version": label_of(weights.version)} if self.has_label else {}
        if self.has_start:
            await call(self.client, "POST", "/finish_weight_update", body=label)

    async def _start_update(self) -> None:
        start = {"is_checkpoint_format": True}
        try:
            await call(self.client, "POST", "/start_weight_update", body=start)
        except ServerRefused:  # an update that this or another client gave up is still open
            await call(self.client, "POST", "/finish_weight_update", body={})
            await call(self.client, "POST", "/start_weight_update", body=start)

    async def sleep(self) -> None:
        """As Dialect.sleep. Level 1 keeps the weights in host memory."""
        await call(self.client, "POST", "/sleep", params={"level": "1"})

    async def wake(self) -> None:
        """As Dialect.wake."""
        await call(self.client, "POST", "/wake_up")

    async def model(self) -> ServedModel:
        """As Dialect.model."""
        config = self.config.get("model_config") or {}
        dtype = config.get("dtype")
        return ServedModel(
            path=config.get("model"),
            dtype=str(dtype).removeprefix("torch.") if dtype else None,
            max_context=self.max_context,
        )

    async def health(self) -> None:
        """As Dialect.health. The second route asks the process that computes."""
        await call(self.client, "GET", "/health")
        await call(self.client, "GET", "/is_paused")


async def detect(client: httpx.AsyncClient, sampling: SamplingSettings, end_of_text: Collection[int]) -> Vllm:
    """As `detect_as`, for whole weights."""
    return await detect_as(Vllm, client, sampling, end_of_text)


async def detect_as(
    kind: type[V], client: httpx.AsyncClient, sampling: SamplingSettings, end_of_text: Collection[int]
) -> V:
    """Find out what a server can do.

    Args:
        kind: the dialect for the way in which weights are loaded.
        end_of_text: the model's tokens that end a text.

    Raises:
        EngineDied: it cannot be reached.
        ServerRefused: it is no vLLM server.
    """
    page = await call(client, "GET", "/openapi.json") or {}
    version = (await call(client, "GET", "/version") or {}).get("version", "of an unknown version")
    models = await call(client, "GET", "/v1/models") or {}
    (model, *_) = models.get("data") or [{}]
    paths, schemas = page.get("paths", {}), page.get("components", {}).get("schemas", {})
    completion = _fields(schemas, "CompletionRequest")
    config = await _config(client) if "/server_info" in paths else {}
    salted = "cache_salt" in completion or "cache_salt" in _fields(schemas, "GenerateRequest")
    raw = (config.get("model_config") or {}).get("logprobs_mode") == "raw_logprobs"
    vllm = kind(
        client=client,
        sampling=sampling,
        stop_token_ids=sorted({*end_of_text, *sampling.stop_token_ids}),
        server=f"vLLM {version}",
        model_name=str(model.get("id", "")),
        max_context=model.get("max_model_len"),
        route=COMPLETIONS,
        abort_route=next(
            (route for route in ("/abort_requests", "/inference/v1/abort_requests") if route in paths), None
        ),
        has_start="/start_weight_update" in paths,
        has_label="weight_version" in _fields(schemas, "Body_finish_weight_update_finish_weight_update_post"),
        asks_spans="return_weight_versions" in completion,
        config=config,
        capabilities=Capabilities(),
        missing=(
            *_missing(kind, paths, config, sampling),
            *(() if salted else ("the field cache_salt: update vLLM",)),
        ),
    )
    probe = await _stream(vllm) if GENERATE in paths else None
    if probe is not None:
        vllm.route = GENERATE
    tells_spans = "weight_versions" in probe if probe is not None else vllm.asks_spans
    tells_versions = vllm.has_label and tells_spans
    vllm.ends_requests |= not tells_versions and vllm.abort_route is not None
    vllm.capabilities = Capabilities(
        exact_versions=tells_versions or vllm.ends_requests,
        sleep="/sleep" in paths and bool((config.get("model_config") or {}).get("enable_sleep_mode")),
        sampling_mask=raw and sampling.temperature == 1,
    )
    return vllm


def _missing(
    kind: type[Vllm], paths: Collection[str], config: Mapping[str, Any], sampling: SamplingSettings
) -> list[str]:
    missing = [f"the route {route}: {remedy}" for route, remedy in kind.routes.items() if route not in paths]
    if not config:
        return missing
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if kind.backend and backend != kind.backend:
        missing.append(
            f"weight transfer by tailrace (it has {backend!r}): `pip install --no-deps tailrace` there, "
            f'and start it with --weight-transfer-config \'{{"backend":"{BACKEND}"}}\''
        )
    wanted = logprobs_mode(sampling)
    mode = (config.get("model_config") or {}).get("logprobs_mode", "raw_logprobs")
    if mode != wanted and (sampling.temperature != 1 or wanted == "raw_logprobs"):
        missing.append(f"log-probs of the right kind (it has {mode}): start it with --logprobs-mode {wanted}")
    return missing


async def _config(client: httpx.AsyncClient) -> Mapping[str, Any]:
    """The server's config; empty if it does not tell."""
    try:
        reply = await call(client, "GET", "/server_info", params={"config_format": "json"})
    except ServerRefused:
        return {}
    config = reply.get("vllm_config") if isinstance(reply, dict) else None
    return config if isinstance(config, dict) else {}


async def _stream(vllm: Vllm) -> str | None:
    """What GENERATE streams; None: it does not. Some versions have the route and refuse or do not stream, and
    no page says whether a stream has version spans."""
    attempt = Attempt("tailrace-stream", [0], 1, seed=0, greedy=True, salt="tailrace")
    vllm.route = GENERATE
    _, body = vllm.request(attempt)
    vllm.route = COMPLETIONS
    try:
        reply = await vllm.client.post(GENERATE, json=body, timeout=None)
    except httpx.HTTPError as error:
        raise EngineDied(f"{vllm.client.base_url}{GENERATE}: {describe(error)}") from error
    streams = reply.headers.get("content-type", "").startswith("text/event-stream")
    return reply.text if reply.status_code == 200 and streams else None


def _fields(schemas: Mapping[str, Any], name: str) -> Collection[str]:
    fields: Mapping[str, Any] = schemas.get(name, {}).get("properties", {})
    return fields


def _generate_logprobs(choice: Mapping[str, Any], ids: list[int]) -> list[float]:
    """Of /inference/v1/generate. Each entry names its token, as a number or as "token_id:N"."""
    entries = (choice.get("logprobs") or {}).get("content") or ()
    named = [entry.get("token_id", entry.get("token")) for entry in entries]
    if [int(str(name).removeprefix(_TOKEN_PREFIX)) for name in named] != ids:
        raise ValueError(f"the log-probs are of the tokens {named}, not of {ids}")
    return [float(entry["logprob"]) for entry in entries]


def _completion_logprobs(choice: Mapping[str, Any]) -> list[float]:
    return [float(each) for each in (choice.get("logprobs") or {}).get("token_logprobs") or ()]


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


async def detect_adapter(
    client: httpx.AsyncClient, sampling: SamplingSettings, end_of_text: Collection[int]
) -> VllmAdapters:
    """As `vllm.detect_as`. The server needs a route to abort a request: without it, a request that reaches
    the paused server would hold up the update for ever."""
    found = await detect_as(VllmAdapters, client, sampling, end_of_text)
    if found.abort_route is None:
        found.missing += ("the route /abort_requests: update vLLM",)
    return found
