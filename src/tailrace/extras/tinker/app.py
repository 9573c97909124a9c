"""The routes of Tinker's API that the released SDK calls."""

import re
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from tinker import types

from tailrace.extras.serve.app import check_token, error_reply, is_near, openai_app
from tailrace.extras.serve.formats import parsed, read
from tailrace.extras.serve.generation import body_limit
from tailrace.extras.serve.settings import ServeSettings
from tailrace.extras.tinker.service import Busy, Execute, Failed, TinkerService, Unknown
from tailrace.extras.tinker.wire import NotOffered, Pass, adam_step, head_of_pass, read_pass, sampling_of

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

    async def user(request: Request) -> None:
        given = request.headers.get(KEY_HEADER, "")
        if not (given and is_near(request, settings.host)):
            check_token(given, key, f"{KEY_HEADER}: ServiceClient(api_key=KEY)")

    app = openai_app([], max_body_bytes=settings.max_body_bytes)
    for kind in (NotOffered, Unknown, Busy):
        app.add_exception_handler(kind, error_reply(str))
    api = APIRouter(
        prefix="/api/v1", dependencies=[Depends(user)], max_body_size=body_limit(service.policy.context)
    )
    _add_sessions(api, service)
    _add_training(api, service, settings.own_stable_reinforce)
    _add_sampling(api, service, settings.own_stable_reinforce)
    app.include_router(api)
    return app


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
        found = re.match(r"([0-9]{1,6})\.([0-9]{1,6})", asked.sdk_version)
        if found is None or tuple(map(int, found.groups())) < OLDEST_SDK:
            oldest = ".".join(map(str, OLDEST_SDK))
            raise NotOffered(f"the SDK has version {asked.sdk_version}; pip install 'tinker>={oldest}'")
        return {"type": "create_session", "session_id": service.create_session()}

    @api.post("/session_heartbeat")
    async def heartbeat(request: Request) -> dict[str, str]:
        asked = await read(types.SessionHeartbeatRequest, request)
        try:
            service.session(asked.session_id)
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


def _add_training(api: APIRouter, service: TinkerService, own_stable_reinforce: bool) -> None:
    async def begun(request: Request, model_id: str, seq_id: int | None, work: Execute) -> dict[str, Any]:
        request_id = service.begin(model_id, seq_id, await request.body(), work)
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

        return await begun(request, model_id, 0, create)

    @api.post("/load_weights")
    async def load(request: Request) -> dict[str, Any]:
        asked = await read(types.LoadWeightsRequest, request)
        if asked.model_id is None:
            model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        elif asked.session_id is None:
            model_id = service.check_model(asked.model_id).model_id
        else:
            raise NotOffered("model_id: a request that names a session makes a new one; leave it out")

        async def restore() -> dict[str, Any]:
            await service.load_state(
                model_id, asked.path, optimizer=asked.optimizer, session_id=asked.session_id
            )
            return {"path": asked.path, "type": "load_weights"}

        return await begun(request, model_id, asked.seq_id or 0, restore)

    @api.post("/get_info")
    async def info(request: Request) -> dict[str, Any]:
        asked = await read(types.GetInfoRequest, request)
        return service.info(asked.model_id)

    @api.post("/weights_info")
    async def weights_info() -> dict[str, Any]:
        lora = service.policy.lora
        rank = lora.rank if lora else None
        return {"base_model": service.policy.name, "is_lora": lora is not None, "lora_rank": rank}

    @api.post("/forward_backward", max_body_size=8 * body_limit(service.policy.context))  # the SDK: 5 MB
    async def forward_backward(request: Request) -> dict[str, Any]:
        body, policy = await request.body(), service.policy
        model_id, seq_id = await parsed(head_of_pass, body)
        service.check_model(model_id)

        async def read() -> Pass:
            reading = partial(
                read_pass,
                vocabulary=policy.vocabulary,
                context=policy.context,
                own_stable_reinforce=own_stable_reinforce,
            )
            return await parsed(reading, body)

        return await begun(request, model_id, seq_id, lambda: service.run_pass(model_id, read))

    @api.post("/optim_step")
    async def optim_step(request: Request) -> dict[str, Any]:
        asked = await read(types.OptimStepRequest, request)
        adam, model_id = adam_step(asked.optim_params), service.check_model(asked.model_id).model_id
        return await begun(request, model_id, asked.seq_id, lambda: service.optim_step(model_id, adam))

    @api.post("/save_weights")
    async def save(request: Request) -> dict[str, Any]:
        asked = await read(types.SaveWeightsRequest, request)
        name, model_id = asked.path or f"step-{asked.seq_id}", service.check_model(asked.model_id).model_id
        work = partial(service.save_state, model_id, name, overwrite=asked.overwrite)
        return await begun(request, model_id, asked.seq_id, work)

    @api.post("/save_weights_for_sampler")
    async def save_for_sampler(request: Request) -> dict[str, Any]:
        asked = await read(types.SaveWeightsForSamplerRequest, request)
        model_id, session_id = service.check_model(asked.model_id)
        work = partial(
            service.save_for_sampler,
            model_id,
            asked.path,
            sampler_id=f"{session_id}:sample:{asked.sampling_session_seq_id}",
            in_flight=asked.kind == "inflight",
        )
        return await begun(request, model_id, asked.seq_id, work)


def _add_sampling(api: APIRouter, service: TinkerService, own_stable_reinforce: bool) -> None:
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
        policy, sampler_id = service.policy, asked.sampling_session_id
        service.sampler(sampler_id)

        async def generate() -> bytes:
            ids, sampling, greedy = sampling_of(
                asked,
                vocabulary=policy.vocabulary,
                context=policy.context,
                own_stable_reinforce=own_stable_reinforce,
            )
            return await service.sample(
                sampler_id,
                ids,
                asked.num_samples,
                sampling,
                greedy=greedy,
                seed=asked.sampling_params.seed,
                prompt_logprobs=bool(asked.prompt_logprobs),
            )

        body, num = await request.body(), asked.num_samples
        request_id = service.begin(sampler_id, asked.seq_id, body, generate, num)
        names = [f"{request_id}:{number}" for number in range(asked.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": names}
