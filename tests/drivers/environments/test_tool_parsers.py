"""Tool calls in the formats that vLLM reads, on the examples of its own tests, with their values.

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


def tool(name: str, **properties: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def options(*types: str) -> dict[str, object]:
    return {"anyOf": [{"type": each} for each in types]}


INTEGER, NUMBER, BOOLEAN, STRING, OBJECT = (
    {"type": each} for each in ("integer", "float", "boolean", "string", "object")
)
TOOLS = [
    tool("get_current_weather", city=STRING, state=STRING, unit={"type": "string", "enum": ["celsius"]}),
    tool("calculate_area", shape=STRING, dimensions=OBJECT, precision=INTEGER),
    tool(
        "test_types",
        int_param=INTEGER,
        float_param=NUMBER,
        bool_param=BOOLEAN,
        str_param=STRING,
        obj_param=OBJECT,
    ),
    tool(
        "test_anyof",
        anyof_int=options("integer", "null"),
        anyof_str=options("string", "null"),
        anyof_array=options("array", "null"),
        anyof_obj=options("object", "null"),
        type_as_array={"type": ["integer", "null"]},
        multi_non_null=options("string", "integer", "null"),
    ),
]


def xml(name: str, **arguments: str) -> str:
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
WEATHER, ORLANDO = (
    xml("get_current_weather", **DALLAS),
    xml("get_current_weather", city="Orlando", state="FL"),
)
ASKED = ToolCall("get_current_weather", DALLAS)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("This is a test response without any tool calls", []),
        (WEATHER, [ASKED]),
        (f"Sure! Let me check the weather for you.{WEATHER}", [ASKED]),
        (
            f"{WEATHER}\n{ORLANDO}",
            [ASKED, ToolCall("get_current_weather", {"city": "Orlando", "state": "FL"})],
        ),
        (
            xml(
                "calculate_area",
                shape="rectangle",
                dimensions='{"width": 10, \n "height": 20}',
                precision="2",
            ),
            [
                ToolCall(
                    "calculate_area",
                    {"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "precision": 2},
                )
            ],
        ),
        (WEATHER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), [ASKED]),
        (WEATHER.replace("</parameter>\n", "", 1), [ASKED]),
        (
            xml(
                "test_types",
                **{"int_param": "42", "float_param": "3.14", "bool_param": "true"},
                **{"str_param": "hello world", "obj_param": '{"key": "value"}'},
            ),
            [
                ToolCall(
                    "test_types",
                    {"int_param": 42, "float_param": 3.14, "bool_param": True}
                    | {"str_param": "hello world", "obj_param": {"key": "value"}},
                )
            ],
        ),
        (
            xml(
                "test_anyof",
                **{"anyof_int": "5", "anyof_str": "hello", "anyof_array": '["a", "b", "c"]'},
                **{"anyof_obj": '{"key": "value"}', "type_as_array": "42", "multi_non_null": "some text"},
            ),
            [
                ToolCall(
                    "test_anyof",
                    {"anyof_int": 5, "anyof_str": "hello", "anyof_array": ["a", "b", "c"]}
                    | {"anyof_obj": {"key": "value"}, "type_as_array": 42, "multi_non_null": "some text"},
                )
            ],
        ),
        (f"<tool_call>\n<function=bad\n</function>\n</tool_call>\n{WEATHER}", [ToolCall("bad", {}), ASKED]),
        (f"<think>{ORLANDO}</think>{WEATHER}<think>{ORLANDO}", [ASKED]),  # here no call is made in thinking
    ],
)
def test_the_format_of_qwen3_coder(text: str, calls: list[ToolCall]) -> None:
    found = parse_qwen3_coder(text, TOOLS)
    assert found == calls
    assert json.dumps([each.arguments for each in found]) == json.dumps([each.arguments for each in calls])


@pytest.mark.parametrize("text", ['<tool_call>{"name": "add"}</tool_call>', "<tool_call>", "<function=>"])
def test_a_call_without_a_name_is_malformed(text: str) -> None:
    (found,) = parse_qwen3_coder(text)
    assert found.problem == "a call is <function=NAME> with a <parameter=NAME> for each argument"


ADD = ToolCall("add", {"a": 3.5, "b": 4})
CITY = {"city": "San Francisco", "state": "CA", "unit": "celsius"}
CITY_JSON = json.dumps(CITY)
LISTED = ToolCall("get_current_weather", CITY)
HELLO = {"command": "print(\"hello world!\")\nre.compile(r'{}')"}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("This is a test", []),
        ('[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]', [ADD]),
        ('[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 3.5, "b": 4} } ]', [ADD]),
        (f'[TOOL_CALLS] [{{"arguments":{CITY_JSON}, "name": "get_current_weather"}}]', [LISTED]),
        (
            '[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "get_age"}]',
            [ToolCall("get_age", {"name": "John Doe"})],
        ),
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5, "b": 4}}, '
            f'{{"name": "get_current_weather", "arguments":{CITY_JSON}}}]',
            [ADD, LISTED],
        ),
        ('Hello[TOOL_CALLS] [{"name": "add", "arguments":{"a": 3.5, "b": 4}}]\nextra trailing data', [ADD]),
        ('[TOOL_CALLS]  junk [{"name": "add", "arguments":{"a": 3.5, "b": 4}}] trail', [ADD]),
        (
            '[TOOL_CALLS]add_this_and_that{"a": 3.5, "b": 4}',
            [ToolCall("add_this_and_that", {"a": 3.5, "b": 4})],
        ),
        (
            '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]multiply{"a": 3, "b": 6}',
            [ADD, ToolCall("multiply", {"a": 3, "b": 6})],
        ),
        (f"hi{{hi[TOOL_CALLS]bash{json.dumps(HELLO)}", [ToolCall("bash", HELLO)]),
        ('[TOOL_CALLS]add[ARGS]{"a": 3.5, "b": 4} so', [ADD]),
        ('[TOOL_CALLS]add[CALL_ID]xK2mQ9p0a[ARGS]{"a": 3.5, "b": 4}', [ADD]),  # mistral-common 1.8, v11
    ],
)
def test_the_formats_of_mistral(text: str, calls: list[ToolCall]) -> None:
    assert parse_mistral(text) == calls


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS] not json at all", '[TOOL_CALLS]bash{"command": "print(', "[TOOL_CALLS]name_alone"]
)
def test_what_vllm_reads_as_no_call_or_as_cut_off_json_is_malformed(text: str) -> None:
    (found,) = parse_mistral(f"hi{{hi{text}")
    assert found.problem.startswith("this is not JSON: ")


@pytest.mark.parametrize("value", ['"{\\"a\\": 1}"', '{"a": 1}', "null", '""'])
def test_arguments_may_be_json_text_or_null(value: str) -> None:
    call = f'{{"name": "add", "arguments": {value}}}'
    arguments = {"a": 1} if "a" in value else {}
    for found in (
        parse_hermes(f"<tool_call>{call}"),
        parse_llama3_json(call),
        parse_mistral(f"[TOOL_CALLS][{call}]"),
    ):
        assert found == [ToolCall("add", arguments)]


def test_marks_that_are_special_tokens_stay_in_the_text_of_a_turn() -> None:
    tokenizer = bpe_tokenizer([])
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)], special_tokens=True)
    ids = tokenizer.encode('so [TOOL_CALLS][{"name": "now"}]', add_special_tokens=False)
    ids.append(tokenizer.eos_token_id)
    assert parse_mistral(text_of(tokenizer, CALL_MARKS)(ids)) == [ToolCall("now", {})]
    assert text_of(tokenizer)(ids) == 'so [{"name": "now"}]'
