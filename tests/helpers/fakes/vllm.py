"""The routes of vLLM, from 0.32 on, as in its packages."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from starlette.responses import JSONResponse, Response

from helpers.fakes.model import Request
from helpers.fakes.server import FakeServer, Refusal

_RL = (
    "/pause", "/resume", "/is_paused", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_info", "/abort_requests",
    "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/server_info",
)  # fmt: skip
"""Routes that exist only with VLLM_SERVER_DEV_MODE=1."""
_SCALE_OUT = ("/inference/v1/generate", "/inference/v1/abort_requests")
_ADAPTERS = {
    "/v1/load_lora_adapter": ("lora_name", "lora_path"),
    "/v1/unload_lora_adapter": ("lora_name",),
}

Body, Query = Mapping[str, Any], Mapping[str, str]


class FakeVllm(FakeServer):
    """One vLLM server.

    Args:
        dev_mode: it was started with VLLM_SERVER_DEV_MODE=1.
        scale_out: it was started with --enable-scale-out.
        backend: of --weight-transfer-config.
        adapters: it was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora.
    """

    def __init__(
        self,
        generation: str,
        model: Path,
        *,
        dev_mode: bool = True,
        scale_out: bool = True,
        backend: str | None = "tailrace",
        adapters: bool = False,
        logprobs_mode: str = "processed_logprobs",
        speculative: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(generation, model, **options)
        hidden = {*options.get("hidden", ()), *(() if dev_mode else _RL)}
        hidden |= set() if scale_out else set(_SCALE_OUT)
        self.page = type(self.page)(generation, hidden, _ADAPTERS if adapters else None)
        self.adapters: list[str] = []
        """Those that requests may name, in the order in which they were loaded."""
        self.backend, self.logprobs_mode, self.speculative = backend, logprobs_mode, speculative
        self.paused: str | None = None
        self.asleep = self.initialised = self.updating = False

    # -- what it is --------------------------------------------------------------------------------

    async def health(self, body: Body, query: Query) -> Response:
        return Response()

    async def version(self, body: Body, query: Query) -> Response:
        return JSONResponse({"version": self.generation.version})

    async def v1_models(self, body: Body, query: Query) -> Response:
        card = {"id": str(self.folder), "root": str(self.folder), "max_model_len": self.max_context}
        return JSONResponse({"object": "list", "data": [card]})

    async def server_info(self, body: Body, query: Query) -> Response:
        model_config = {
            "model": str(self.folder),
            "dtype": f"torch.{self.dtype}",
            "max_model_len": self.max_context,
            "logprobs_mode": self.logprobs_mode,
            "enable_sleep_mode": True,
        }
        transfer = {"backend": self.backend} if self.backend else None
        config = {"model_config": model_config, "weight_transfer_config": transfer}
        config["speculative_config"] = {"method": "ngram"} if self.speculative else None
        return JSONResponse({"vllm_config": config if query.get("config_format") == "json" else str(config)})

    # -- generation --------------------------------------------------------------------------------

    async def inference_v1_generate(self, body: Body, query: Query) -> Response:
        sampling = body["sampling_params"]
        request = self._request(f"generate-tokens-{body['request_id']}", body["token_ids"], body, sampling)
        assert body.get("stream"), "the fake has no other reply"
        return self.generation_reply(request, self._generate_events(request, body))

    async def _generate_events(self, request: Request, body: Body) -> AsyncIterator[Any]:
        async for sent in self.deltas(request):
            choice = self._generate_choice(request, sent)
            if not choice["token_ids"] and not request.finish:
                continue
            yield {"request_id": request.id, "choices": [choice]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {"request_id": request.id, "choices": [], "usage": _usage(request)}

    def _generate_choice(self, request: Request, sent: int) -> dict[str, Any]:
        tokens, logprobs = request.tokens[sent:], request.logprobs[sent:]
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        return {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": request.finish,
            "token_ids": tokens,
            "stop_reason": None,
            "sampling_mask": None,
            "weight_versions": request.spans() if request.finish else None,
        }

    def _request(self, id: str, ids: list[int], body: Body, sampling: Body) -> Request:
        self.refuse_if_due()
        if self.paused in ("abort", "wait") and self.generation.rejects_while_paused:
            message = "Generation is paused. Please retry after it resumes."
            raise Refusal(
                503, {"error": {"message": message, "type": "ServiceUnavailableError", "code": 503}}
            )
        if body.get("model") not in (None, str(self.folder), *self.adapters):
            raise Refusal(404, {"error": {"message": "The model does not exist.", "code": 404}})
        max_tokens = sampling.get("max_tokens") or 16
        if max(ids) >= self.model.vocabulary:
            message = f"Token id {max(ids)} is out of vocabulary"
            raise Refusal(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
        if len(ids) + max_tokens > self.max_context:
            raise Refusal(400, {"error": {"message": "the context is too long", "code": 400}})
        seed = None if sampling.get("temperature") == 0 else sampling.get("seed")
        stop_ids = frozenset(sampling.get("stop_token_ids") or ())
        strings = tuple(sampling.get("stop") or ())
        request = Request(id, list(ids), max_tokens, stop_ids, strings, seed, body.get("cache_salt") or "")
        self.model.add(request)
        return request

    async def abort_requests(self, body: Body, query: Query) -> Response:
        wanted = body.get("request_ids")
        found = [
            each for each in self.model.requests if each.finish is None and (not wanted or each.id in wanted)
        ]
        for request in found:
            self.model.abort(request)
        return JSONResponse({"status": "aborted", "aborted": len(found)})

    async def inference_v1_abort_requests(self, body: Body, query: Query) -> Response:
        if "request_ids" not in body:
            raise Refusal(400, {"detail": "Missing 'request_ids' in request body"})
        if body["request_ids"]:
            await self.abort_requests(body, query)
        return Response()

    # -- pause and sleep ---------------------------------------------------------------------------

    async def pause(self, body: Body, query: Query) -> Response:
        self.paused = query.get("mode", "abort")
        if self.paused == "abort":
            await self.abort_requests({}, {})
        while self.paused == "wait" and self.model.running:  # noqa: ASYNC110
            await asyncio.sleep(self.model.step_s)
        self._settle()
        if query.get("clear_cache", "true") == "true":
            self.model.retract()
            self.model.clear_cache()
        return JSONResponse({"status": "paused"})

    async def resume(self, body: Body, query: Query) -> Response:
        if self.updating:
            self.model.violations.append("resumed between start and finish of an update")
        self.paused = None
        self._settle()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, body: Body, query: Query) -> Response:
        return JSONResponse({"is_paused": self.paused is not None})

    async def sleep(self, body: Body, query: Query) -> Response:
        await self.abort_requests({}, {})
        self.asleep = True
        self.model.clear_cache()
        self.model.has_weights = query.get("level", "1") != "2"
        self._settle()
        return JSONResponse({"status": "sleeping"})

    async def wake_up(self, body: Body, query: Query) -> Response:
        self.asleep = False
        self._settle()
        return JSONResponse({"status": "awake"})

    async def is_sleeping(self, body: Body, query: Query) -> Response:
        return JSONResponse({"is_sleeping": self.asleep})

    async def reset_prefix_cache(self, body: Body, query: Query) -> Response:
        if not self.model.running:
            self.model.clear_cache()
        return JSONResponse({"success": not self.model.running})

    def _settle(self) -> None:
        self.model.stopped = self.hung or self.asleep or self.paused is not None

    # -- weights -----------------------------------------------------------------------------------

    async def init_weight_transfer_engine(self, body: Body, query: Query) -> Response:
        self._need(body, "init_info")
        if self.backend is None:
            raise _broken("Weight transfer is not configured")
        self.initialised = True
        return JSONResponse({"message": "Weight transfer initialized"})

    async def start_weight_update(self, body: Body, query: Query) -> Response:
        if self.updating:
            raise _broken("start_weight_update called while a weight update is already active.")
        self.updating = True
        return JSONResponse({"message": "Weight update started"})

    async def update_weights(self, body: Body, query: Query) -> Response:
        self._need(body, "update_info")
        if not self.initialised or not self.updating:
            raise _broken("start_weight_update must be called before update_weights.")
        if not self.model.stopped:
            self.model.violations.append("weights were updated under running requests")
        info = body["update_info"]["weights"]
        location = Path(info["location"])
        files = list(location.glob("*.safetensors")) if location.is_dir() else [location]
        if defect := self.load(files, int(info["version"])):
            self.updating = False
            raise _broken(defect)
        return JSONResponse({"message": "Weights updated"})

    async def finish_weight_update(self, body: Body, query: Query) -> Response:
        if not self.updating:
            raise _broken("finish_weight_update called without a matching start_weight_update.")
        self.updating = False
        self.model.label = body.get("weight_version") or self.model.label
        return JSONResponse({"message": "Weight update finished"})

    async def update_weight_version(self, body: Body, query: Query) -> Response:
        self.model.label = body["new_version"]
        return JSONResponse({"success": True, "new_version": self.model.label})

    async def weight_info(self, body: Body, query: Query) -> Response:
        return JSONResponse({"weight_version": self.model.label})

    async def v1_load_lora_adapter(self, body: Body, query: Query) -> Response:
        """The fake has one version at a time, so no request may live through a change of the adapter."""
        if body["lora_name"] in self.adapters:
            raise Refusal(400, {"error": {"message": "has already been loaded", "code": 400}})
        if self._due("failing_updates"):
            raise _broken("the adapter cannot be loaded")
        if any(each.finish is None for each in self.model.requests):
            self.model.violations.append("an adapter was loaded under requests")
        folder = Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        if any(config["r"] not in tensor.shape for tensor in tensors.values()):
            raise _broken("the rank is not that of the config")
        self.adapters.append(body["lora_name"])
        self.model.version = int(folder.name.rpartition("-")[2])
        return JSONResponse("Success")

    async def v1_unload_lora_adapter(self, body: Body, query: Query) -> Response:
        if body["lora_name"] not in self.adapters:
            raise Refusal(404, {"error": {"message": "cannot be found", "code": 404}})
        self.adapters.remove(body["lora_name"])
        return JSONResponse("Success")

    def _need(self, body: Body, name: str) -> None:
        if name not in body:
            raise Refusal(400, {"detail": f"Missing '{name}' in request body"})


def _broken(message: str) -> Refusal:
    return Refusal(500, {"error": {"message": message, "type": "InternalServerError", "code": 500}})


def _usage(request: Request) -> dict[str, Any]:
    return {
        "prompt_tokens": len(request.ids),
        "completion_tokens": len(request.tokens),
        "total_tokens": len(request.ids) + len(request.tokens),
        "prompt_tokens_details": {"cached_tokens": request.num_cached},
    }
