"""The reward of a sum."""

import re


def exact(completion: str, answer: str) -> float:
    """1 if the last number of the completion is the answer."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)
