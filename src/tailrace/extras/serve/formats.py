"""The bodies of requests for generation, and their replies, whole or as the events of a stream.

A `Format` a route turns new tokens of a sample into a `choice`, and choices into an event or a reply. They
are plain dictionaries: a stream makes thousands of them a second.
"""

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import ValidationError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from typing_extensions import override

from tailrace.types import SamplingParams

Json = dict[str, Any]
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

GREEDY_BELOW = 1e-5
"""Temperatures below it mean greedy decoding; the log-probs are then those of temperature 1."""
ABSENT_LOGPROB = -9999.0
"""JSON has no infinities; this is what vLLM sends in their place."""
CLIENT_CLOSED = 499
"""The status of a reply whose client has gone."""
IN_LOOP_BYTES = 2**16
"""Bodies up to this size are parsed in the event loop."""
_PARSER = ThreadPoolExecutor(1, "parser")
"""Parses larger ones, one at a time: the objects of a body may take 20 times its bytes."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "features": (),
    "content_parts": ([],),
    "chat_template": (),
    "return_tokens_as_token_ids": (False,),
    "continue_final_message": (False,),
}
"""Fields of other servers that this one does not carry out, with their values that ask for nothing."""


def _is_unicode(text: str) -> str:
    """JSON can spell halves of surrogate pairs, which no tokenizer takes and no reply can contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is not valid Unicode") from None
    return text


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
String = Annotated[str, AfterValidator(_is_unicode)]
StopString = Annotated[String, Field(min_length=1, max_length=256)]
Name = Annotated[String, Field(min_length=1, max_length=1024)]
PromptIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    """Fields of all bodies."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    carried_out: ClassVar[frozenset[str]] = frozenset()
    """Fields of _NEUTRAL that a subclass carries out."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name, neutral in _NEUTRAL.items() if isinstance(data, dict) else ():
            if name not in cls.carried_out and (value := data.get(name)) is not None and value not in neutral:
                raise ValueError(f"{name} is not supported by this engine; leave it out")
        return data


class SamplingFields(Body):
    """Fields of sampling."""

    n: int = Field(default=1, ge=1, le=256)
    temperature: float | None = Field(default=None, ge=0, le=1000)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    max_tokens: int | None = Field(default=None, ge=1)

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(self, max_tokens: int) -> SamplingParams:
        """The engine's form of it."""
        return SamplingParams(
            max_tokens,
            temperature=1.0 if self.greedy or self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=self.stops,
            ignore_end_of_text=self.ignore_eos,
        )


class StreamOptions(BaseModel):
    include_usage: bool = False


class ServingFields(Body):
    """Fields of the reply. `cache_salt` and `priority` have no effect: the engine reuses no keys and values
    of other weights, and serves in the order of arrival."""

    model: str | None = None
    request_id: Name | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    cache_salt: Name | None = None
    priority: int = Field(default=0, ge=-(2**63), lt=2**63)


class OpenAIFields(ServingFields, SamplingFields):
    """Fields of both OpenAI routes."""

    return_weight_versions: bool | None = False


class CompletionRequest(OpenAIFields):
    """Body of /v1/completions."""

    prompt: String | PromptIds
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=1)
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _take_one(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise ValueError("several prompts are not supported; send a request for each")
            return prompt[0]
        return prompt


class ChatCompletionRequest(OpenAIFields):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    prompt_token_ids: PromptIds | None = None
    """Tokens in place of the messages, as in vLLM."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class GenerateSampling(SamplingFields):
    """`sampling_params` of /inference/v1/generate."""

    carried_out = frozenset({"prompt_logprobs"})
    logprobs: int | None = Field(default=None, ge=0, le=1)
    prompt_logprobs: Literal[0] | None = None
    """Whether the reply has the log-probs of the prompt's tokens from the second on, at temperature 1. Not in
    a stream."""


class GenerateRequest(ServingFields):
    """Body of /inference/v1/generate."""

    token_ids: PromptIds
    sampling_params: GenerateSampling


async def read(kind: type[M], request: Request) -> M:
    """The body of a request as a message. Raises HTTPException that names the first defect."""
    kind_sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind_sent != "application/json":  # a page of another site sends it only to a server that allows it
        raise HTTPException(400, "the body must be JSON: Content-Type: application/json")
    return await parsed(partial(_message, kind), await request.body())


async def parsed(parse: Callable[[bytes], T], body: bytes) -> T:
    """Apply a function to a body in a thread, so that the loop goes on."""
    if len(body) <= IN_LOOP_BYTES:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(_PARSER, parse, body)


def _message(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate(json.loads(body))
    except ValidationError as why:
        raise HTTPException(400, first_defect(why)) from None
    except (ValueError, RecursionError) as why:
        raise HTTPException(400, f"the body is no JSON: {why}") from None


def first_defect(why: RequestValidationError | ValidationError) -> str:
    """The first defect of a body; the value is not repeated."""
    shortly = {"include_url": False, "include_context": False, "include_input": False}
    defect: Any = why.errors(**({} if isinstance(why, RequestValidationError) else shortly))[0]
    return f"{'.'.join(map(str, defect['loc']))}: {defect['msg']}"


ReplyFinish = Literal["stop", "length", "abort", "tool_calls"]
B = TypeVar("B", bound=ServingFields)


@dataclass(slots=True)
class Delta:
    """The part of a sample that is new since the delta before."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str | None = ""
    """Text that has become certain with the tokens."""
    finish: ReplyFinish | None = None
    """Reason of the sample's end; None while it is unfinished."""
    stop_reason: int | str | None = None
    """The stop token or string that has ended it."""
    versions: list[Json] | None = None
    """Spans of all of its tokens in vLLM's form, once it has ended."""
    tool_calls: Sequence[Json] = ()
    """Tool calls of an assistant's message."""

    def join(self, later: "Delta") -> None:
        """Append what follows."""
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.text = (self.text or "") + (later.text or "")
        self.finish, self.stop_reason, self.versions = later.finish, later.stop_reason, later.versions


Deltas = AsyncGenerator[tuple[int, Delta]]
"""Deltas of samples, with the samples' numbers."""
TokenStrings = Callable[[int], str]
"""The text of a single token, as in log-probs."""


def token_strings(tokenizer: Tokenizer) -> TokenStrings:
    """Return the texts of a tokenizer's tokens, each decoded once."""
    return lru_cache(maxsize=1 << 18)(lambda id: str(tokenizer.decode([id], skip_special_tokens=False)))


class Format(Generic[B]):
    """The form of one route's replies, with the state of one request.

    Args:
        id: of the reply.
        prompt_ids: for clients that ask for token ids.
        num_prompt_tokens: for the usage; None: those of `prompt_ids`.
    """

    def __init__(
        self,
        body: B,
        id: str,
        model: str,
        strings: TokenStrings,
        prompt_ids: Sequence[int],
        num_prompt_tokens: int | None = None,
    ) -> None:
        self.body, self.id, self.model, self._strings = body, id, model, strings
        self.prompt_ids = prompt_ids
        self._num_prompt_tokens = len(prompt_ids) if num_prompt_tokens is None else num_prompt_tokens
        self._created = int(time.time())
        self._begun: set[object] = set()

    def choice(self, number: int, new: Delta, *, whole: bool) -> Json:
        """Return new tokens of a sample: for a reply if they are the whole, else for an event."""
        raise NotImplementedError

    def envelope(self, choices: Sequence[Json], usage: Json | None, *, whole: bool) -> Json:
        """Return a reply, or an event of a stream, around its choices."""
        raise NotImplementedError

    def usage(self, num_tokens: int) -> Json:
        """Return the numbers of tokens."""
        num_prompt, total = self._num_prompt_tokens, self._num_prompt_tokens + num_tokens
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": total}

    def _begins(self, what: object) -> bool:
        """Whether this is the first time."""
        begins = what not in self._begun
        self._begun.add(what)
        return begins

    def _openai(self, kind: str, choices: Sequence[Json], usage: Json | None) -> Json:
        ids = {"id": self.id, "object": kind, "created": self._created, "model": self.model}
        return {**ids, "choices": choices, "usage": usage}


class CompletionFormat(Format[CompletionRequest]):
    """/v1/completions."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ends: dict[int, int] = {}
        """Length of the strings of each sample's tokens, for offsets in log-probs."""

    @override
    def choice(self, number: int, new: Delta, *, whole: bool) -> Json:
        body, begins = self.body, self._begins(number)
        choice: Json = {
            "index": number,
            "text": new.text,
            "logprobs": None if body.logprobs is None else self._logprobs(number, new),
            "finish_reason": new.finish,
            "stop_reason": new.stop_reason,
        }
        if body.return_token_ids:
            choice |= {"token_ids": new.ids, "prompt_token_ids": self.prompt_ids if begins else None}
        return choice | ({"weight_versions": new.versions} if body.return_weight_versions else {})

    @override
    def envelope(self, choices: Sequence[Json], usage: Json | None, *, whole: bool) -> Json:
        return self._openai("text_completion", choices, usage)

    def _logprobs(self, number: int, new: Delta) -> Json:
        tokens = list(map(self._strings, new.ids))
        lengths, start = map(len, tokens), self._ends.get(number, 0)
        *starts, self._ends[number] = itertools.accumulate(lengths, initial=start)
        logprobs = list(map(_finite, new.logprobs))
        tops = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": starts}


class ChatFormat(Format[ChatCompletionRequest]):
    """/v1/chat/completions."""

    @override
    def choice(self, number: int, new: Delta, *, whole: bool) -> Json:
        body = self.body
        message: Json = {"role": "assistant"} if self._begins(number) else {}
        message["content"] = new.text
        if new.tool_calls:
            calls = enumerate(new.tool_calls)
            message["tool_calls"] = [call if whole else {"index": place, **call} for place, call in calls]
        choice: Json = {
            "index": number,
            "message" if whole else "delta": message,
            "logprobs": {"content": list(map(self._entry, new.ids, new.logprobs))} if body.logprobs else None,
            "finish_reason": new.finish,
            "stop_reason": new.stop_reason,
        }
        choice |= {"token_ids": new.ids} if body.return_token_ids else {}
        return choice | ({"weight_versions": new.versions} if body.return_weight_versions else {})

    @override
    def envelope(self, choices: Sequence[Json], usage: Json | None, *, whole: bool) -> Json:
        reply = self._openai("chat.completion" if whole else "chat.completion.chunk", choices, usage)
        if self.body.return_token_ids and self._begins("reply"):
            reply["prompt_token_ids"] = self.prompt_ids
        return reply

    def _entry(self, id: int, logprob: float) -> Json:
        token = self._strings(id)
        bytes_ = list(token.encode())
        return {"token": token, "logprob": _finite(logprob), "bytes": bytes_, "top_logprobs": []}


class GenerateFormat(Format[GenerateRequest]):
    """/inference/v1/generate. The entries of log-probs have the token's id under both keys that versions of
    vLLM have used, so that clients of either parse them."""

    prompt_logprobs: Sequence[float] | None = None
    """Log-probs of the prompt tokens from the second on. None: nobody asked for them."""

    @override
    def choice(self, number: int, new: Delta, *, whole: bool) -> Json:
        has_logprobs = self.body.sampling_params.logprobs is not None
        return {
            "index": number,
            "token_ids": new.ids,
            "logprobs": {"content": list(map(_entry, new.ids, new.logprobs))} if has_logprobs else None,
            "finish_reason": new.finish,
            "stop_reason": new.stop_reason,
            "weight_versions": new.versions,
            "routed_experts": None,
            "sampling_mask": None,
        }

    @override
    def envelope(self, choices: Sequence[Json], usage: Json | None, *, whole: bool) -> Json:
        reply: Json = {"request_id": self.id, "output_mode": "tokens", "choices": choices, "usage": usage}
        if whole:
            reply |= {"model": self.model, "created": self._created}
        if whole and self.prompt_logprobs is not None:
            told = zip(self.prompt_ids[1:], self.prompt_logprobs, strict=True)
            rows = [{str(id): self._prompt_entry(id, logprob)} for id, logprob in told]
            reply["prompt_logprobs"] = [None, *rows]
        if self.body.return_token_ids and self._begins("reply"):
            reply["prompt_token_ids"] = self.prompt_ids
        return reply

    def _prompt_entry(self, id: int, logprob: float) -> Json:
        return {"logprob": _finite(logprob), "rank": None, "decoded_token": self._strings(id)}


def _entry(id: int, logprob: float) -> Json:
    entry = {"token": f"token_id:{id}", "token_id": id, "logprob": _finite(logprob)}
    return entry | {"rank": None, "top_logprobs": [entry]}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else ABSENT_LOGPROB


async def respond(format: Format[Any], deltas: Deltas, request: Request) -> Response:
    """Reply with the whole or with a stream, as the request asks. The generator of deltas is closed when the
    client has gone."""
    if format.body.stream:
        return StreamingResponse(_events(format, deltas), media_type="text/event-stream")
    samples = await _unless_disconnected(request, _whole(deltas))
    if samples is None:
        return Response(status_code=CLIENT_CLOSED)
    choices = [format.choice(number, samples[number], whole=True) for number in sorted(samples)]
    usage = format.usage(sum(len(sample.ids) for sample in samples.values()))
    return Response(
        msgspec.json.encode(format.envelope(choices, usage, whole=True)), media_type="application/json"
    )


async def _whole(deltas: Deltas) -> dict[int, Delta]:
    samples: dict[int, Delta] = {}
    async with aclosing(deltas) as arriving:
        async for number, new in arriving:
            if number in samples:
                samples[number].join(new)
            else:
                samples[number] = new
    return samples


async def _events(format: Format[Any], deltas: Deltas) -> AsyncIterator[bytes]:
    num_tokens = 0
    async with aclosing(deltas) as arriving:
        async for number, new in arriving:
            num_tokens += len(new.ids)
            yield _event(format.envelope([format.choice(number, new, whole=False)], None, whole=False))
    options = format.body.stream_options
    if options is not None and options.include_usage:
        yield _event(format.envelope([], format.usage(num_tokens), whole=False))
    yield b"data: [DONE]\n\n"


def _event(content: Json) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


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


class Text:
    """The text of one sample, piece by piece.

    Args:
        stops: the text ends before the first of these strings that appears in it.
        include_stop: the text ends after it instead.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, include_stop: bool, skip_special: bool
    ) -> None:
        self._tokenizer, self._stops, self._include_stop = tokenizer, stops, include_stop
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._undecoded: list[int] = []
        """The last tokens, as long as their bytes are no complete characters."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stop: str | None = None
        """The stop string that has ended the text."""

    def extend(self, ids: Sequence[int], *, ended: bool) -> str:
        """Append tokens and return the text that has become certain. No tokens follow its end."""
        for id in ids:
            piece = self._stream.step(self._tokenizer, id)
            if piece is None:
                self._undecoded.append(id)
            else:
                self._undecoded.clear()
                self._held += piece
        if ended:
            self._held += self._tokenizer.decode(self._undecoded, skip_special_tokens=self._skip_special)
        if self.stop is not None:
            return ""
        length = self._first_stop() if self._stops else None
        if length is None:
            length = len(self._held) if ended else len(self._held) - self._num_uncertain()
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _first_stop(self) -> int | None:
        """Return the end of the text before a stop string; None: it contains none."""
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        at, self.stop = min(found)
        return at + len(self.stop) * self._include_stop

    def _num_uncertain(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)
