"""The reward of run.toml: a function of a response and of any column of its row, matched by name."""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+|/0*[1-9]\d*)?")


def score(completion: str, answer: object, finish_reason: str) -> float:
    """1 for a finished response whose last number, or last word, is the right answer, else 0."""
    right = str(answer).rpartition("####")[2].strip()  # GSM8K: a solution, ####, the answer
    if finish_reason == "length":
        return 0.0
    numbers = NUMBER.findall(completion)
    if NUMBER.fullmatch(right):
        return float(bool(numbers) and value(numbers[-1]) == value(right))
    last = re.search(rf"(?<!\w){re.escape(right)}[\s.*)]*\Z", completion)  # A, not BANANA
    return float(bool(right and last))


def value(number: str) -> float:
    above, _, below = number.replace(",", "").partition("/")
    return float(above) / float(below or 1)
