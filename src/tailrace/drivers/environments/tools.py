"""Episodes in which the model calls Python functions, and tool calls in the text of a turn."""

import asyncio
import inspect
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from math import isfinite
from types import NoneType
from typing import Any, NamedTuple

from typing_extensions import override

from tailrace.contracts.environments import Environment, EpisodeOver, Message, Outcome, Policy
from tailrace.drivers.data.encoding import OPEN_TAG, Tokenizer
from tailrace.drivers.environments.episodes import EpisodeKind
from tailrace.drivers.environments.history import RequestEncoder
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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a turn asks for."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    """Why the text is no call; empty if it is one. Name and arguments may then be missing."""
    begin: int = field(default=0, compare=False)
    """Place in the turn at which its text begins; 0: the whole turn is calls."""


Schemas = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's API describes them."""
Parse = Callable[[str, Schemas], list[ToolCall]]
"""Returns the calls of a turn in their order, malformed ones included. The schemas give arguments types where
the format has none."""


_MARK = re.compile(r"<think>.*?(?:</think>|\Z)|(?:<tool_call>\s*)+", re.DOTALL)
"""Thinking, in which no call is made, or what a call begins with."""


def _finite(number: str) -> float:
    if not isfinite(value := float(number)):
        raise ValueError(f"{number} is no number of JSON")
    return value


_JSON = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)
"""Takes line breaks in strings, which models write."""


def parse_hermes(text: str, tools: Schemas = ()) -> list[ToolCall]:
    """Return the calls of a turn in the format of Hermes and Qwen: each is a JSON object with `name` and
    `arguments` between <tool_call> and </tool_call>."""
    calls, place = [], 0
    while mark := _MARK.search(text, place):
        place = mark.end()
        if mark[0].startswith("<think>"):
            continue
        end = _end_of_json(text, place, "</tool_call>")
        calls.append(_tool_call(text[place:end], mark.start()))
        place = end
    return calls


def parse_llama3_json(text: str, tools: Schemas = ()) -> list[ToolCall]:
    """Return the calls of a turn in the format of Llama 3: the whole turn, but for thinking, is JSON objects
    with `name` and `parameters`, separated by semicolons. One that does not begin with a brace has none."""
    text = re.sub(r"\A\s*<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL).strip()
    return _objects(text.removeprefix("<|python_tag|>").strip(), "; \n")


def _objects(text: str, between: str, begin: int = 0) -> list[ToolCall]:
    """Return the calls that a text begins with: JSON objects with these characters between them."""
    calls = []
    while text.startswith("{"):
        end = _end_of_json(text, 0)
        calls.append(_tool_call(text[:end], begin))
        text = text[end:].lstrip(between)
    return calls


_XML_CALL = re.compile(
    r"<think>.*?(?:</think>|\Z)"
    r"|(?:<tool_call>[^<]*)*+<function=((?:(?!</function>)[^>])*)(?:>(.*?))?(?:</function>|\Z)"
    r"|(?:<tool_call>[^<]*)+",
    re.DOTALL,
)
_PARAMETER = re.compile(r"<parameter=([^<>]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=))", re.DOTALL)


def parse_qwen3_coder(text: str, tools: Schemas = ()) -> list[ToolCall]:
    """Return the calls of a turn in the format of Qwen3-Coder and Qwen 3.5: <function=NAME> with its
    arguments, each <parameter=NAME>TEXT</parameter>, in <tool_call> or alone."""
    calls = []
    functions = [each.get("function") or {} for each in tools]
    schemas = {each.get("name"): each.get("parameters") or {} for each in functions}
    for mark in _XML_CALL.finditer(text):
        name = (mark[1] or "").strip()
        types = schemas.get(name, {}).get("properties") or {}
        problem = "" if name else "a call is <function=NAME> with a <parameter=NAME> for each argument"
        given = _PARAMETER.findall(mark[2] or "")
        arguments = {key: _typed(value, types.get(key)) for key, value in given}
        if not mark[0].startswith("<think>"):
            calls.append(ToolCall(name, arguments, problem, mark.start()))
    return calls


_TYPES: Mapping[type, Sequence[str]] = {
    **{int: ("integer", "number"), float: ("number",), bool: ("boolean",)},
    **{NoneType: ("null",), dict: ("object",), list: ("array",)},
}


def _typed(text: str, schema: Any) -> Any:
    """Return the JSON value that a text is if a schema allows its type, else the text. `True` is `true`."""
    types = _types(schema)
    with suppress(*NO_JSON):
        value = _decoded(text.lower() if text.lower() in ("true", "false", "null") else text)
        if "string" not in types or types.intersection(_TYPES.get(type(value), ())):
            return value
    return text


def _types(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows; without one a string."""
    given = schema.get("type") or () if isinstance(schema, Mapping) else "string"
    if isinstance(given, str):
        return {given}
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return {each for each in given if isinstance(each, str)}.union(*map(_types, choices)) or {"string"}


_TOOL_CALLS = re.compile(
    r"(?s)(?:[<\[](think|THINK)[\]>].*?(?:[<\[]/\1[\]>]|\Z)|(?!\[TOOL_CALLS\]).)*+((?:\[TOOL_CALLS\]\s*)+)"
)
"""Text and thinking, in which no call is made, and the mark of a call."""
_NAMED = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]\s*)?(?=\{)")


def parse_mistral(text: str, tools: Schemas = ()) -> list[ToolCall]:
    """Return the calls of a turn in the formats of Mistral: after [TOOL_CALLS] a list of JSON objects with
    `name` and `arguments`, or, each after a mark, a name and its arguments as JSON."""
    calls, place = list[ToolCall](), 0
    while mark := _TOOL_CALLS.match(text, place):
        place, begin = mark.end(), mark.start(2)
        if named := _NAMED.match(text, place):
            place = _end_of_json(text, named.end(), "[TOOL_CALLS]")
            calls.append(_tool_call(text[named.end() : place], begin, named[1]))
        elif not calls and (rest := text[place:]):
            return _objects(rest[max(rest.find("{"), 0) :], ", \n", begin) or [_tool_call(rest, begin)]
    return calls


PARSERS: Mapping[ParserName, Parse] = {
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
    "mistral": parse_mistral,
    "qwen3_coder": parse_qwen3_coder,
}


def _end_of_json(text: str, place: int, mark: str = "") -> int:
    """Return the end of the JSON value at a place of a text; where it is none, of the text before a mark."""
    try:
        return _JSON.raw_decode(text, place)[1]
    except NO_JSON:
        return text.find(mark, place) % (len(text) + 1) if mark else len(text)


def _decoded(text: str) -> Any:
    """Decode JSON. Raises one of NO_JSON."""
    # Twice, because JSON can spell halves of surrogate pairs, which are not Unicode.
    return json.loads(json.dumps(_JSON.decode(text), ensure_ascii=False).encode(errors="replace"))


def _tool_call(text: str, begin: int = 0, name: str | None = None) -> ToolCall:
    """Return the call that a JSON object makes, or whose arguments it is where the name is given."""
    try:
        call = _decoded(text)
        if name is None and isinstance(call, dict):
            name, call = call.get("name"), call.get("arguments", call.get("parameters"))
            if isinstance(call, str):  # JSON text, as in OpenAI's API
                call = _decoded(call) if call.lstrip()[:1] == "{" else call or None
    except NO_JSON as why:
        return ToolCall("", {}, f"this is not JSON: {why}", begin)
    if not isinstance(name, str):
        return ToolCall("", {}, "a call is a JSON object with a name and arguments", begin)
    if not isinstance(call, dict | None):
        return ToolCall(name, {}, "the arguments are not a JSON object", begin)
    return ToolCall(name, call or {}, begin=begin)


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

    def __init__(
        self, settings: ToolsSettings, functions: Mapping[str, Function], schemas: Schemas = ()
    ) -> None:
        self._settings, self._functions, self._schemas = settings, functions, schemas
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
            calls = self._parse(opened + (await policy.complete(messages)).text, self._schemas)
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
            known = ", ".join(self._functions)
            return Answer("unknown", f"there is no tool {call.name!r}; there are: {known}")
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
            problem = f"it cannot be described ({why})"
            remedy = "give it type hints and a docstring with a section Args:"
            raise ConfigError("environment.functions", name, problem, remedy) from why
    return schemas


class ToolsEnvironments(EpisodeKind):
    """Python functions that the model calls."""

    @override
    def tools(self, settings: ToolsSettings) -> list[dict[str, object]]:
        return schemas_of(import_tools(settings))

    @override
    def reads_template(self, settings: ToolsSettings) -> bool:
        return True

    @override
    @asynccontextmanager
    async def open(
        self, settings: ToolsSettings, tokenizer: Tokenizer, encoder: RequestEncoder
    ) -> AsyncIterator[Environment]:
        functions = import_tools(settings)
        yield ToolsEnvironment(settings, functions, schemas_of(functions))
