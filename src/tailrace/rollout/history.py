"""History: the length of the responses to each row of the data when it was last trained, and where engines
draft tokens the responses themselves.

Nothing else is known about a prompt before it is served. Rows that were never trained, and data without
epochs, have no history.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tailrace.types import MAX_REFERENCE_TOKENS, MAX_REFERENCES, Group, Prompt

MAX_TOKENS = 2**20
"""The limit of all responses that are kept. The rows that were trained longest ago lose theirs first."""
RESPONSES_FILE = "responses.json"
"""The responses in the folder of a checkpoint."""


class History:
    """The longest response of each row, in tokens.

    Args:
        responses: token ids by row, those of the row that was trained longest ago first.
        max_tokens: of all responses that are kept. 0: none are.
    """

    def __init__(
        self,
        longest: Mapping[int, int] | None = None,
        responses: Mapping[int, Sequence[Sequence[int]]] | None = None,
        max_tokens: int = 0,
    ) -> None:
        self.longest, self._max_tokens = dict(longest or {}), max_tokens
        self.responses = dict(responses or {}) if max_tokens else {}
        self._num_tokens = sum(map(_num_tokens, self.responses.values()))
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
        if self._max_tokens:
            newest = [sample.completion_ids[:MAX_REFERENCE_TOKENS] for sample in reversed(group.kept)]
            self._num_tokens -= _num_tokens(self.responses.pop(row, ()))
            self.responses[row] = newest[:MAX_REFERENCES]
            self._num_tokens += _num_tokens(self.responses[row])
            while self._num_tokens > self._max_tokens:
                self._num_tokens -= _num_tokens(self.responses.pop(next(iter(self.responses))))

    def last_responses(self, prompt: Prompt) -> Sequence[Sequence[int]]:
        """Return the responses to the prompt's row, at most MAX_REFERENCES, the newest first."""
        return () if prompt.row_number is None else self.responses.get(prompt.row_number, ())

    def predicted(self, prompt: Prompt) -> int:
        """Tokens of the longest response to the prompt's row. Without history: the median of the others, or
        0."""
        middle = self._ordered[len(self._ordered) // 2] if self._ordered else 0
        return middle if prompt.row_number is None else self.longest.get(prompt.row_number, middle)


def _num_tokens(responses: Sequence[Sequence[int]]) -> int:
    return sum(map(len, responses))


def saved_responses(checkpoint: Path) -> dict[int, list[list[int]]]:
    """Return the responses in the folder of a checkpoint; empty if it has none that can be read: drafts then
    begin without them."""
    try:
        content = (checkpoint / RESPONSES_FILE).read_bytes()
        return msgspec.json.decode(content, type=dict[int, list[list[int]]])
    except (OSError, msgspec.MsgspecError):
        return {}
