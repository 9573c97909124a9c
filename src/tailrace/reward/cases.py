"""Test cases of a program, in the formats of public data sets.

    {"inputs": [...], "outputs": [...]}                       verl, APPS, TACO; with "fn_name": a function
    {"test_cases": [{"type": ..., "input": ..., ...}]}        PRIME
    [{"input": ..., "output": ..., "testtype": ...}]          LiveCodeBench
    ["assert f(1) == 2", ...], or one such text               MBPP, KodCode

Each may also be its JSON text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from tailrace.errors import RewardFailed


@dataclass(frozen=True, slots=True)
class StdinCase:
    """The program reads a text and prints another."""

    text: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """A function of the program is called and returns a value."""

    function: str
    arguments: Sequence[Any]
    expected: Any


@dataclass(frozen=True, slots=True)
class AssertCase:
    """Statements that raise if the program is wrong."""

    statements: str


Case = StdinCase | CallCase | AssertCase


def column_of(row: Mapping[str, object], path: str) -> object:
    """Return a column; dots lead into columns that are objects. None: the row does not have it."""
    value: object = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def parse_cases(value: object) -> list[Case]:
    """Read the test cases of a row.

    Raises:
        RewardFailed: reason "test cases": there are none, or they have no known format.
    """
    try:
        cases = _parse(value)
    except (KeyError, TypeError, ValueError, AttributeError) as why:
        raise RewardFailed("test cases", f"they have no known format ({why!r}): {value!r:.200}") from why
    if not cases:
        raise RewardFailed("test cases", "the row has none")
    return cases


def _parse(value: object) -> list[Case]:
    match value:
        case str() if value.lstrip()[:1] in ("{", "["):
            return _parse(json.loads(value))
        case str():
            return [AssertCase(value)] if value.strip() else []
        case {"test_cases": list(cases)}:
            return [_parse_one(case, {}) for case in cases]
        case {"inputs": list(inputs), "outputs": list(outputs), **shared}:
            pairs = zip(inputs, outputs, strict=True)
            name = {"fn_name": shared.get("fn_name")}
            return [_parse_one({"input": given, "output": expected}, name) for given, expected in pairs]
        case list():
            return [AssertCase(case) if isinstance(case, str) else _parse_one(case, {}) for case in value]
    raise ValueError("neither an object, a list nor a text")


def _parse_one(case: Mapping[str, Any], shared: Mapping[str, Any]) -> Case:
    given, expected = case["input"], case["output"]
    function = case.get("fn_name") or shared.get("fn_name")
    if function is None:
        return StdinCase(_text(given), _text(expected))
    if isinstance(given, str):  # one argument a line, as JSON
        given = [json.loads(line) for line in given.splitlines()]
        expected = json.loads(expected)
    return CallCase(str(function), list(given), expected)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs have equal words line by line.

    Spaces, and empty lines at the end, do not count. A word with a decimal point may differ by 1e-6, relative
    or absolute.
    """
    left, right = printed.rstrip().splitlines(), expected.rstrip().splitlines()
    return len(left) == len(right) and all(map(_same_line, left, right))


def _same_line(printed: str, expected: str) -> bool:
    left, right = printed.split(), expected.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected or "." not in expected:
        return printed == expected
    try:
        return isclose(float(printed), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def same_value(answer: bytes, expected: Any) -> bool:
    """Return whether a function's value, as JSON, is the expected one. APPS wraps some values in a list."""
    try:
        value = json.loads(answer)
        wrapped = json.loads(json.dumps(expected))
    except (ValueError, RecursionError):
        return False
    return bool(value == wrapped or [value] == wrapped)
