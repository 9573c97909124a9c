"""vLLM over HTTP, from 0.32 on, and the command line of a server that a run starts.

With LoRA each publication can be an adapter. It is loaded by /v1/load_lora_adapter under a name of its own,
and a request names the adapter with which it is served. An update ends the requests in flight, and they go on
from their tokens under the new adapter; those of pinned samples go on under their own, which the server keeps
(`trainer.lora.versions`). So each request has one version, whatever the server says about the weights below
the adapter.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import inf, nan
from pathlib import Path
from typing import Any, ClassVar

import httpx
from typing_extensions import override

import tailrace
from tailrace.contracts.engine import Capabilities
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import LoraSettings
from tailrace.contracts.weights import Link, Weights
from tailrace.drivers.engine.native.matches import LENGTHS
from tailrace.drivers.engine.probes import SCORED
from tailrace.errors import ConfigError, ServerRefused
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
from tailrace.extras.http.settings import VllmEngineSettings
from tailrace.extras.http.vllm_plugin import BACKEND
from tailrace.importing import source
from tailrace.types import KV

PREFIX = 276
"""Tokens of a probe before those that are scored: its prefix cache counts in blocks, of up to 256 tokens."""
OLDEST = (0, 32)
"""The oldest version: it says which weights generated each token."""
GENERATE, ABORT = "/inference/v1/generate", "/abort_requests"
_DEV_MODE = "start the server with the environment variable VLLM_SERVER_DEV_MODE=1"
_SCALE_OUT = "start the server with --enable-scale-out"
_WRONG_DRAFTS = "reports wrong log-probs with drafts at a temperature other than 1, and with top_k it ends"
_ABSENT = -9999.0
"""The log-prob that vLLM writes where it has none."""


def logprobs_mode(sampling: SamplingSettings, *, drafts: bool) -> str:
    """The mode in which log-probs are those of the whole vocabulary at the sampling temperature.

    Raw log-probs leave the temperature out. Processed ones are renormalised over what top_p and top_k keep,
    and wrong with drafts: version 0.32 then reports 0 and -9999 for likely tokens.
    """
    truncated = sampling.top_p < 1 or sampling.top_k > 0
    return "raw_logprobs" if truncated or drafts else "processed_logprobs"


def check_sampling(sampling: SamplingSettings) -> None:
    """Raises a ConfigError for top_p or top_k together with a temperature: vLLM cannot give the log-probs of
    the policy then."""
    if logprobs_mode(sampling, drafts=False) == "raw_logprobs" and sampling.temperature != 1:
        key, value = ("top_p", sampling.top_p) if sampling.top_p < 1 else ("top_k", sampling.top_k)
        problem = (
            "vLLM reports the log-probs of what remains after it, or those without the temperature; both are "
            "not those of the policy that is trained"
        )
        raise ConfigError(f"sampling.{key}", value, problem, "remove it, or set sampling.temperature = 1")


def check_drafts(settings: VllmEngineSettings, sampling: SamplingSettings) -> None:
    """Raises a ConfigError for drafts that the run cannot have."""
    if settings.drafts == "off":
        return
    if settings.urls:
        problem = "the run does not start the servers of engine.urls"
        remedy = 'write "off", and start them with --speculative-config'
        raise ConfigError("engine.drafts", settings.drafts, problem, remedy)
    if not _drafts_are_right(sampling):
        problem = f"vLLM 0.32 {_WRONG_DRAFTS}"
        remedy = 'write "off", or set sampling.temperature = 1, top_p = 1 and top_k = 0'
        raise ConfigError("engine.drafts", settings.drafts, problem, remedy)


def _drafts_are_right(sampling: SamplingSettings) -> bool:
    return sampling.temperature == 1 and logprobs_mode(sampling, drafts=False) == "processed_logprobs"


@dataclass(slots=True, kw_only=True)
class Vllm(Dialect):
    """The dialect of one vLLM server. Made by `detect`."""

    model_name: str
    alive_route: str | None = "/health"
    _initialised: bool = field(default=False, init=False)
    routes: ClassVar[Mapping[str, str]] = {GENERATE: _SCALE_OUT} | dict.fromkeys(
        (ABORT, "/pause", "/resume", "/init_weight_transfer_engine", "/update_weights"), _DEV_MODE
    )
    """Routes that a run needs, each with the option that adds it."""
    backend: ClassVar[str | None] = BACKEND
    """Backend of weight transfer; None: any."""

    @override
    def request(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
        """The request has no seed. With one, vLLM draws for each request alone, which is slow, and its noise
        would still depend on interruptions. On a CPU, version 0.32 dies if it computes the prompt of such a
        request in parts (`CPU Generator does not use offset`)."""
        sampling: dict[str, Any] = {
            "max_tokens": attempt.max_tokens,
            "temperature": attempt.temperature_or(self.sampling.temperature),
            "top_p": attempt.top_p or self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "logprobs": 1,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": True,  # the ids above are all that end a completion
            "skip_special_tokens": False,
            "detokenize": bool(self.sampling.stop),
        }
        if self.sampling.stop:
            sampling["stop"] = list(self.sampling.stop)
        return GENERATE, {
            "request_id": attempt.id,
            "model": self.model_name,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": attempt.salt,
            "token_ids": list(attempt.ids),
            "sampling_params": sampling,
        }

    @override
    def chunk(self, event: Mapping[str, Any], num_received: int) -> Chunk:
        if error := event.get("error"):
            raise ServerRefused(GENERATE, int(error.get("code") or 500), str(error.get("message")))
        cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        if not event["choices"]:
            return Chunk(num_cached=cached)
        (choice,) = event["choices"]
        ids = list(choice.get("token_ids") or ())
        entries = (choice.get("logprobs") or {}).get("content") or ()
        logprobs = [float(entry["logprob"]) for entry in entries]
        if [entry["token_id"] for entry in entries] != ids or _ABSENT in logprobs:
            raise ValueError(f"the tokens {ids} came with the log-probs {entries}")
        finish, spans = finish_of(choice.get("finish_reason")), spans_of(choice.get("weight_versions"))
        return Chunk(ids, logprobs, finish, spans, cached)

    @override
    async def score(self, attempt: Attempt, num_prefix: int, *, cached: bool) -> list[float]:
        """Log-probs of a prompt are those of a temperature of 1."""
        route, body = self.request(attempt)
        del body["stream_options"]
        asked = {"max_tokens": 1, "prompt_logprobs": 0, "skip_reading_prefix_cache": not cached}
        body |= {"stream": False, "sampling_params": body["sampling_params"] | asked}
        scored = range(num_prefix, len(attempt.ids))
        try:
            rows = (await call(self.client, "POST", route, body=body))["prompt_logprobs"]
        except ServerRefused as refused:
            if "not JSON compliant" not in refused.reply:
                raise
            return [nan for _ in scored]  # vLLM cannot write what it has computed
        return [float(rows[place][str(attempt.ids[place])]["logprob"]) for place in scored]

    @override
    async def abort(self, attempt: Attempt) -> bool:
        names = [f"generate-tokens-{attempt.id}"]
        await call(self.client, "POST", ABORT, body={"request_ids": names}, timeout_s=5.0)
        return True

    @override
    async def pause(self, kv: KV) -> None:
        """The reply comes once no batch is being computed."""
        clear = "true" if kv == "recompute" else "false"
        await call(self.client, "POST", "/pause", params={"mode": "keep", "clear_cache": clear})

    @override
    async def resume(self) -> None:
        await call(self.client, "POST", "/resume")

    @override
    async def update(self, weights: Weights, link: Link) -> None:
        """Needs the backend of extras/http/vllm_plugin.py."""
        if not self._initialised:
            await call(self.client, "POST", "/init_weight_transfer_engine", body={"init_info": {}})
            self._initialised = True
        start, finish = "/start_weight_update", "/finish_weight_update"
        try:
            await call(self.client, "POST", start)
        except ServerRefused:  # an update that this or another client gave up is still open
            await call(self.client, "POST", finish, body={})
            await call(self.client, "POST", start)
        info = {"weights": asdict(replace(weights, probe=None)), "link": list(link)}
        await call(self.client, "POST", "/update_weights", body={"update_info": info})
        await call(self.client, "POST", finish, body={"weight_version": label_of(weights.version)})

    @override
    async def sleep(self) -> None:
        """Level 1 keeps the weights in host memory."""
        await call(self.client, "POST", "/sleep", params={"level": "1"})

    @override
    async def wake(self) -> None:
        await call(self.client, "POST", "/wake_up")

    @override
    async def health(self) -> None:
        """The second route asks the process that computes."""
        await call(self.client, "GET", "/health")
        await call(self.client, "GET", "/is_paused")


async def detect(
    client: httpx.AsyncClient,
    sampling: SamplingSettings,
    end_of_text: Collection[int],
    *,
    num_adapters: int = 0,
) -> Vllm:
    """Find out what a server can do.

    Args:
        end_of_text: the model's tokens that end a text.
        num_adapters: LoRA adapters that it keeps, in place of whole weights; 0: it gets whole weights.

    Raises:
        EngineDied: it cannot be reached.
        ServerRefused: it is no vLLM server.
    """
    kind = VllmAdapters if num_adapters else Vllm
    page = await call(client, "GET", "/openapi.json") or {}
    version = str((await call(client, "GET", "/version") or {}).get("version", ""))
    models = await call(client, "GET", "/v1/models") or {}
    (card, *_) = models.get("data") or [{}]
    paths = page.get("paths", {})
    config = await _config(client) if "/server_info" in paths else {}
    model_config = config.get("model_config") or {}
    dtype, raw = model_config.get("dtype"), model_config.get("logprobs_mode") == "raw_logprobs"
    fits = (card.get("max_model_len") or inf) > PREFIX + SCORED
    dialect = kind(
        client=client,
        sampling=sampling,
        stop_token_ids=sorted({*end_of_text, *sampling.stop_token_ids}),
        server=f"vLLM {version or 'of an unknown version'}",
        model_name=str(card.get("id", "")),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        max_context=card.get("max_model_len"),
        capabilities=Capabilities(
            exact_versions=True,
            sleep="/sleep" in paths and bool(model_config.get("enable_sleep_mode")),
            sampling_mask=raw and sampling.temperature == 1,
            top_p=True,
            drafts=bool(config.get("speculative_config")),
            scores=_numbers(version) is not None and sampling.temperature == 1 and fits,
        ),
        missing=tuple(_missing(kind, version, paths, config, sampling)),
    )
    if isinstance(dialect, VllmAdapters):
        dialect.keep(num_adapters, (config.get("lora_config") or {}).get("max_loras", num_adapters))
    return dialect


def _missing(
    kind: type[Vllm],
    version: str,
    paths: Collection[str],
    config: Mapping[str, Any],
    sampling: SamplingSettings,
) -> list[str]:
    if (numbers := _numbers(version)) and numbers < OLDEST:
        return [f"what came with vLLM {OLDEST[0]}.{OLDEST[1]}: update vLLM"]
    missing = [f"the route {route}: {remedy}" for route, remedy in kind.routes.items() if route not in paths]
    if not config:
        return missing
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if kind.backend and backend != kind.backend:
        missing.append(
            f"weight transfer by tailrace (it has {backend!r}): `pip install --no-deps {source()}` there, "
            f'and start it with --weight-transfer-config \'{{"backend":"{BACKEND}"}}\''
        )
    drafts = bool(config.get("speculative_config"))
    if drafts and not _drafts_are_right(sampling):
        missing.append(f"drafts that are right (it {_WRONG_DRAFTS}): start it without --speculative-config")
    wanted = logprobs_mode(sampling, drafts=drafts)
    mode = (config.get("model_config") or {}).get("logprobs_mode", "raw_logprobs")
    if mode != wanted and (sampling.temperature != 1 or wanted == "raw_logprobs"):
        missing.append(f"log-probs of the right kind (it has {mode}): start it with --logprobs-mode {wanted}")
    return missing


def _numbers(version: str) -> tuple[int, ...] | None:
    """Parse a version. None: it is no vLLM; `tailrace serve` says that it is tailrace."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else None


async def _config(client: httpx.AsyncClient) -> Mapping[str, Any]:
    """The server's config; empty if it does not tell."""
    try:
        reply = await call(client, "GET", "/server_info", params={"config_format": "json"})
    except ServerRefused:
        return {}
    config = reply.get("vllm_config") if isinstance(reply, dict) else None
    return config if isinstance(config, dict) else {}


RUNTIME_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_ADAPTERS = f"start the server with {RUNTIME_ADAPTERS}=1, --enable-lora and --max-lora-rank"
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM allows as the highest rank."""


def max_rank(rank: int) -> int | None:
    """Return the least highest rank of a server that takes adapters of a rank; None: there is none."""
    return next((limit for limit in MAX_RANKS if rank <= limit), None)


@dataclass(slots=True, kw_only=True)
class VllmAdapters(Vllm):
    """vLLM with adapters. Before the first update requests are served without an adapter."""

    ends_requests: bool = True
    num_versions: int = field(default=1, init=False)
    _adapters: dict[int, str] = field(default_factory=dict, init=False)
    """The names of the adapters of the last versions, the newest last; of version 0, that of the model."""
    routes: ClassVar[Mapping[str, str]] = {
        GENERATE: _SCALE_OUT,
        ABORT: _DEV_MODE,
        **dict.fromkeys((_LOAD, _UNLOAD), _ADAPTERS),
    }
    backend: ClassVar[str | None] = None

    def keep(self, num: int, places: int) -> None:
        """Keep so many adapters, if the server has places for them."""
        self.num_versions, self._adapters = num, {0: self.model_name}
        if places < num:
            what = f"places for {num} adapters (it has {places})"
            self.missing += (f"{what}: start it with --max-loras {num} --max-cpu-loras {num + 1}",)

    @override
    def request(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
        route, body = Vllm.request(self, attempt)
        version = next(reversed(self._adapters)) if attempt.version is None else attempt.version
        return route, body | {"model": self._adapters[version]}

    @override
    def chunk(self, event: Mapping[str, Any], num_received: int) -> Chunk:
        """The server's version spans are those of the weights below the adapter."""
        return replace(Vllm.chunk(self, event, num_received), spans=())

    @override
    async def pause(self, kv: KV) -> None:
        """Requests go on under the adapters that they name."""

    @override
    async def resume(self) -> None:
        """There was no pause."""

    @override
    async def update(self, weights: Weights, link: Link) -> None:
        """A name is never used twice: the server may keep what it knows under it. It drops
        the tensors of an older adapter when it needs their place (`--max-loras`, `--max-cpu-loras`)."""
        name = f"tailrace-{weights.version}-{os.urandom(6).hex()}"
        await call(self.client, "POST", _LOAD, body={"lora_name": name, "lora_path": weights.location})
        old = [self._adapters.pop(weights.version, self.model_name)]
        self._adapters[weights.version] = name
        while len(self._adapters) > self.num_versions:
            old.append(self._adapters.pop(next(iter(self._adapters))))
        for each in (name for name in old if name != self.model_name):
            with suppress(ServerRefused):  # it has forgotten the name already; the new adapter is loaded
                await call(self.client, "POST", _UNLOAD, body={"lora_name": each})


def launch(
    settings: VllmEngineSettings,
    sampling: SamplingSettings,
    *,
    model: Path,
    max_context: int,
    port: int,
    plugins: Path,
    seed: int = 0,
    adapter: LoraSettings | None = None,
) -> Launch:
    """The command line of one server on the loopback interface. Raises a ConfigError as `find_interpreter`.

    Args:
        max_context: tokens of a prompt and its completion together.
        plugins: the folder that `write_plugin` has written.
        seed: of the sampling noise. Two replicas with one seed would draw the same noise.
        adapter: it gets adapters of these settings in place of whole weights. Host memory has a place more
            than the versions that it keeps, so that none leaves for the next one.
    """
    flags = {
        "--model": str(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--seed": str(seed),
        "--dtype": settings.dtype,
        "--max-model-len": str(max_context),
        "--max-num-seqs": str(settings.max_num_seqs),
        "--tensor-parallel-size": str(settings.tensor_parallel_size),
        "--logprobs-mode": logprobs_mode(sampling, drafts=settings.drafts != "off"),
        "--weight-transfer-config": json.dumps({"backend": BACKEND}),
    }
    if settings.drafts == "auto":
        least, most = min(LENGTHS), max(LENGTHS)
        drafted: dict[str, object] = {"method": "ngram", "num_speculative_tokens": settings.max_draft_tokens}
        drafted |= {"prompt_lookup_min": least, "prompt_lookup_max": most}
        flags["--speculative-config"] = json.dumps(drafted)
    words = [word for flag in flags.items() for word in flag]
    words += ["--enable-prompt-tokens-details", "--enable-scale-out"]
    env = {"PYTHONPATH": str(plugins), "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    if adapter:
        words += ["--enable-lora", "--max-lora-rank", str(max_rank(adapter.rank))]
        words += ["--max-loras", str(adapter.versions), "--max-cpu-loras", str(adapter.versions + 1)]
        env[RUNTIME_ADAPTERS] = "1"
    command = (find_interpreter(settings), "-m", "vllm.entrypoints.openai.api_server", *words, *settings.args)
    return Launch(command, env | settings.env)


def write_plugin(folder: Path) -> Path:
    """Make this package a plug-in of vLLM for every Python that has the folder on its PYTHONPATH.

    The folder has nothing but this package and its entry point, so that a server sees no other package of
    this process's environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / "tailrace"
    package.unlink(missing_ok=True)
    package.symlink_to(Path(tailrace.__file__).parent)
    info = folder / "tailrace_plugin-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_bytes(b"Metadata-Version: 2.1\nName: tailrace-plugin\nVersion: 0\n")
    entry = f"{BACKEND} = tailrace.extras.http.vllm_plugin:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n", encoding="utf-8")
    return folder
