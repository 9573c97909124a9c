"""Tool calls in the text of a turn. The formats have the names that vLLM gives its parsers."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

NO_JSON = (ValueError, RecursionError)
"""Errors of Python's decoder: ValueError also for a number of thousands of digits, RecursionError for as many
open brackets."""

ParserName = Literal["hermes", "llama3_json"]


class ToolCall(NamedTuple):
    """A call that a turn asks for.

    Args:
        problem: why the text is no call; empty if it is one. Then name and arguments may be missing.
    """

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


Parse = Callable[[str], list[ToolCall]]
"""Returns the calls of a turn in their order, malformed ones included."""


def parse_hermes(text: str) -> list[ToolCall]:
    """Return the calls of a turn in the format of Hermes and Qwen: each is a JSON object with `name` and
    `arguments` between <tool_call> and </tool_call>."""
    return [_call(found) for found in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.DOTALL)]


def parse_llama3_json(text: str) -> list[ToolCall]:
    """Return the calls of a turn in the format of Llama 3: the whole turn is JSON objects with `name` and
    `parameters`, separated by semicolons. A turn that does not begin with a brace has none."""
    text = text.removeprefix("<|python_tag|>").strip()
    calls = []
    while text.startswith("{"):
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except NO_JSON:
            end = len(text)
        calls.append(_call(text[:end]))
        text = text[end:].lstrip("; \n")
    return calls


PARSERS: Mapping[ParserName, Parse] = {"hermes": parse_hermes, "llama3_json": parse_llama3_json}


def _call(text: str) -> ToolCall:
    try:
        # Twice, because JSON can spell halves of surrogate pairs, which are not Unicode.
        call = json.loads(json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace"))
    except NO_JSON as why:
        return ToolCall("", {}, f"this is not JSON: {why}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall("", {}, "a call is a JSON object with a name and arguments")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are not a JSON object")
    return ToolCall(name, arguments)
