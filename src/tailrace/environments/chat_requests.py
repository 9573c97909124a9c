"""The requests that an agent sends to its session, and when one continues another."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field, field_validator

from tailrace.engine.serve.protocol import ChatCompletionRequest
from tailrace.environments.base import Message

Plain = dict[str, Any]


class SessionRequest(ChatCompletionRequest):
    """Of /v1/chat/completions of a session.

    Tokens are sampled as the run's settings say: the request's `temperature`, `top_p`, `top_k` and `seed`
    have no effect.
    """

    carried_out: ClassVar[frozenset[str]] = frozenset({"tools"})

    n: int = Field(default=1, ge=1, le=1)
    stop: None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=0)
    tools: list[Plain] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _take_no_stop_strings(cls, value: object) -> object:
        return value or None

    @field_validator("messages")
    @classmethod
    def _make_plain(cls, messages: list[Plain]) -> list[Plain]:
        return [plain(message) for message in messages]


def plain(message: Mapping[str, Any]) -> Plain:
    """Return the message as chat templates expect it: its content is one string, and the arguments of tool
    calls are objects, not their JSON text.

    Raises:
        ValueError: the content has parts that are not text, or a tool call has no name and arguments.
    """
    result = {key: value for key, value in message.items() if value is not None} | {"content": _text(message)}
    if calls := result.pop("tool_calls", None):
        result["tool_calls"] = [_call(call) for call in calls]
    return result


def continues(history: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Return whether plain messages begin with those of the history.

    What agents change when they send a message back does not count: whitespace around the content, ids of
    tool calls in the assistant's messages, and fields that no template reads.
    """
    if len(messages) < len(history):
        return False
    return all(_essence(a) == _essence(b) for a, b in zip(history, messages, strict=False))


def _essence(message: Message) -> tuple[object, ...]:
    calls: Any = message.get("tool_calls") or ()
    functions = [call["function"] for call in calls]
    called = [(function["name"], function["arguments"]) for function in functions]
    return message.get("role"), str(message["content"]).strip(), called, message.get("tool_call_id")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the parts of a message's content must be text")
    return "".join(texts)


def _call(call: Any) -> Plain:
    try:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(arguments or "{}")
        return {**call, "function": {"name": function["name"], "arguments": arguments}}
    except (TypeError, KeyError, msgspec.DecodeError) as why:
        raise ValueError("a tool call needs a function with a name and arguments in JSON") from why
