"""Tool calls in the text of a turn."""

import pytest

from tailrace.environments.tools import ToolCall, parse_hermes, parse_llama3_json

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
