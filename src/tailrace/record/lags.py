"""How old the tokens of an optimizer step are: in publications, in optimizer steps, along the response."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from tailrace.types import Sample

TENTHS = 10


@dataclass(slots=True)
class Lags:
    """Counts of tokens, added up while a step is accumulated."""

    publications: Counter[int] = field(default_factory=Counter)
    """Tokens by the publications between the weights that produced them and the published ones."""
    steps: Counter[int] = field(default_factory=Counter)
    """Tokens by the optimizer steps between the weights that produced them and those that were trained:
    PipelineRL's lag (2.2)."""
    by_tenth: list[float] = field(default_factory=lambda: [0.0] * TENTHS)
    """Of each tenth of the response: lag in optimizer steps, summed over its tokens (PipelineRL, Fig. 3a)."""
    tokens_by_tenth: list[float] = field(default_factory=lambda: [0.0] * TENTHS)

    def add(self, sample: Sample, version: int, steps_since: Callable[[int], int]) -> None:
        """Count a sample that is trained now.

        Args:
            version: the published one.
            steps_since: optimizer steps since a version was published.
        """
        start, size = 0, sample.num_tokens / TENTHS
        for span in sample.spans:
            lag = steps_since(span.version)
            end = start + span.num_tokens
            self.publications[version - span.version] += span.num_tokens
            self.steps[lag] += span.num_tokens
            for tenth in range(int(start / size), min(TENTHS, ceil(end / size))):
                num_tokens = min(end, (tenth + 1) * size) - max(start, tenth * size)
                self.by_tenth[tenth] += lag * num_tokens
                self.tokens_by_tenth[tenth] += num_tokens
            start = end

    @property
    def profile(self) -> list[float]:
        """Mean lag of each tenth of the response, in optimizer steps."""
        return [lag / n if n else 0.0 for lag, n in zip(self.by_tenth, self.tokens_by_tenth, strict=True)]


def mean_of(counts: Counter[int]) -> float:
    """Of numbers by how often they occur; 0 of none."""
    total = counts.total()
    return sum(number * count for number, count in counts.items()) / total if total else 0.0
