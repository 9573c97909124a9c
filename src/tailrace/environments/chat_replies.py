"""The replies to an agent: OpenAI's chat completions, whole or as the events of a stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tailrace.data.encoding import Tokenizer
from tailrace.engine.serve.formats import ChatFormat, Context
from tailrace.engine.serve.requests import Job, Tokens
from tailrace.engine.serve.text import TokenStrings
from tailrace.engine.serve.versions import Versions
from tailrace.environments.base import Completion
from tailrace.environments.chat_requests import Plain, SessionRequest
from tailrace.environments.tool_calls import Parse

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn of the policy as an agent sees it.

    Args:
        id: of the reply.
        message: the assistant's message.
    """

    id: str
    completion: Completion
    message: Plain


def assistant_message(completion: Completion, parse: Parse | None, first_call: int) -> Plain:
    """Return the assistant's message of a turn.

    A turn with a malformed tool call is text: the agent says what follows from it.

    Args:
        parse: finds the tool calls; None: the agent offers no tools.
        first_call: number of the turn's first tool call in its session. Ids are made of these numbers, so
            that an agent that begins again sees the same ids.
    """
    calls = parse(completion.text) if parse else []
    if not calls or any(call.problem for call in calls):
        return {"role": "assistant", "content": completion.text}
    called = [
        {
            "id": f"call{number:05}",  # nine letters and digits, which Mistral's templates demand
            "type": "function",
            "function": {"name": call.name, "arguments": _encode(call.arguments).decode()},
        }
        for number, call in enumerate(calls, first_call)
    ]
    text, has_marks, _ = completion.text.partition("<tool_call>")  # without marks the whole text is calls
    return {"role": "assistant", "content": (has_marks and text.strip()) or None, "tool_calls": called}


class Replies:
    """Makes replies.

    Args:
        model: the name that they give the model.
    """

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        inner = tokenizer.backend_tokenizer
        self._context = Context(model, inner, TokenStrings(inner), Versions())

    def whole(self, turn: Reply, body: SessionRequest) -> bytes:
        """A reply in one piece."""
        format, choice = self._choice(turn, body, whole=True)
        return _encode(format.envelope([choice], _usage(turn.completion), whole=True))

    def events(self, turn: Reply, body: SessionRequest) -> Iterator[bytes]:
        """The events of a stream. The turn's text comes in one of them."""
        format, choice = self._choice(turn, body, whole=False)
        yield _event(format.envelope([choice], None, whole=False))
        if body.include_usage:
            yield _event(format.envelope([], _usage(turn.completion), whole=False))
        yield b"data: [DONE]\n\n"

    def _choice(self, turn: Reply, body: SessionRequest, *, whole: bool) -> tuple[ChatFormat, dict[str, Any]]:
        completion = turn.completion
        job = Job(turn.id, "chatcmpl-", [[]], 1, 0, False, body.params(1, 0))
        tokens = Tokens(
            list(completion.token_ids), list(completion.logprobs), finish=completion.finish_reason
        )
        format = ChatFormat(self._context, job, body)
        choice = format.choice(0, tokens, whole=whole)
        message = dict(turn.message)
        if "tool_calls" in message:
            if not whole:
                message["tool_calls"] = [
                    {"index": place} | call for place, call in enumerate(message["tool_calls"])
                ]
            if completion.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
        choice["message" if whole else "delta"] = message
        return format, choice


def _usage(completion: Completion) -> dict[str, int]:
    return {
        "prompt_tokens": completion.num_context_tokens,
        "completion_tokens": completion.num_tokens,
        "total_tokens": completion.num_context_tokens + completion.num_tokens,
    }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"
