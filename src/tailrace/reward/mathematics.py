"""The checker `math`: equality of mathematical expressions, by math-verify.

math-verify bounds its time with signals. That is off here: the worker process kills a call that takes too
long.
"""

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from tailrace.reward.checkers import ground_truth

_EXTRACTION = (ExprExtractionConfig(), LatexExtractionConfig(boxed_match_priority=0))

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # they warn at each call that the time limit is off


def math(completion: str, column: str | None = None, **row: object) -> float:
    r"""Return 1 if the answer in the completion equals the ground truth.

    math-verify extracts the answer: what stands in \boxed{}, or else a LaTeX or plain expression. The ground
    truth is an expression, or a solution with its answer in \boxed{}, in $...$ or after "####".

    Raises:
        ValueError: the ground truth is not mathematics.
    """
    truth = str(ground_truth(row, column)).rpartition("####")[2].strip()
    is_marked = "\\boxed" in truth or "$" in truth
    gold = _parsed(truth if is_marked else f"\\boxed{{{truth}}}") or _parsed(truth)
    if not gold:
        raise ValueError(f"the ground truth {truth!r:.200} is not mathematics")
    return float(verify(gold, _parsed(completion), timeout_seconds=None))


def _parsed(text: str) -> list[object]:
    found: list[object] = parse(text, extraction_config=_EXTRACTION, parsing_timeout=None)
    return found
