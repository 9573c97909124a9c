"""The routes that only tell: health, model, metrics."""

import json
from typing import Any

from fastapi import APIRouter, Response

from tailrace import __version__
from tailrace.engine.serve.base import ComputingEngine
from tailrace.engine.serve.requests import Requests
from tailrace.engine.serve.settings import ServedModel, ServeSettings


def info_routes(
    requests: Requests, engine: ComputingEngine, model: ServedModel, settings: ServeSettings
) -> APIRouter:
    """Make the router."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return Response()

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": f"tailrace {__version__}"}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {
            "id": settings.served_model_name,
            "object": "model",
            "created": 0,
            "owned_by": "tailrace",
            "root": str(model.path),
            "max_model_len": model.max_model_len,
        }
        return {"object": "list", "data": [card]}

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """The part of vLLM's reply that clients compare with their own model."""
        config = {
            "model": str(model.path),
            "dtype": f"torch.{model.dtype}",
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": True,
        }
        return {"vllm_config": {"model_config": config, "weight_transfer_config": {"backend": "tailrace"}}}

    @router.get("/get_world_size")
    async def world_size() -> dict[str, int]:
        return {"world_size": 1}

    @router.get("/metrics")
    async def metrics() -> Response:
        usage = engine.usage()
        lines = []
        for name, kind, value in (
            ("num_requests_running", "gauge", usage.num_running),
            ("num_requests_waiting", "gauge", usage.num_waiting),
            ("kv_cache_usage_perc", "gauge", usage.kv_tokens / model.kv_cache_tokens),
            ("prompt_tokens_total", "counter", requests.num_prompt_tokens),
            ("generation_tokens_total", "counter", usage.num_generated),
            ("num_preemptions_total", "counter", usage.num_preempted),
        ):
            label = f"{{model_name={json.dumps(settings.served_model_name)}}}"
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{label} {value}"]
        return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    return router
