"""Episodes in which the model calls Python functions, and tool calls in the text of a turn."""

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from math import isfinite
from typing import Any, NamedTuple

from typing_extensions import override

from tailrace.contracts.environments import Environment, EpisodeOver, Message, Outcome, Policy
from tailrace.drivers.data.encoding import OPEN_TAG
from tailrace.drivers.environments.settings import ParserName, ToolsSettings
from tailrace.errors import ConfigError
from tailrace.importing import import_function
from tailrace.types import Prompt, SampleId

Function = Callable[..., Any]

PROBLEMS = ("malformed", "unknown", "raised", "timeout")
"""Reasons under which calls without a result are counted: the text is no call, or its arguments do not fit
the function; there is no such function; the function raised; it took too long."""
NO_JSON = (ValueError, RecursionError)
"""Errors of Python's decoder: ValueError also for a number of thousands of digits, RecursionError for as many
open brackets."""


class ToolCall(NamedTuple):
    """A call that a turn asks for."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    """Why the text is no call; empty if it is one. Name and arguments may then be missing."""


Parse = Callable[[str], list[ToolCall]]
"""Returns the calls of a turn in their order, malformed ones included."""


_MARK = re.compile(r"<think>.*?(?:</think>|\Z)|(?:<tool_call>\s*)+", re.DOTALL)
"""Thinking, in which no call is made, or what a call begins with."""


def _finite(number: str) -> float:
    if not isfinite(value := float(number)):
        raise ValueError(f"{number} is no number of JSON")
    return value


_JSON = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)
"""Takes line breaks in strings, which models write."""


def hermes_calls(text: str) -> Iterator[tuple[int, str]]:
    """Yield the place of each call of a turn in the format of Hermes, and its JSON, which ends the call."""
    place = 0
    while mark := _MARK.search(text, place):
        place = mark.end()
        if mark[0].startswith("<think>"):
            continue
        try:
            end = _JSON.raw_decode(text, place)[1]
        except NO_JSON:
            end = text.find("</tool_call>", place) % (len(text) + 1)  # without the mark: at the end
        yield mark.start(), text[place:end]
        place = end


def parse_hermes(text: str) -> list[ToolCall]:
    """Return the calls of a turn in the format of Hermes and Qwen: each is a JSON object with `name` and
    `arguments` between <tool_call> and </tool_call>."""
    return [_tool_call(found) for _, found in hermes_calls(text)]


def parse_llama3_json(text: str) -> list[ToolCall]:
    """Return the calls of a turn in the format of Llama 3: the whole turn, but for thinking, is JSON objects
    with `name` and `parameters`, separated by semicolons. One that does not begin with a brace has none."""
    text = re.sub(r"\A\s*<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL).strip()
    text = text.removeprefix("<|python_tag|>").strip()
    calls = []
    while text.startswith("{"):
        try:
            _, end = _JSON.raw_decode(text)
        except NO_JSON:
            end = len(text)
        calls.append(_tool_call(text[:end]))
        text = text[end:].lstrip("; \n")
    return calls


PARSERS: Mapping[ParserName, Parse] = {"hermes": parse_hermes, "llama3_json": parse_llama3_json}


def _tool_call(text: str) -> ToolCall:
    try:
        # Twice, because JSON can spell halves of surrogate pairs, which are not Unicode.
        call = json.loads(json.dumps(_JSON.decode(text), ensure_ascii=False).encode(errors="replace"))
    except NO_JSON as why:
        return ToolCall("", {}, f"this is not JSON: {why}")
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall("", {}, "a call is a JSON object with a name and arguments")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are not a JSON object")
    return ToolCall(name, arguments)


class Caller(NamedTuple):
    """Who calls a tool: the sample, and the numbers of the turn and of the call in it, from 0."""

    sample: SampleId
    turn: int
    number: int


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Inside a tool: who calls it."""


class Answer(NamedTuple):
    """Answer of a call, or the reason why it returned nothing."""

    problem: str
    """Name of the problem (PROBLEMS); empty: none."""
    text: str


class ToolsEnvironment(Environment):
    """Each turn may call tools; a turn without calls ends the episode."""

    def __init__(self, settings: ToolsSettings, functions: Mapping[str, Function]) -> None:
        self._settings, self._functions = settings, functions
        self._parse = PARSERS[settings.parser]

    @override
    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        counts = dict.fromkeys(("turns", "calls", *PROBLEMS), 0)
        with suppress(EpisodeOver):
            await self._play(prompt.opened, policy, counts)
        return Outcome(metrics=counts)

    async def _play(self, opened: str, policy: Policy, counts: dict[str, int]) -> None:
        messages: Sequence[Message] = ()
        for turn in range(self._settings.max_turns):
            calls = self._parse(opened + (await policy.complete(messages)).text)
            opened = opened if OPEN_TAG.fullmatch(opened) else ""  # the template writes it in each turn
            counts["turns"] += 1
            counts["calls"] += len(calls)
            if not calls:
                return
            callers = [Caller(policy.id, turn, number) for number in range(len(calls))]
            answers = await asyncio.gather(*map(self._answer, calls, callers, [policy] * len(calls)))
            for answer in answers:
                if answer.problem:
                    counts[answer.problem] += 1
            if self._settings.on_error == "end" and counts["raised"] + counts["timeout"]:
                return
            messages = [self._message(call, answer) for call, answer in zip(calls, answers, strict=True)]

    def _message(self, call: ToolCall, answer: Answer) -> Message:
        text = f"error: {answer.text}" if answer.problem else answer.text
        return {"role": self._settings.answer_role, "name": call.name, "content": text}

    async def _answer(self, call: ToolCall, caller: Caller, policy: Policy) -> Answer:
        if call.problem:
            return Answer("malformed", call.problem)
        function = self._functions.get(call.name)
        if function is None:
            return Answer(
                "unknown", f"there is no tool {call.name!r}; there are: {', '.join(self._functions)}"
            )
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as why:
            return Answer("malformed", f"{call.name}: {why}")

        async def action() -> str:
            return json.dumps(await self._call(function, call.arguments, caller))

        return Answer(*json.loads(await policy.call(action)))

    async def _call(self, function: Function, arguments: Mapping[str, Any], caller: Caller) -> Answer:
        """Call a function within the time limit. Its errors are recorded like results."""
        limit_s = self._settings.call_timeout_s
        token = CALLER.set(caller)
        try:
            is_async = inspect.iscoroutinefunction(function)
            made = function(**arguments) if is_async else in_thread(function, arguments)
            result = await asyncio.wait_for(made, limit_s)
        except TimeoutError:
            return Answer("timeout", f"no result within {limit_s:g} s")
        except (Exception, SystemExit) as why:
            return Answer("raised", f"{type(why).__name__}: {why}"[: self._settings.max_answer_chars])
        finally:
            CALLER.reset(token)
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        return Answer("", text[: self._settings.max_answer_chars])


def in_thread(function: Function, arguments: Mapping[str, Any]) -> "asyncio.Future[Any]":
    """Call a function in a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():  # it was given up
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(lambda: function(**arguments))
        except BaseException as why:  # SystemExit, too, is an answer
            error = why if isinstance(why, Exception) else RuntimeError(repr(why))
        with suppress(RuntimeError):  # the run has ended meanwhile
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=work, name=f"tool {function.__name__}", daemon=True).start()
    return future


def import_tools(settings: ToolsSettings) -> dict[str, Function]:
    """Import the functions by their names. Raises a ConfigError if one cannot be imported or is named
    twice."""
    functions: dict[str, Function] = {}
    for spec in settings.functions:
        function = import_function(spec, "environment.functions")
        if function.__name__ in functions:
            problem = f"two tools have the name {function.__name__!r}"
            raise ConfigError("environment.functions", spec, problem, "rename one of them")
        functions[function.__name__] = function
    return functions


def schemas_of(functions: Mapping[str, Function]) -> list[dict[str, object]]:
    """Return the JSON schemas of tools for the chat template. Raises a ConfigError if a function has no
    docstring, or a parameter has no type or no description."""
    from transformers.utils import get_json_schema

    schemas = []
    for name, function in functions.items():
        try:
            schemas.append(get_json_schema(function))
        except Exception as why:  # of several types of transformers' own
            remedy = "give it type hints and a docstring with a section Args:"
            raise ConfigError(
                "environment.functions", name, f"it cannot be described ({why})", remedy
            ) from why
    return schemas
