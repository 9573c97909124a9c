"""The routes of SGLang, 0.5.20 to 0.5.23, as in its packages."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response

from helpers.fakes.model import Request
from helpers.fakes.server import FakeServer, Refusal

HEALTH_S, HEALTH_TIMEOUT_S = 0.05, 1.0
"""A real server needs at least 1 second for /health, and gives up after 20."""

Body, Query = Mapping[str, Any], Mapping[str, str]


class FakeSglang(FakeServer):
    """One SGLang server.

    Args:
        overlap: it was started without --disable-overlap-schedule.
        incremental: it was started with --incremental-streaming-output.
        memory_saver: it was started with --enable-memory-saver.
        lies: an update that fails is answered with status 200 and success false.
    """

    def __init__(
        self,
        generation: str,
        model: Path,
        *,
        overlap: bool = False,
        incremental: bool = False,
        memory_saver: bool = True,
        lies: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(generation, model, **options)
        self.overlap, self.incremental, self.memory_saver, self.lies = (
            overlap,
            incremental,
            memory_saver,
            lies,
        )
        self.model_path, self.model.limits_first = model, True
        self.paused: str | None = None
        self.released = False
        self.known: dict[str, Request] = {}
        """Requests that the scheduler has, by id."""

    # -- what it is --------------------------------------------------------------------------------

    async def health(self, body: Body, query: Query) -> Response:
        """It generates a token, which a paused server does not."""
        await asyncio.sleep(HEALTH_TIMEOUT_S if self.model.stopped else HEALTH_S)
        return Response(status_code=503 if self.model.stopped else 200)

    async def model_info(self, body: Body, query: Query) -> Response:
        return JSONResponse({"model_path": str(self.model_path), "weight_version": self.model.label})

    async def server_info(self, body: Body, query: Query) -> Response:
        flags = {
            "dtype": self.dtype,
            "disable_overlap_schedule": not self.overlap,
            "incremental_streaming_output": self.incremental,
            "enable_memory_saver": self.memory_saver,
        }
        return JSONResponse({**flags, "version": self.generation.version, "internal_states": [{}]})

    async def v1_models(self, body: Body, query: Query) -> Response:
        return JSONResponse({"data": [{"id": str(self.folder), "max_model_len": self.max_context}]})

    # -- generation --------------------------------------------------------------------------------

    async def generate(self, body: Body, query: Query) -> Response:
        self.refuse_if_due()
        sampling, rid, ids = body["sampling_params"], body["rid"], list(body["input_ids"])
        if rid in self.known and self.known[rid].finish is None:
            raise Refusal(400, {"error": {"message": f"Duplicate request ID: {rid}"}})
        stop_ids = (
            frozenset() if sampling.get("ignore_eos") else frozenset(sampling.get("stop_token_ids") or ())
        )
        seed = None if sampling.get("temperature") == 0 else sampling.get("sampling_seed")
        salt = body.get("cache_salt") or body.get("extra_key") or ""
        strings = tuple(sampling.get("stop") or ())
        request = Request(rid, ids, sampling.get("max_new_tokens", 128), stop_ids, strings, seed, salt)
        return self.generation_reply(request, self._events(request))

    async def _events(self, request: Request) -> AsyncIterator[Any]:
        if max(request.ids) >= self.model.vocabulary:
            message = f"The input_ids contain values greater than the vocab size ({self.model.vocabulary})."
            yield {"error": {"message": message, "type": "invalid_request_error", "code": 400}}
            return
        while self.paused:  # noqa: ASYNC110  # the scheduler does not have it yet
            await asyncio.sleep(self.model.step_s)
        self.known[request.id] = request
        self.model.add(request)
        async for sent in self.deltas(request):
            yield self._event(request, sent if self.incremental else 0)

    def _event(self, request: Request, start: int) -> dict[str, Any]:
        finish = request.finish and {"type": request.finish}
        if request.finish == "abort":
            finish = {"type": "abort", "message": "Abort in waiting queue"}
        ids, logprobs = request.tokens[start:], request.logprobs[start:]
        meta = {
            "id": request.id,
            "finish_reason": finish or None,
            "prompt_tokens": len(request.ids),
            "completion_tokens": len(request.tokens),
            "cached_tokens": request.num_cached,
            "weight_version": self.model.label,
            "output_token_logprobs": [[lp, id, None] for lp, id in zip(logprobs, ids, strict=True)],
            "output_token_logprobs_length": len(ids),
        }
        if request.finish:
            spans = request.spans() or [{"version": self.model.label, "start": 0, "end": 0}]
            meta["weight_versions"] = spans
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def abort_request(self, body: Body, query: Query) -> Response:
        rid = body.get("rid") or ""
        for id, request in self.known.items():
            if body.get("abort_all") or (rid in self.known and id.startswith(rid)):
                self._abort(request)
        return Response()

    def _abort(self, request: Request) -> None:
        """A running request ends with its next token, and there is none in a paused server."""
        if request in self.model.running:
            self.model.ending += [] if request in self.model.ending else [request]
        else:
            self.model.abort(request)

    # -- pause and memory --------------------------------------------------------------------------

    async def pause_generation(self, body: Body, query: Query) -> Response:
        self.paused = body.get("mode", "abort")
        if self.paused == "abort":
            await self.abort_request({"abort_all": True}, {})
            while self.model.running:  # noqa: ASYNC110  # it waits for the lock
                await asyncio.sleep(self.model.step_s)
        else:
            self.model.stopped = True
        if self.paused == "retract":
            self.model.retract()
        if self.paused == "in_place" and self.overlap:
            self.model.violations.append("paused in place with a forward pass under way")
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: Body, query: Query) -> Response:
        self.paused, self.model.stopped = None, self.hung or self.released
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, body: Body, query: Query) -> Response:
        flushed = self._flush()
        return Response("Cache flushed." if flushed else "Flush cache failed.", 200 if flushed else 400)

    def _flush(self) -> bool:
        waiting = self.model.waiting and not (self.paused and self.generation.flush_ignores_waiting)
        if self.model.running or waiting:
            return False
        self.model.clear_cache()
        return True

    async def release_memory_occupation(self, body: Body, query: Query) -> Response:
        if self.model.running or self.model.waiting or not self.memory_saver:
            self._die()
        self.released = self.model.stopped = True
        self.model.has_weights = False
        self.model.clear_cache()
        return Response("null")

    async def resume_memory_occupation(self, body: Body, query: Query) -> Response:
        self.released = False
        return Response("null")

    # -- weights -----------------------------------------------------------------------------------

    async def update_weights_from_disk(self, body: Body, query: Query) -> Response:
        while not self.paused and self.model.running:  # noqa: ASYNC110  # it waits for the lock
            await asyncio.sleep(self.model.step_s)
        folder = Path(body["model_path"])
        label = body.get("weight_version") or self.model.label
        files = list(folder.glob("*.safetensors")) if (folder / "config.json").exists() else []
        defect = None if files else f"{folder} is no model"
        defect = defect or self.load(files, int(label) if label.isdecimal() else 0)
        if defect is None:
            self.model.label, self.model_path = label, folder
            if body.get("flush_cache", True) and not self._flush():
                defect = "Weights were updated, but the cache was not flushed"
                if self.generation.flush_asserts:
                    self._die()
        reply = {"success": defect is None, "message": defect or "", "num_paused_requests": 0}
        return JSONResponse(reply, 400 if defect and not self.lies else 200)

    async def update_weight_version(self, body: Body, query: Query) -> Response:
        if body.get("abort_all_requests", True):
            await self.abort_request({"abort_all": True}, {})
        self.model.label = body["new_version"]
        return JSONResponse({"success": True, "message": "", "new_version": self.model.label})

    async def begin_weight_update(self, body: Body, query: Query) -> Response:
        return JSONResponse({"success": True, "message": "Success"})

    async def end_weight_update(self, body: Body, query: Query) -> Response:
        return JSONResponse({"success": True, "message": "Success"})
