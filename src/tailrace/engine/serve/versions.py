"""The labels of the weights that a client has named."""

from collections.abc import Iterable
from typing import Any

FIRST = "default"
"""The label of the weights that the server started with, as in vLLM."""


class Versions:
    """Labels by the engine's number of each load."""

    def __init__(self) -> None:
        self._labels = [FIRST]

    @property
    def number(self) -> int:
        """Of the newest load; 0: the weights at the start."""
        return len(self._labels) - 1

    @property
    def label(self) -> str:
        """Of the newest load."""
        return self._labels[-1]

    def add(self) -> None:
        """Count a load. Until it is named it has the label of the one before."""
        self._labels.append(self.label)

    def withdraw(self) -> None:
        """Take back the newest load, which failed."""
        self._labels.pop()

    def restart(self) -> None:
        """Count a load of the weights of the start."""
        self._labels.append(self._labels[0])

    def name(self, label: str) -> None:
        """Name the newest load."""
        self._labels[-1] = label

    def spans(self, spans: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
        """Turn (number, tokens) into vLLM's form: label, start and end of consecutive tokens.

        Example:
            >>> Versions().spans([(0, 2), (0, 3)])
            [{'version': 'default', 'start': 0, 'end': 5}]
        """
        found: list[dict[str, Any]] = []
        start = 0
        for number, num_tokens in spans:
            label, end = self._labels[number], start + num_tokens
            if found and found[-1]["version"] == label:
                found[-1]["end"] = end
            elif num_tokens:
                found.append({"version": label, "start": start, "end": end})
            start = end
        return found
