"""Checkers that a config can name: `function = "math"`. Each compares a completion with its ground truth.

The ground truth is the first of: the column that the argument `column` names, `reward_model.ground_truth` (as
in verl's data), and the columns `ground_truth`, `solution` and `answer`.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

from tailrace.drivers.reward.calls import column_of
from tailrace.errors import ConfigError
from tailrace.importing import install

TRUTH_COLUMNS = ("reward_model.ground_truth", "ground_truth", "solution", "answer")


def ground_truth(row: Mapping[str, Any], column: str | None = None) -> Any:
    """Return the ground truth of a row. Raises a KeyError without one, a ValueError if it is null or
    empty."""
    names = TRUTH_COLUMNS if column is None else (column,)
    for name in names:
        if (truth := column_of(row, name)) not in (None, "", []):
            return truth
    missing = f"{', '.join(names)} (columns: {', '.join(row)}); set the argument `column`"
    if any(name.partition(".")[0] in row for name in names):
        raise ValueError(f"the ground truth is null or empty: {missing}")
    raise KeyError(f"the row has none of {missing}")


def exact_match(
    completion: str, column: str | None = None, pattern: str | None = None, **row: object
) -> float:
    """Return 1 if the completion is the ground truth, or one of them where it is a list; surrounding white
    space does not count. `pattern`: regular expression that extracts the answer from the completion: the last
    group of the last match."""
    truth = ground_truth(row, column)
    answer: str | None = completion
    if pattern is not None:
        matches = list(re.finditer(pattern, completion))
        answer = matches[-1][matches[-1].re.groups] if matches else None
    truths = truth if isinstance(truth, list) else [truth]
    return float(answer is not None and any(_is_same(answer.strip(), each) for each in truths))


def _is_same(answer: str, truth: object) -> bool:
    """Return whether a text is a value of JSON, for instance "4" is 4.0, and "True" is true."""
    if isinstance(truth, bool):
        return answer.lower() == str(truth).lower()
    if isinstance(truth, int | float):
        with suppress(ArithmeticError):
            return Decimal(answer) == Decimal(str(truth))
    return truth is not None and answer == str(truth).strip()


def json_schema(completion: str, column: str = "schema", **row: object) -> float:
    """Return 1 if the completion is JSON that its schema allows, alone or in a fenced code block. `column`:
    column of the schema, an object or its JSON text. References to other documents are not followed."""
    schema = row[column]
    validator = _validator(schema if isinstance(schema, str) else json.dumps(schema))
    fenced = re.findall(r"```(?:json)?\s*\n(.*?)```", completion, re.DOTALL)
    try:
        return float(validator.is_valid(json.loads(fenced[-1] if fenced else completion)))
    except (ValueError, RecursionError):
        return 0.0


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    from jsonschema.validators import validator_for
    from referencing import Registry

    decoded = json.loads(schema)
    kind = validator_for(decoded)
    kind.check_schema(decoded)
    return kind(decoded, registry=Registry())


def math(completion: str, column: str | None = None, **row: object) -> float:
    r"""Return 1 if the answer in the completion equals the ground truth, by math-verify.

    math-verify extracts the answer: what stands in the last \boxed{}, or else a LaTeX or plain expression.
    The ground truth is an expression, or a solution with its answer in \boxed{}, in $...$ or after "####".
    math-verify bounds its time with signals. That is off here: the worker process kills a call that takes
    too long. Raises a ValueError if the ground truth is not mathematics."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn at each call that the time limit is off
    extraction = (ExprExtractionConfig(), LatexExtractionConfig(boxed_match_priority=0))

    def parsed(text: str) -> list[object]:
        _, box, last = text.rpartition("\\boxed")
        if last.startswith("{") and 0 not in accumulate((mark == "{") - (mark == "}") for mark in last):
            return []  # the box has no end
        found: list[object] = parse(box + last, extraction_config=extraction, parsing_timeout=None)
        return found

    value = ground_truth(row, column)
    truth = str(value).rpartition("####")[2].strip()
    is_marked = "\\boxed" in truth or "$" in truth
    gold = parsed(truth if is_marked else f"\\boxed{{{truth}}}") or parsed(truth)
    if not gold or isinstance(value, bool):
        raise ValueError(f"the ground truth {truth!r:.200} is not mathematics")
    return float(verify(gold, parsed(completion), timeout_seconds=None))


_CHECKERS: Mapping[str, tuple[Callable[..., float], str | None, str]] = {
    "exact_match": (exact_match, None, ""),
    "json_schema": (json_schema, "jsonschema", "json"),
    "math": (math, "math_verify", "math"),
}
"""Each checker, the module that it needs, and the extra that installs it."""


class Checkers:
    """The hook reward.checkers."""

    def load(self, name: str, key: str) -> Callable[..., Any]:
        """Return a checker as `NamedCheckers.load`."""
        if name not in _CHECKERS:
            remedy = f"write 'package.module:name', 'path/to/file.py:name' or one of {', '.join(_CHECKERS)}"
            raise ConfigError(key, name, "this names no function", remedy)
        function, module, extra = _CHECKERS[name]
        if module is not None:
            if find_spec(module) is None:
                problem = f"this checker needs the package {module}"
                raise ConfigError(key, name, problem, install(extra))
            import_module(module)  # now, so that it is not in the time of the first call
        return function
