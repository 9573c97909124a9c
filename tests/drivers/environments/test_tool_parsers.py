"""Tool calls in the formats that vLLM reads, on the examples of its own tests, some with shorter names.

Sources, at vLLM 0.32: tests/tool_parsers/test_qwen3coder_tool_parser.py and test_mistral_tool_parser.py.
"""

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from helpers.page_runs import bpe_tokenizer
from tailrace.drivers.data.encoding import CALL_MARKS, text_of
from tailrace.drivers.environments.tools import (
    ToolCall,
    parse_hermes,
    parse_llama3_json,
    parse_mistral,
    parse_qwen3_coder,
)


def tool(name: str, **types: str) -> dict[str, Any]:
    """A tool with these types of its parameters; with a bar each of several."""
    properties: dict[str, Any] = {}
    for key, given in types.items():
        choices = [{"type": each} for each in given.split("|")]
        properties[key] = {"anyOf": choices} if len(choices) > 1 else choices[0]
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


TOOLS = [
    tool("get_current_weather", city="string", state="string", unit="string"),
    tool("calculate_area", shape="string", dimensions="object", precision="integer"),
    tool("test_types", i="integer", f="float", b="boolean", s="string", o="object"),
    tool(
        "test_anyof", i="integer|null", s="string|null", a="array|null", o="object|null", m="string|integer"
    ),
]
TOOLS[3]["function"]["parameters"]["properties"]["t"] = {"type": ["integer", "null", {}]}


def xml(name: str, **arguments: str) -> str:
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
ORLANDO = {"city": "Orlando", "state": "FL", "unit": "celsius"}
WEATHER, SECOND = xml("get_current_weather", **DALLAS), xml("get_current_weather", **ORLANDO)
ASKED, ASKED_SECOND = ToolCall("get_current_weather", DALLAS), ToolCall("get_current_weather", ORLANDO)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("This is a test response without any tool calls", []),
        (WEATHER, [ASKED]),
        (f"Sure! Let me check the weather for you.{WEATHER}", [ASKED]),
        (f"{WEATHER}\n{SECOND}", [ASKED, ASKED_SECOND]),
        (WEATHER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), [ASKED]),
        (WEATHER.replace("</parameter>\n", "", 1), [ASKED]),
        (f"<tool_call>\n<function=bad\n</function>\n</tool_call>\n{WEATHER}", [ToolCall("bad", {}), ASKED]),
        ("<function=f>" + "<parameter=" * 20_000 + "a>1</parameter>", [ToolCall("f", {"a": "1"})]),
        (f"<think>{SECOND}</think>{WEATHER}<think>{SECOND}", [ASKED]),  # no call is made in thinking
    ],
)
def test_the_format_of_qwen3_coder(text: str, calls: list[ToolCall]) -> None:
    assert parse_qwen3_coder(text, TOOLS) == calls


@pytest.mark.parametrize(
    ("name", "written", "arguments"),
    [
        (
            "calculate_area",
            {"shape": "rectangle", "dimensions": '{"width": 10, \n "height": 20}', "precision": "2"},
            {"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "precision": 2},
        ),
        (
            "test_types",
            {"i": "42", "f": "3.14", "b": "true", "s": "hello world", "o": '{"key": "value"}'},
            {"i": 42, "f": 3.14, "b": True, "s": "hello world", "o": {"key": "value"}},
        ),
        (
            "test_anyof",
            {"i": "5", "s": "hello", "a": '["a", "b"]', "o": '{"key": 42}', "m": "some text", "t": "42"},
            {"i": 5, "s": "hello", "a": ["a", "b"], "o": {"key": 42}, "m": "some text", "t": 42},
        ),
        ("test_types", {"i": "five", "b": "False", "s": "5"}, {"i": "five", "b": False, "s": "5"}),
        ("test_anyof", {"i": "null", "s": "7", "m": "7"}, {"i": None, "s": "7", "m": 7}),
        ("not_among_them", {"i": "5"}, {"i": "5"}),
    ],
)
def test_arguments_have_the_types_of_the_tools_schema(
    name: str, written: dict[str, str], arguments: dict[str, object]
) -> None:
    (found,) = parse_qwen3_coder(xml(name, **written), TOOLS)
    assert json.dumps(found.arguments) == json.dumps(arguments)  # 1 is not True


@pytest.mark.parametrize(
    "properties", [None, [], *({"i": {key: None}} for key in ("type", "anyOf", "oneOf"))]
)
def test_a_schema_without_types_allows_text(properties: object) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    assert parse_qwen3_coder(xml("f", i="5"), tools) == [ToolCall("f", {"i": "5"})]


@pytest.mark.parametrize("text", ['<tool_call>{"name": "add"}</tool_call>', "<tool_call>", "<function=>"])
def test_a_call_without_a_name_is_malformed(text: str) -> None:
    (found,) = parse_qwen3_coder(text)
    assert found.problem == "a call is <function=NAME> with a <parameter=NAME> for each argument"


ADD, AGE = ToolCall("add", {"a": 3.5, "b": 4}), ToolCall("get_age", {"name": "John Doe"})
LISTED_AGE = '{"arguments":{"name": "John Doe"}, "name": "get_age"}'
HELLO = {"command": "print(\"hello world!\")\nre.compile(r'{}')"}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("This is a test", []),
        ('[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]', [ADD]),
        ('[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 3.5, "b": 4} } ]', [ADD]),
        (f"[TOOL_CALLS] [{LISTED_AGE}]", [AGE]),
        (f'[TOOL_CALLS] [{{"name": "add", "arguments": {{"a": 3.5, "b": 4}}}}, {LISTED_AGE}]', [ADD, AGE]),
        ('Hello[TOOL_CALLS] [{"name": "add", "arguments":{"a": 3.5, "b": 4}}]\nextra trailing data', [ADD]),
        ('[TOOL_CALLS]  junk [{"name": "add", "arguments":{"a": 3.5, "b": 4}}] trail', [ADD]),
        ('[TOOL_CALLS]add{"a": 3.5, "b": 4}', [ADD]),
        ('[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]get_age{"name": "John Doe"}', [ADD, AGE]),
        (f"hi{{hi[TOOL_CALLS]bash{json.dumps(HELLO)}", [ToolCall("bash", HELLO)]),
        ('[TOOL_CALLS]add[ARGS]{"a": 3.5, "b": 4} so', [ADD]),
        ('[TOOL_CALLS]add[CALL_ID]xK2mQ9p0a[ARGS]{"a": 3.5, "b": 4}', [ADD]),  # mistral-common 1.8, v11
    ],
)
def test_the_formats_of_mistral(text: str, calls: list[ToolCall]) -> None:
    assert parse_mistral(text) == calls


def test_calls_of_mistral_in_thinking_are_not_made() -> None:
    for thinking in ("<think>[TOOL_CALLS]sub{}</think>", "[THINK][TOOL_CALLS]sub{}[/THINK]"):
        calls = parse_mistral(f'{thinking}So [TOOL_CALLS]now{{"a": "<think>"}}{thinking}[TOOL_CALLS]now{{}}')
        assert calls == [ToolCall("now", {"a": "<think>"}), ToolCall("now", {})]
        assert calls[0].begin == len(f"{thinking}So ") and parse_mistral(thinking[:-1]) == []


@pytest.mark.parametrize("text", ["not json at all", 'bash{"command": "print(', "name_alone"])
def test_what_vllm_reads_as_no_call_or_as_cut_off_json_is_malformed(text: str) -> None:
    (found,) = parse_mistral(f"hi{{hi[TOOL_CALLS]{text}")
    assert found.problem.startswith("this is not JSON: ")


@pytest.mark.parametrize(
    ("value", "a"), [('"{\\"a\\": 1}"', {"a": 1}), ('{"a": 1}', {"a": 1}), ("null", {}), ('""', {})]
)
def test_arguments_may_be_json_text_or_null(value: str, a: dict[str, int]) -> None:
    call = f'{{"name": "add", "arguments": {value}}}'
    assert parse_hermes(f"<tool_call>{call}") == [ToolCall("add", a)]
    assert parse_llama3_json(call) == parse_mistral(f"[TOOL_CALLS][{call}]") == [ToolCall("add", a)]


def test_marks_that_are_special_tokens_stay_in_the_text_of_a_turn() -> None:
    tokenizer = bpe_tokenizer([])
    marks = [AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "[THINK]", "[/THINK]")]
    tokenizer.add_tokens(marks, special_tokens=True)
    text = '[THINK]a[TOOL_CALLS]b{}[/THINK]so [TOOL_CALLS][{"name": "now"}]'
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids.append(tokenizer.eos_token_id)
    assert parse_mistral(text_of(tokenizer, CALL_MARKS)(ids)) == [ToolCall("now", {})]
    assert text_of(tokenizer)(ids) == 'ab{}so [{"name": "now"}]'
