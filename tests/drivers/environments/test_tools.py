"""Episodes with tools: calls in the text of a turn, answers, errors and time limits."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.scripted import ScriptedPolicy
from tailrace.contracts.environments import Outcome
from tailrace.drivers.environments.settings import ToolsSettings
from tailrace.drivers.environments.tools import (
    CALLER,
    Caller,
    ToolCall,
    ToolsEnvironment,
    import_tools,
    parse_hermes,
    parse_llama3_json,
    schemas_of,
)
from tailrace.errors import ConfigError
from tailrace.types import Prompt, SampleId


def settings(**given: Any) -> ToolsSettings:
    return ToolsSettings.model_validate({"kind": "tools", "functions": ["unused"], **given})


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(
    policy: ScriptedPolicy, *functions: Callable[..., Any], **given: Any
) -> tuple[list[object], dict[str, float]]:
    """What the policy was answered, and the metrics that are not zero."""
    environment = ToolsEnvironment(settings(**given), {function.__name__: function for function in functions})
    outcome: Outcome = asyncio.run(environment.run(Prompt(0, [1]), policy))
    assert outcome.reward is None
    return (
        [message["content"] for message in policy.heard],
        {name: value for name, value in outcome.metrics.items() if value},
    )


def add(a: int, b: int) -> int:
    return a + b


async def slowly(text: str) -> str:
    await asyncio.sleep(0)
    return text * 2


def test_a_turn_may_make_several_calls_and_a_turn_without_a_call_ends_the_episode() -> None:
    policy = ScriptedPolicy(call("add", a=1, b=2) + call("slowly", text="x"), call("add", a=3, b=3), "6", "7")
    answers, metrics = play(policy, add, slowly)
    assert answers == ["3", "xx", "6"]
    assert metrics == {"turns": 3, "calls": 3}
    assert [message["role"] for message in policy.heard] == ["tool"] * 3
    assert [message["name"] for message in policy.heard] == ["add", "slowly", "add"]


def test_the_number_of_turns_is_bounded_and_so_is_the_room() -> None:
    again = [call("add", a=1, b=2)] * 4
    assert play(ScriptedPolicy(*again), add, max_turns=2) == (["3"], {"turns": 2, "calls": 2})
    assert play(ScriptedPolicy(*again[:1]), add) == (["3"], {"turns": 1, "calls": 1})


MARKED = '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> <think>"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<think>I could {call('say')}</think>4", []),
        (f"<think>I could {call('say')}</think>{call('add', a=1)}", [("add", {"a": 1})]),
        (f"Well. <think>{call('say')}</think> {call('add')}<think>{call('say')}", [("add", {})]),
        (MARKED + call("add"), [("say", {"text": "</tool_call> <think>"}), ("add", {})]),
        (f"<tool_call>\n{call('add')}", [("add", {})]),
        (
            '<tool_call>{"name": "say", "arguments": {"text": "a\nb"}}</tool_call>',
            [("say", {"text": "a\nb"})],
        ),
        ('<tool_call>{"name": "add"}</tool_call>{"name": "say"}', [("add", {})]),
    ],
)
def test_calls_in_thinking_are_not_made_and_the_end_of_the_json_ends_a_call(
    text: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    found = parse_hermes(text)
    assert [(each.name, each.arguments) for each in found] == calls
    assert not any(each.problem for each in found)


def test_calls_of_llama_follow_the_thinking() -> None:
    text = '<think>{"name": "say"}</think>{"name": "add", "parameters": {"text": "a\nb"}}'
    assert parse_llama3_json(text) == [ToolCall("add", {"text": "a\nb"})]
    assert parse_llama3_json('<think>{"name": "say"}') == []


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("parse", [parse_hermes, parse_llama3_json])
def test_a_number_that_json_lacks_makes_a_call_malformed(
    parse: Callable[[str], list[ToolCall]], number: str
) -> None:
    text = f'{{"name": "add", "arguments": {{"a": {number}}}}}'
    (found,) = parse(f"<tool_call>{text}</tool_call>" if parse is parse_hermes else text)
    assert found.problem == f"this is not JSON: {number} is no number of JSON"


def test_a_call_is_not_made_in_thinking_that_the_prompt_has_begun() -> None:
    environment = ToolsEnvironment(settings(), {"add": add})
    said = [f"hm {call('add', a=1, b=2)}</think>{call('add', a=3, b=4)}", f"hm {call('add', a=1, b=2)}"]
    policy = ScriptedPolicy(*said)
    outcome = asyncio.run(environment.run(Prompt(0, [1], opened="<think>\n"), policy))
    assert [message["content"] for message in policy.heard] == ["7"]
    assert outcome.metrics["calls"] == 1


@pytest.mark.parametrize(
    ("said", "problem", "answer"),
    [
        ("<tool_call>{</tool_call>", "malformed", "error: this is not JSON: "),
        (call("add", a=1), "malformed", "error: add: missing a required argument: 'b'"),
        (call("sub", a=1), "unknown", "error: there is no tool 'sub'; there are: add, fail, leave"),
        (call("fail"), "raised", "error: ValueError: no"),
        (call("leave"), "raised", "error: RuntimeError: SystemExit(1)"),
    ],
)
def test_a_call_that_goes_wrong_is_answered_and_counted_by_reason(
    said: str, problem: str, answer: str
) -> None:
    def fail() -> None:
        raise ValueError("no")

    def leave() -> None:
        raise SystemExit(1)

    (answered,), metrics = play(ScriptedPolicy(said, "sorry"), add, fail, leave)
    assert str(answered).startswith(answer)
    assert metrics == {"turns": 2, "calls": 1, problem: 1}


@pytest.mark.parametrize("is_async", [True, False])
def test_a_call_that_hangs_is_given_up_while_another_goes_on(is_async: bool) -> None:
    released = threading.Event()

    def hang() -> None:
        released.wait(60)

    async def hang_async() -> None:
        await asyncio.sleep(60)

    function = hang_async if is_async else hang
    policy = ScriptedPolicy(call(function.__name__) + call("add", a=1, b=2), "x")
    answers, metrics = play(policy, function, add, call_timeout_s=0.05)
    released.set()
    assert answers == ["error: no result within 0.05 s", "3"]
    assert metrics == {"turns": 2, "calls": 2, "timeout": 1}


def test_an_error_ends_the_episode_where_the_setting_says_so_and_a_malformed_call_does_not() -> None:
    def fail() -> None:
        raise ValueError("no")

    policy = ScriptedPolicy("<tool_call>{</tool_call>", call("fail"), "not reached")
    answers, metrics = play(policy, fail, on_error="end")
    assert len(answers) == 1
    assert metrics == {"turns": 2, "calls": 2, "malformed": 1, "raised": 1}


def test_answers_are_text_of_bounded_length_in_the_role_that_the_setting_names() -> None:
    def table() -> dict[str, list[int]]:
        return {"a": [1, 2]}

    policy = ScriptedPolicy(call("table"), "x")
    assert play(policy, table, max_answer_chars=8, answer_role="user")[0] == ['{"a": [1']
    assert policy.heard[0]["role"] == "user"


def test_a_tool_can_see_who_calls_it_in_a_thread_too() -> None:
    callers = []

    def note() -> None:
        callers.append(CALLER.get())

    async def note_async() -> None:
        callers.append(CALLER.get())

    play(ScriptedPolicy(call("note_async"), call("note") + call("note_async"), "x"), note, note_async)
    expected = [Caller(SampleId(3, 0, 1), turn, number) for turn, number in ((0, 0), (1, 0), (1, 1))]
    assert sorted(callers) == expected


TOOLS = '''
def look_up(word: str, exact: bool = True) -> str:
    """Look a word up.

    Args:
        word: The word.
        exact: Whether the spelling must be the same.
    """

def bare(word):
    return word
'''


def test_the_schemas_of_tools_come_from_their_type_hints_and_docstrings(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    functions = import_tools(settings(functions=[f"{tmp_path}/tools.py:look_up"]))
    (schema,) = schemas_of(functions)
    described = schema["function"]
    assert isinstance(described, dict)
    assert (described["name"], described["description"]) == ("look_up", "Look a word up.")
    assert described["parameters"] == {
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "The word."},
            "exact": {"type": "boolean", "description": "Whether the spelling must be the same."},
        },
        "required": ["word"],
    }


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["bare"],
            "environment.functions = 'bare': it cannot be described (Cannot generate JSON schema for bare",
        ),
        (["look_up", "look_up"], "two tools have the name 'look_up'; rename one of them"),
        (["absent"], "has no function 'absent'"),
    ],
)
def test_tools_that_cannot_be_described_are_refused(tmp_path: Path, names: list[str], said: str) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    with pytest.raises(ConfigError) as error:
        schemas_of(import_tools(settings(functions=[f"{tmp_path}/tools.py:{name}" for name in names])))
    assert said in str(error.value)


ADD = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 4.", []),
        (f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>", [ToolCall("add", {"a": 1})]),
        (f"<tool_call>{ADD}</tool_call> <tool_call>{ADD}</tool_call>", [ToolCall("add", {"a": 1})] * 2),
        (f"<tool_call>{ADD}", [ToolCall("add", {"a": 1})]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        (
            '<tool_call>["add"]</tool_call>',
            [ToolCall("", {}, "a call is a JSON object with a name and arguments")],
        ),
        (
            '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
            [ToolCall("add", {}, "the arguments are not a JSON object")],
        ),
    ],
)
def test_the_format_of_hermes(text: str, calls: list[ToolCall]) -> None:
    assert parse_hermes(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is {4}.", []),
        ('{"name": "add", "parameters": {"a": 1}}', [ToolCall("add", {"a": 1})]),
        (
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
            [ToolCall("add", {"a": 1}), ToolCall("now", {})],
        ),
    ],
)
def test_the_format_of_llama_3(text: str, calls: list[ToolCall]) -> None:
    assert parse_llama3_json(text) == calls


@pytest.mark.parametrize("parse", [parse_hermes, parse_llama3_json])
@pytest.mark.parametrize(
    "wrong", ["{add", '{"a": ' + "1" * 5000 + "}", '{"a": ' * 50_000], ids=["word", "number", "depth"]
)
def test_text_that_is_not_json_is_a_call_with_a_problem(parse: object, wrong: str) -> None:
    text = f"<tool_call>{wrong}</tool_call>" if parse is parse_hermes else wrong
    (call,) = parse(text)  # type: ignore[operator]
    assert (call.name, call.arguments) == ("", {})
    assert call.problem.startswith("this is not JSON: ")


def test_halves_of_surrogate_pairs_in_calls_are_replaced() -> None:
    text = r'<tool_call>{"name": "\ud800", "arguments": {"a": "\udc00b"}}</tool_call>'
    assert parse_hermes(text) == [ToolCall("?", {"a": "?b"})]
