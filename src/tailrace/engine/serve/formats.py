"""The replies of the routes of generation, whole or as the events of a stream.

A `Format` a route turns new tokens of a sample into a `choice`, and choices into an event or a reply. They
are plain dictionaries: a stream makes thousands of them a second.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tailrace.engine.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    ServingFields,
)

Json = dict[str, Any]
ReplyFinish = Literal["stop", "length", "abort", "tool_calls"]
B = TypeVar("B", bound=ServingFields)
T = TypeVar("T")

ABSENT_LOGPROB = -9999.0
"""JSON has no infinities; this is what vLLM sends in their place."""
CLIENT_CLOSED = 499
"""The status of a reply whose client has gone."""

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Piece:
    """What is new of a sample.

    Args:
        text: that has become certain with the tokens.
        finish: None while the sample is unfinished.
        stop_reason: the stop token or string that has ended it.
        versions: spans of all of its tokens in vLLM's form, once it has ended.
        tool_calls: of an assistant's message.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str | None = ""
    finish: ReplyFinish | None = None
    stop_reason: int | str | None = None
    versions: list[Json] | None = None
    tool_calls: Sequence[Json] = ()

    def join(self, later: "Piece") -> None:
        """Append what follows."""
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.text = (self.text or "") + (later.text or "")
        self.finish, self.stop_reason, self.versions = later.finish, later.stop_reason, later.versions


Pieces = AsyncGenerator[tuple[int, Piece]]
"""Pieces of samples, with the samples' numbers."""


class TokenStrings:
    """The text of single tokens, as in log-probs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = lru_cache(maxsize=1 << 18)(
            lambda id: str(tokenizer.decode([id], skip_special_tokens=False))
        )

    def __call__(self, id: int, *, as_ids: bool | None) -> str:
        """Return the text of a token, or "token_id:N", from which a client can read the id."""
        return f"token_id:{id}" if as_ids else self._decode(id)


class Format(Generic[B]):
    """The form of one route's replies, with the state of one request.

    Args:
        id: of the reply.
        prompt_ids: for clients that ask for token ids.
        num_prompt_tokens: for the usage.
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

    def choice(self, number: int, new: Piece, *, whole: bool) -> Json:
        """Return new tokens of a sample.

        Args:
            whole: these are all of its tokens, for a reply; otherwise for an event.
        """
        raise NotImplementedError

    def envelope(self, choices: Sequence[Json], usage: Json | None, *, whole: bool) -> Json:
        """Return a reply, or an event of a stream, around its choices."""
        raise NotImplementedError

    def usage(self, num_tokens: int) -> Json:
        """Return the numbers of tokens."""
        num_prompt = self._num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }

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

    def choice(self, number: int, new: Piece, *, whole: bool) -> Json:
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

    def envelope(self, choices: Sequence[Json], usage: Json | None, *, whole: bool) -> Json:
        return self._openai("text_completion", choices, usage)

    def _logprobs(self, number: int, new: Piece) -> Json:
        tokens = [self._strings(id, as_ids=self.body.return_tokens_as_token_ids) for id in new.ids]
        *starts, self._ends[number] = itertools.accumulate(
            map(len, tokens), initial=self._ends.get(number, 0)
        )
        logprobs = [_finite(logprob) for logprob in new.logprobs]
        tops = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": starts}


class ChatFormat(Format[ChatCompletionRequest]):
    """/v1/chat/completions."""

    def choice(self, number: int, new: Piece, *, whole: bool) -> Json:
        body = self.body
        message: Json = {"role": "assistant"} if self._begins(number) else {}
        message["content"] = new.text
        if new.tool_calls:
            numbered = [{} if whole else {"index": number} for number in range(len(new.tool_calls))]
            message["tool_calls"] = [a | call for a, call in zip(numbered, new.tool_calls, strict=True)]
        choice: Json = {
            "index": number,
            "message" if whole else "delta": message,
            "logprobs": {"content": list(map(self._entry, new.ids, new.logprobs))} if body.logprobs else None,
            "finish_reason": new.finish,
            "stop_reason": new.stop_reason,
        }
        choice |= {"token_ids": new.ids} if body.return_token_ids else {}
        return choice | ({"weight_versions": new.versions} if body.return_weight_versions else {})

    def envelope(self, choices: Sequence[Json], usage: Json | None, *, whole: bool) -> Json:
        reply = self._openai("chat.completion" if whole else "chat.completion.chunk", choices, usage)
        if self.body.return_token_ids and self._begins("reply"):
            reply["prompt_token_ids"] = self.prompt_ids
        return reply

    def _entry(self, id: int, logprob: float) -> Json:
        token = self._strings(id, as_ids=self.body.return_tokens_as_token_ids)
        entry = {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode())}
        return entry | {"top_logprobs": []}


class GenerateFormat(Format[GenerateRequest]):
    """/inference/v1/generate. The entries of log-probs have the token's id under both keys that versions of
    vLLM have used, so that clients of either parse them."""

    def choice(self, number: int, new: Piece, *, whole: bool) -> Json:
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

    def envelope(self, choices: Sequence[Json], usage: Json | None, *, whole: bool) -> Json:
        reply: Json = {"request_id": self.id, "output_mode": "tokens", "choices": choices, "usage": usage}
        if whole:
            reply |= {"model": self.model, "created": self._created}
        if self.body.return_token_ids and self._begins("reply"):
            reply["prompt_token_ids"] = self.prompt_ids
        return reply


def _entry(id: int, logprob: float) -> Json:
    entry = {"token": f"token_id:{id}", "token_id": id, "logprob": _finite(logprob)}
    return entry | {"rank": None, "top_logprobs": [entry]}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else ABSENT_LOGPROB


async def respond(format: Format[Any], pieces: Pieces, request: Request) -> Response:
    """Reply with the whole or with a stream, as the request asks. The generator of pieces is closed when the
    client has gone."""
    if format.body.stream:
        return StreamingResponse(_events(format, pieces), media_type="text/event-stream")
    samples = await _unless_disconnected(request, _whole(pieces))
    if samples is None:
        return Response(status_code=CLIENT_CLOSED)
    choices = [format.choice(number, samples[number], whole=True) for number in sorted(samples)]
    usage = format.usage(sum(len(sample.ids) for sample in samples.values()))
    return Response(_encode(format.envelope(choices, usage, whole=True)), media_type="application/json")


async def _whole(pieces: Pieces) -> dict[int, Piece]:
    samples: dict[int, Piece] = {}
    async with aclosing(pieces) as arriving:
        async for number, new in arriving:
            if number in samples:
                samples[number].join(new)
            else:
                samples[number] = new
    return samples


async def _events(format: Format[Any], pieces: Pieces) -> AsyncIterator[bytes]:
    num_tokens = 0
    async with aclosing(pieces) as arriving:
        async for number, new in arriving:
            num_tokens += len(new.ids)
            yield _event(format.envelope([format.choice(number, new, whole=False)], None, whole=False))
    options = format.body.stream_options
    if options is not None and options.include_usage:
        yield _event(format.envelope([], format.usage(num_tokens), whole=False))
    yield b"data: [DONE]\n\n"


def _event(content: Json) -> bytes:
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
        """Append tokens and return the text that has become certain.

        Args:
            ended: no more tokens follow.
        """
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
        """Where the text ends if it contains a stop string."""
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
