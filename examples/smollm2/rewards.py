"""Rewards of a sum."""

import re


def exact(completion: str, answer: str) -> float:
    """1 if the last number of the completion is the answer, else 0."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)


def near(completion: str, answer: str) -> float:
    """1 if the last number of the completion is the answer; less the farther it is from it; 0 without one."""
    numbers = re.findall(r"\d+", completion)
    return max(0.0, 1 - abs(int(numbers[-1][:9]) - int(answer)) / int(answer)) if numbers else 0.0
