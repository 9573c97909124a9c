"""How old the tokens of an optimizer step are: in publications, in optimizer steps, along the response."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
    carried: int = 0
    """Samples with a token that is older than the published weights."""
    _pieces: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Of each span: tokens in a tenth of its response, its first token, the one behind its last, its lag in
    optimizer steps."""

    def add(self, sample: Sample, version: int, steps_since: Callable[[int], int]) -> None:
        """Count a sample that is trained now.

        Args:
            version: the published one, when the sample is trained.
            steps_since: optimizer steps since a version was published.
        """
        self.carried += any(span.version < version for span in sample.spans)
        start, size = 0, sample.num_tokens / TENTHS
        for span in sample.spans:
            lag, end = steps_since(span.version), start + span.num_tokens
            self.publications[version - span.version] += span.num_tokens
            self.steps[lag] += span.num_tokens
            self._pieces.append((size, start, end, lag))
            start = end

    @property
    def profile(self) -> list[float]:
        """Mean lag of each tenth of the response, in optimizer steps (PipelineRL, Fig. 3a)."""
        num_tokens, lags = self.tokens_by_tenth, np.array([lag for *_, lag in self._pieces], float)
        profile: list[float] = (lags @ num_tokens / num_tokens.sum(0).clip(1e-9)).tolist()
        return profile

    @property
    def tokens_by_tenth(self) -> NDArray[np.float64]:
        """[spans, TENTHS]: of each span that was counted, its tokens in each tenth of its response."""
        size, start, end, _ = np.array(self._pieces, float).reshape(-1, 4, 1).swapaxes(0, 1)
        tenth = np.arange(TENTHS)
        num_tokens: NDArray[np.float64] = np.minimum(end, (tenth + 1) * size) - np.maximum(
            start, tenth * size
        )
        return num_tokens.clip(0.0)


def mean_of(counts: Counter[int]) -> float:
    """Of numbers by how often they occur; 0 of none."""
    total = counts.total()
    return sum(number * count for number, count in counts.items()) / total if total else 0.0
