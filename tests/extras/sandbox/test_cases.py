"""Test cases: the formats of public data sets, and what counts as the same output."""

import json
from typing import Any

import pytest

from tailrace.drivers.reward.calls import column_of
from tailrace.errors import RewardFailed
from tailrace.extras.sandbox.code import AssertCase, CallCase, StdinCase, parse_cases, same_output, same_value

STDIN = [StdinCase("1\n", "2"), StdinCase("3", "4")]
CALLS = [CallCase("f", [1, 2], [[3], 3])]
FORMATS: list[tuple[Any, Any]] = [
    ({"inputs": ["1\n", "3"], "outputs": ["2", "4"]}, STDIN),  # verl, TACO
    ({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"}, CALLS),  # APPS
    ({"inputs": [["1", "2"]], "outputs": [["3"]], "fn_name": ""}, [StdinCase("1\n2", "3")]),
    ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [StdinCase("1\n2", "3")]),  # APPS, lines
    ({"test_cases": [{"type": "stdin_stdout", "input": "3", "output": "4"}]}, STDIN[1:]),  # PRIME
    ({"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1, 2], "output": [3]}]}, CALLS),
    ([{"input": "3", "output": "4", "testtype": "stdin"}], STDIN[1:]),  # LiveCodeBench
    (
        ["assert f(1) == 2", "assert f(2)"],
        [AssertCase("assert f(1) == 2"), AssertCase("assert f(2)")],
    ),  # MBPP
    ("def test():\n    assert f(1)\ntest()", [AssertCase("def test():\n    assert f(1)\ntest()")]),
    ("def test_f():\n    assert f(1)", [AssertCase("def test_f():\n    assert f(1)\ntest_f()")]),  # KodCode
    ("for n in [1]:\n    assert f(n)", [AssertCase("for n in [1]:\n    assert f(n)")]),
]


@pytest.mark.parametrize(("value", "cases"), FORMATS)
def test_each_format_is_read_as_it_is_and_as_json(value: Any, cases: Any) -> None:
    assert parse_cases(value) == cases
    if not isinstance(value, str):
        assert parse_cases(json.dumps(value)) == cases


def test_a_functional_case_has_the_function_that_the_metadata_name_and_its_exact_value() -> None:
    value = [{"input": "[1]\n2", "output": "[3]", "testtype": "functional"}]
    assert parse_cases(value, '{"func_name": "f"}') == [CallCase("f", [[1], 2], [[3]])]


def test_arguments_of_a_function_may_be_lines_of_json() -> None:
    value = [{"input": '[1, 2]\n"x"', "output": "3", "fn_name": "f"}]
    assert parse_cases(value, metadata="words") == [CallCase("f", [[1, 2], "x"], [3])]


@pytest.mark.parametrize(
    "value", [None, 7, {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, "{nope", [3]]
)
def test_an_unknown_format_is_a_failure_of_the_row(value: Any) -> None:
    with pytest.raises(RewardFailed, match=r"^test cases: they have no known format"):
        parse_cases(value)


@pytest.mark.parametrize("value", ["", [], {"inputs": [], "outputs": []}])
def test_a_row_without_test_cases_is_a_failure(value: Any) -> None:
    with pytest.raises(RewardFailed, match=r"^test cases: the row has none"):
        parse_cases(value)


def test_dots_lead_into_a_column() -> None:
    row = {"reward_model": {"ground_truth": "x"}}
    assert column_of(row, "reward_model.ground_truth") == "x"
    assert column_of(row, "reward_model.style") is None
    assert column_of(row, "tests") is None


def test_outputs_are_compared_word_by_word() -> None:
    assert same_output("1  2 \n3\n\n", "1 2\n3")
    assert not same_output("1 2 3", "1 2\n3")
    assert same_output("0.33333333", "0.3333333")
    assert not same_output("0.34", "0.33")
    assert not same_output("1.0", "1")


def test_values_are_compared_as_json() -> None:
    assert same_value(b"[1, 2]", [(1, 2)])
    assert same_value(b"3", [[3], 3])
    assert not same_value(b"3", [[3]]) and not same_value(b"3", [4])
    assert not same_value(b"", [None])
