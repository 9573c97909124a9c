"""The applications of OpenAI's routes: what all of them have, and that of `tailrace serve`."""

import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tailrace import __version__
from tailrace.drivers.data.encoding import Tokenizer, vocabulary_digest
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.errors import TransferFailed, WeightsRefused
from tailrace.extras.serve.control import Control, OfferedWeights
from tailrace.extras.serve.formats import first_defect
from tailrace.extras.serve.generation import Generation, ServedEngine, ServedModel, body_limit
from tailrace.extras.serve.settings import ServeSettings


def bearer(request: Request) -> str:
    """The token that a request bears; empty: none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def check_token(given: str, token: str, needed: str = "Authorization: Bearer TOKEN") -> None:
    """Raises HTTPException if a request does not bear the token. `needed`: where it belongs."""
    if not secrets.compare_digest(given.encode(), token.encode()):
        raise HTTPException(401, f"this needs the server's token: {needed}", {"WWW-Authenticate": "Bearer"})


def guarded(check: Callable[[Request], None]) -> type[APIRoute]:
    """Routes that check a request before its body is read."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def checked(request: Request) -> Response:
                check(request)
                return await handle(request)

            return checked

    return Guarded


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_near(request: Request, host: str) -> bool:
    """Return whether a server at `host` is on loopback, and the Host header names this machine. A page of
    another site that makes its own name mean this machine sends that name."""
    try:
        named = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return is_loopback(host) and is_loopback(named)


class RequestRefused(HTTPException):
    """A request is refused with OpenAI's name of the error, or ours."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(400, message)
        self.code = code


def openai_app(routers: Iterable[APIRouter], *, max_body_bytes: int) -> FastAPI:
    """Return an application of routers, which replies in OpenAI's form to what it refuses."""
    app = FastAPI(
        title="tailrace",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        max_body_size=max_body_bytes,
    )
    errors: Mapping[type[Exception], Callable[[Any], str]] = {
        HTTPException: lambda why: str(why.detail),
        RequestValidationError: first_defect,
        ClientDisconnect: lambda why: "the client has gone",
        UnicodeEncodeError: lambda why: "the text is not valid Unicode",
        WeightsRefused: str,
        TransferFailed: str,
    }
    for kind, message in errors.items():
        app.add_exception_handler(kind, error_reply(message))
    for router in routers:
        app.include_router(router)
    return app


def error_reply(message: Callable[[Any], str]) -> Callable[[Request, Exception], Response]:
    """Return what replies to an error, with its `status_code`, or 400."""

    def handle(request: Request, why: Exception) -> Response:
        status, headers = getattr(why, "status_code", 400), getattr(why, "headers", None)
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message(why), "type": kind, "param": None, "code": getattr(why, "code", status)}
        # In ASCII: messages may quote the client's.
        return Response(json.dumps({"error": error}), status, headers, media_type="application/json")

    return handle


def model_list(name: str, **more: object) -> dict[str, Any]:
    """Return the reply of /v1/models."""
    card = {"id": name, "object": "model", "created": 0, "owned_by": "tailrace", **more}
    return {"object": "list", "data": [card]}


def make_app(
    engine: ServedEngine, tokenizer: Tokenizer, model: ServedModel, settings: ServeSettings, token: str
) -> FastAPI:
    """Return the application of `tailrace serve`. Routes that change weights or state need the token. The
    others need it from requests that do not name this machine as their host; on an address that is not
    loopback all do but /health."""

    def owner(request: Request) -> None:
        check_token(bearer(request), token)

    def user(request: Request) -> None:
        if not is_near(request, settings.host):
            owner(request)

    health, users = APIRouter(), APIRouter(route_class=guarded(user))

    @health.get("/health")
    async def alive() -> Response:
        return Response()

    dtype = engine.job.engine.dtype
    offered = OfferedWeights(settings.weights_folder, expected_tensors(model.path, dtype))
    control = Control(engine, offered)
    generation = Generation(engine, control.labels, tokenizer, model)
    limit = min(settings.max_body_bytes, body_limit(model.context))
    generating = APIRouter(route_class=users.route_class, max_body_size=limit)
    owners = APIRouter(route_class=guarded(owner))
    generation.add_to(generating)
    control.add_to(owners)
    told: Mapping[str, Callable[..., object]] = {
        "/vocabulary": partial(vocabulary_digest, tokenizer),
        "/version": lambda: {"version": f"tailrace {__version__}"},
        "/v1/models": lambda: model_list(model.name, root=str(model.path), max_model_len=model.context),
        "/server_info": lambda: _server_info(model, dtype),
        "/is_paused": lambda: {"is_paused": control.paused},
        "/is_sleeping": lambda: {"is_sleeping": control.asleep},
        "/weight_info": lambda: {"weight_version": control.labels[-1]},
        "/openapi.json": lambda: app.openapi(),
    }
    for path, tell in told.items():
        users.add_api_route(path, tell, name=path)
    registry = CollectorRegistry()
    registry.register(_EngineMetrics(engine, model.name))

    @users.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    app = openai_app([health, users, generating, owners], max_body_bytes=settings.max_body_bytes)
    return app


def _server_info(model: ServedModel, dtype: str) -> dict[str, Any]:
    """The part of vLLM's reply that clients compare with their own model."""
    config = {
        "model": str(model.path),
        "dtype": f"torch.{dtype}",
        "max_model_len": model.context,
        "vocab_size": model.vocabulary,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": True,
    }
    return {"vllm_config": {"model_config": config, "weight_transfer_config": {"backend": "tailrace"}}}


class _EngineMetrics(Collector):
    """The load and the counters of the engine, under vLLM's names."""

    def __init__(self, engine: ServedEngine, name: str) -> None:
        self._engine, self._name = engine, name

    def collect(self) -> Iterable[Metric]:
        usage = self._engine.usage()
        share = usage.kv_tokens / self._engine.job.engine.kv_cache_tokens
        for kind, name, value, doc in (
            (GaugeMetricFamily, "num_requests_running", usage.num_running, "Requests that are decoded."),
            (GaugeMetricFamily, "num_requests_waiting", usage.num_waiting, "Requests that wait."),
            (GaugeMetricFamily, "kv_cache_usage_perc", share, "Share of the KV cache in use, up to 1."),
            (CounterMetricFamily, "prompt_tokens", self._engine.num_prompt_tokens, "Tokens of prompts."),
            (CounterMetricFamily, "generation_tokens", usage.num_generated, "Generated tokens."),
            (CounterMetricFamily, "num_preemptions", usage.num_preempted, "Preempted requests."),
        ):
            family = kind(f"vllm:{name}", doc, labels=["model_name"])
            family.add_metric([self._name], value)
            yield family
