"""The routes of Tinker's API that the released SDK calls."""

import secrets
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from tinker import types

from tailrace.engine.serve.app import error_reply, is_loopback, names_this_machine, openai_app
from tailrace.engine.settings import ServeSettings
from tailrace.tinker.service import Failed, TinkerService, Unknown
from tailrace.tinker.wire import NotOffered, parse_pass, read_pass, sampling_of
from tailrace.trainer.batch import AdamStep

M = TypeVar("M", bound=BaseModel)

KEY_HEADER, KEY_PREFIX = "x-api-key", "tml-"
POLL_S = 20.0
"""A reply to a client that waits for a result comes after this time; the SDK then asks again."""
MAX_SAMPLES = 1024
"""Samples of one request."""
OLDEST_SDK = (0, 38)
CONFIG = {"parallel_fwdbwd_chunks": False}  # passes are executed in the order in which they arrive


def make_app(service: TinkerService, settings: ServeSettings, key: str) -> FastAPI:
    """Return the application. On loopback any key will do: a page in a browser cannot send one. On another
    address it must be the server's."""
    is_local = is_loopback(settings.host)

    async def user(request: Request) -> None:
        given = request.headers.get(KEY_HEADER, "")
        is_near = is_local and names_this_machine(request)
        known = bool(given) if is_near else secrets.compare_digest(given.encode(), key.encode())
        if not known:
            raise HTTPException(401, f"this server needs its key in {KEY_HEADER}: ServiceClient(api_key=KEY)")

    app = openai_app([], max_body_bytes=settings.max_body_bytes)
    for kind in (NotOffered, Unknown):
        app.add_exception_handler(kind, error_reply(str))
    api = APIRouter(prefix="/api/v1", dependencies=[Depends(user)])
    _add_sessions(api, service)
    _add_training(api, service)
    _add_sampling(api, service)
    app.include_router(api)
    return app


async def read(kind: type[M], request: Request) -> M:
    """The body of a request as a message of the SDK. Raises NotOffered."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as why:
        defect = why.errors()[0]
        place, version = (".".join(map(str, each)) for each in (defect["loc"], OLDEST_SDK))
        raise NotOffered(
            f"{place}: {defect['msg']}; this server speaks the protocol of the SDK {version}"
        ) from why


def _add_sessions(api: APIRouter, service: TinkerService) -> None:
    @api.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @api.post("/client/config")
    async def config() -> dict[str, Any]:
        return CONFIG

    @api.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @api.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}

    @api.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        policy = service.policy
        has = {"model_name": policy.name, "max_context_length": policy.context}
        return {"supported_models": [{**has, "trainable": True, "sampleable": True}]}

    @api.post("/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        asked = await read(types.CreateSessionRequest, request)
        version = tuple(int(part) for part in asked.sdk_version.split(".")[:2] if part.isdigit())
        if version < OLDEST_SDK:
            oldest = ".".join(map(str, OLDEST_SDK))
            raise NotOffered(f"the SDK has version {asked.sdk_version}; pip install 'tinker>={oldest}'")
        return {"type": "create_session", "session_id": service.create_session()}

    @api.post("/session_heartbeat")
    async def heartbeat(request: Request) -> dict[str, str]:
        asked = await read(types.SessionHeartbeatRequest, request)
        try:
            service.heartbeat(asked.session_id)
        except Unknown as why:
            raise HTTPException(410, str(why)) from why
        return {"type": "session_heartbeat"}

    @api.post("/sessions/{session_id}/finish")
    async def finish(session_id: str) -> dict[str, str]:
        service.finish(session_id)
        return {}

    @api.post("/retrieve_future")
    async def retrieve(request: Request) -> Response:
        asked = await read(types.FutureRetrieveRequest, request)
        try:
            result = await service.result(asked.request_id, POLL_S)
        except Unknown as why:
            raise HTTPException(410, str(why)) from why
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        if result is None:
            again = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return Response(msgspec.json.encode(again), media_type="application/json")
        if isinstance(result, Failed):
            result = {"error": result.message, "category": "user" if result.is_users else "server"}
        return Response(msgspec.json.encode(result), media_type="application/json")

    @api.post("/cancel_future")
    async def cancel(request: Request) -> dict[str, str]:
        asked = await read(types.FutureRetrieveRequest, request)
        service.cancel(asked.request_id)
        return {}


def _add_training(api: APIRouter, service: TinkerService) -> None:
    def begun(model_id: str, seq_id: int | None, work: Any) -> dict[str, Any]:
        service.begin(request_id := f"{model_id}:{seq_id}", work)
        return {"request_id": request_id, "model_id": model_id}

    @api.post("/create_model")
    async def create_model(request: Request) -> dict[str, Any]:
        asked = await read(types.CreateModelRequest, request)
        if asked.optimizer_config.type != "adamw":
            raise NotOffered(f"optimizer_config: this server has adamw, not {asked.optimizer_config.type}")
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        rank = asked.lora_config.rank if asked.lora_config else None

        async def create() -> dict[str, str]:
            await service.create_model(model_id, asked.session_id, asked.base_model, rank)
            return {"model_id": model_id, "type": "create_model"}

        return begun(model_id, 0, create())

    @api.post("/load_weights")
    async def load(request: Request) -> dict[str, Any]:
        asked = await read(types.LoadWeightsRequest, request)
        model_id = asked.model_id or f"{asked.session_id}:train:{asked.model_seq_id}"

        async def restore() -> dict[str, Any]:
            await service.load_state(
                model_id, asked.path, optimizer=asked.optimizer, session_id=asked.session_id
            )
            return {"path": asked.path, "type": "load_weights"}

        return begun(model_id, asked.seq_id or 0, restore())

    @api.post("/get_info")
    async def info(request: Request) -> dict[str, Any]:
        asked = await read(types.GetInfoRequest, request)
        return service.info(asked.model_id)

    @api.post("/weights_info")
    async def weights_info() -> dict[str, Any]:
        lora = service.policy.lora
        rank = lora.rank if lora else None
        return {"base_model": service.policy.name, "is_lora": lora is not None, "lora_rank": rank}

    @api.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        message, policy = parse_pass(await request.body()), service.policy

        async def compute() -> bytes:
            asked = read_pass(message, vocabulary=policy.vocabulary, context=policy.context)
            return await service.run_pass(message.model_id, asked)

        return begun(message.model_id, message.seq_id, compute())

    @api.post("/optim_step")
    async def optim_step(request: Request) -> dict[str, Any]:
        asked = await read(types.OptimStepRequest, request)
        given = asked.optim_params
        if not isinstance(given, types.AdamParams):
            raise NotOffered(f"optim_params: this server has adamw, not {given.type}")
        betas = (given.beta1, given.beta2)
        adam = AdamStep(given.learning_rate, betas, given.eps, given.weight_decay, given.grad_clip_norm)
        return begun(asked.model_id, asked.seq_id, service.optim_step(asked.model_id, adam))

    @api.post("/save_weights")
    async def save(request: Request) -> dict[str, Any]:
        asked = await read(types.SaveWeightsRequest, request)
        name = asked.path or f"step-{asked.seq_id}"
        work = service.save_state(asked.model_id, name, overwrite=asked.overwrite)
        return begun(asked.model_id, asked.seq_id, work)

    @api.post("/save_weights_for_sampler")
    async def save_for_sampler(request: Request) -> dict[str, Any]:
        asked = await read(types.SaveWeightsForSamplerRequest, request)
        session_id = asked.model_id.partition(":")[0]
        work = service.save_for_sampler(
            asked.model_id,
            asked.path,
            sampler_id=f"{session_id}:sample:{asked.sampling_session_seq_id}",
            in_flight=asked.kind == "inflight",
        )
        return begun(asked.model_id, asked.seq_id, work)


def _add_sampling(api: APIRouter, service: TinkerService) -> None:
    @api.post("/create_sampling_session")
    async def create_sampler(request: Request) -> dict[str, Any]:
        asked = await read(types.CreateSamplingSessionRequest, request)
        id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        await service.create_sampler(id, asked.base_model, asked.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    @api.get("/samplers/{sampler_id}")
    async def sampler(sampler_id: str) -> dict[str, Any]:
        found = service.sampler(sampler_id)
        path = found.weights if found.weights.startswith("tinker://") else None
        return {"sampler_id": sampler_id, "base_model": service.policy.name, "model_path": path}

    @api.post("/asample")
    async def sample(request: Request) -> dict[str, Any]:
        asked = await read(types.SampleRequest, request)
        if asked.sampling_session_id is None:
            raise NotOffered("sampling_session_id: this server samples for sampling clients only")
        if not 1 <= asked.num_samples <= MAX_SAMPLES:
            raise NotOffered(f"num_samples = {asked.num_samples}: it must be 1 to {MAX_SAMPLES:,}")
        policy = service.policy

        async def generate() -> bytes:
            ids, sampling, greedy = sampling_of(asked, vocabulary=policy.vocabulary, context=policy.context)
            return await service.sample(
                asked.sampling_session_id,
                ids,
                asked.num_samples,
                sampling,
                greedy=greedy,
                seed=asked.sampling_params.seed,
                prompt_logprobs=bool(asked.prompt_logprobs),
            )

        service.begin(request_id := f"{asked.sampling_session_id}:{asked.seq_id}", generate())
        names = [f"{request_id}:{number}" for number in range(asked.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": names}
