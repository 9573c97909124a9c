"""The adaptive time limit of test cases (RollPacker 4.3), live and in virtual time."""

from collections.abc import Mapping

from tailrace.reward.base import TimeoutSettings
from tailrace.types import Sample


class Anchors:
    """The longest test case of the correct responses to each prompt, in seconds.

    A prompt is known by its row of the data, or by its index where the data has no epochs.
    """

    def __init__(self) -> None:
        self.longest_s: dict[int, float] = {}

    def restore(self, longest_s: Mapping[int, float]) -> None:
        """Return to an earlier state."""
        self.longest_s = dict(longest_s)

    def limit_s(self, sample: Sample, settings: TimeoutSettings) -> float:
        """Return the time limit of the test cases of a response."""
        anchor_s = None if _is_evaluation(sample) else self.longest_s.get(_key(sample))
        if anchor_s is None or not settings.adaptive:
            return settings.max_s
        return min(max(settings.min_s, settings.factor * anchor_s), settings.max_s)

    def observe(self, sample: Sample, longest_s: float) -> None:
        """Record a correct response.

        Args:
            longest_s: its longest test case, in seconds.
        """
        if not _is_evaluation(sample):
            key = _key(sample)
            self.longest_s[key] = max(longest_s, self.longest_s.get(key, 0.0))


def _key(sample: Sample) -> int:
    row = sample.prompt.row_number
    return sample.prompt.index if row is None else row


def _is_evaluation(sample: Sample) -> bool:
    """Rows of the evaluation set have numbers of their own."""
    return sample.id.prompt < 0
