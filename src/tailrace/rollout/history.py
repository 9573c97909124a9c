"""History: the length of the responses to each row of the data when it was last trained.

Nothing else is known about a prompt before it is served. Rows that were never trained, and data without
epochs, have no history.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping

from tailrace.types import Group, Prompt


class History:
    """The longest response of each row, in tokens."""

    def __init__(self, longest: Mapping[int, int] | None = None) -> None:
        self.longest = dict(longest or {})
        self._ordered = sorted(self.longest.values())

    def observe(self, group: Group) -> None:
        """Record a trained group. It replaces the earlier entry of its row."""
        row = group.prompt.row_number
        if row is None:
            return
        if row in self.longest:
            del self._ordered[bisect_left(self._ordered, self.longest[row])]
        self.longest[row] = max(sample.num_tokens for sample in group.kept)
        insort(self._ordered, self.longest[row])

    def predicted(self, prompt: Prompt) -> int:
        """Tokens of the longest response to the prompt's row. Without history: the median of the others, or
        0."""
        middle = self._ordered[len(self._ordered) // 2] if self._ordered else 0
        return middle if prompt.row_number is None else self.longest.get(prompt.row_number, middle)
