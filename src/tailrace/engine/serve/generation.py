"""The routes that generate: /v1/completions, /v1/chat/completions and /inference/v1/generate."""

import asyncio
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from tailrace.data.encoding import Tokenizer
from tailrace.engine.base import SamplingParams
from tailrace.engine.serve.formats import ChatFormat, CompletionFormat, Context, Format, GenerateFormat
from tailrace.engine.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    SamplingFields,
)
from tailrace.engine.serve.requests import Job, Requests, Tokens
from tailrace.engine.serve.settings import ServedModel

MAX_SAMPLES_IN_ALL = 4096
"""Of one request with several prompts."""
CLIENT_CLOSED = 499
"""The status of a reply whose client has gone."""
T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


def generation_routes(
    requests: Requests, context: Context, tokenizer: Tokenizer, model: ServedModel
) -> APIRouter:
    """Make the router."""
    router = APIRouter()
    generation = _Generation(requests, context, tokenizer, model)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompts = [
            await generation.encode(prompt, special=body.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts
        ]
        job = generation.job(body, "cmpl-", body.request_id, prompts, body.max_tokens, body.logprobs or 0)
        return await generation.respond(job, CompletionFormat(context, job, body), body, request)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatCompletionRequest, request: Request) -> Response:
        if body.top_logprobs and not body.logprobs:
            raise HTTPException(400, "top_logprobs needs logprobs: true")
        text = await generation.template(body)
        prompt = await generation.encode(text, special=False)
        max_tokens = body.max_completion_tokens or body.max_tokens
        job = generation.job(body, "chatcmpl-", body.request_id, [prompt], max_tokens, body.top_logprobs or 0)
        return await generation.respond(job, ChatFormat(context, job, body), body, request)

    @router.post("/inference/v1/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        sampling = body.sampling_params
        num_top = sampling.logprobs or 0
        # The sampled token is the first of the likeliest ones.
        job = generation.job(
            sampling,
            "generate-tokens-",
            body.request_id,
            [body.token_ids],
            sampling.max_tokens,
            num_top if num_top > 1 else 0,
        )
        return await generation.respond(job, GenerateFormat(context, job, body), body, request)

    return router


class _Generation:
    """What the routes share."""

    def __init__(
        self, requests: Requests, context: Context, tokenizer: Tokenizer, model: ServedModel
    ) -> None:
        self._requests, self._context, self._tokenizer, self._model = requests, context, tokenizer, model
        self._random = random.Random()

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text, computed in a thread.

        Raises:
            UnicodeEncodeError: it is not valid Unicode; a chat template does not check that.
        """
        text.encode()
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=special)

    async def template(self, body: ChatCompletionRequest) -> str:
        """The text of a chat.

        Raises:
            HTTPException: there is no chat template, or it refuses the messages.
        """
        if self._tokenizer.chat_template is None:
            raise HTTPException(400, "the model's tokenizer has no chat template; use /v1/completions")
        arguments = body.chat_template_kwargs or {}
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        if refused := [name for name in arguments if name in own]:
            raise HTTPException(400, f"chat_template_kwargs must not have {refused[0]!r}")
        try:
            return await asyncio.to_thread(
                self._tokenizer.apply_chat_template,
                [_plain(message) for message in body.messages],
                add_generation_prompt=body.add_generation_prompt,
                tokenize=False,
                **arguments,
            )
        except HTTPException:
            raise
        except Exception as why:  # templates are programs: they raise errors of their own
            raise HTTPException(400, f"the chat template refuses the messages: {why}") from why

    def job(
        self,
        sampling: SamplingFields,
        prefix: str,
        request_id: str | None,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        num_top_logprobs: int,
    ) -> Job:
        """Check what is asked for.

        Raises:
            HTTPException: the model cannot do it.
        """
        limit, vocabulary = self._model.max_model_len, self._model.vocab_size
        for prompt in prompts:
            if not prompt:
                raise HTTPException(400, "the prompt has no tokens")
            if len(prompt) >= limit:
                length = f"This model's maximum context length is {limit} tokens"
                raise HTTPException(400, f"{length}, but the prompt has {len(prompt)}")
            if max(prompt) >= vocabulary:
                raise HTTPException(400, f"token id {max(prompt)} is not below {vocabulary}")
        if len(prompts) * sampling.n > MAX_SAMPLES_IN_ALL:
            raise HTTPException(400, f"a request may have {MAX_SAMPLES_IN_ALL} samples, at most")
        params: SamplingParams = sampling.params(min(max_tokens or limit, limit), num_top_logprobs)
        seed = self._random.getrandbits(63) if sampling.seed is None else sampling.seed
        id = request_id or f"{self._random.getrandbits(128):032x}"
        return Job(id, prefix, prompts, sampling.n, seed, sampling.greedy, params)

    async def respond(
        self,
        job: Job,
        format: Format,
        body: CompletionRequest | ChatCompletionRequest | GenerateRequest,
        request: Request,
    ) -> Response:
        """Generate, and reply with the whole or with a stream.

        Raises:
            HTTPException: the request names another model.
        """
        if body.model not in (None, "", self._context.model):
            raise HTTPException(404, f"The model {body.model!r} does not exist; see /v1/models")
        if body.stream:
            events = self._events(job, format, include_usage=body.include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        samples = await _unless_disconnected(request, self._whole(job))
        if samples is None:
            return Response(status_code=CLIENT_CLOSED)
        choices = [format.choice(number, tokens, whole=True) for number, tokens in enumerate(samples)]
        usage = _usage(job, sum(len(tokens.ids) for tokens in samples))
        return Response(_encode(format.envelope(choices, usage, whole=True)), media_type="application/json")

    async def _whole(self, job: Job) -> list[Tokens]:
        samples = [Tokens() for _ in range(job.size)]
        async with aclosing(self._requests.generate(job)) as arriving:
            async for number, new in arriving:
                samples[number].join(new)
        return samples

    async def _events(self, job: Job, format: Format, *, include_usage: bool) -> AsyncIterator[bytes]:
        num_tokens = 0
        async with aclosing(self._requests.generate(job)) as arriving:
            async for number, new in arriving:
                num_tokens += len(new.ids)
                choice = format.choice(number, new, whole=False)
                yield _event(format.envelope([choice], None, whole=False))
        if include_usage:
            yield _event(format.envelope([], _usage(job, num_tokens), whole=False))
        yield b"data: [DONE]\n\n"


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string, which is what templates of text models expect.

    Raises:
        HTTPException: the content has parts that are not text.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise HTTPException(400, "the parts of a message's content must be text")
    return message | {"content": "".join(map(str, texts))}


def _usage(job: Job, num_tokens: int) -> dict[str, int]:
    num_prompt = sum(map(len, job.prompts))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of the work; None if the client has gone, and the work was cancelled."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
