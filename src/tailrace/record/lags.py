"""The age of the tokens of an optimizer step: in publications, in optimizer steps, and along the response."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.types import Sample

TENTHS = 10


@dataclass(slots=True)
class Lags:
    """Counts of tokens by their age, added up while a step is accumulated."""

    publications: Counter[int] = field(default_factory=Counter)
    """Tokens by staleness: publications between the weights that produced them and the published ones."""
    steps: Counter[int] = field(default_factory=Counter)
    """Tokens by lag: optimizer steps between the weights that produced them and those that are trained
    (PipelineRL 2.2)."""
    carried: int = 0
    """Samples that have a token older than the published weights."""
    _pieces: list[tuple[float, int, int, int]] = field(default_factory=list)
    """(tokens in a tenth of the response, first token, end token, lag in optimizer steps) of each span."""

    def add(self, sample: Sample, version: int, steps_since: Callable[[int], int]) -> None:
        """Count the tokens of a sample that is about to be trained.

        Args:
            version: the version that is published when the sample is trained.
            steps_since: the number of optimizer steps since a version was published.
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
        return list(map(float, lags @ num_tokens / num_tokens.sum(0).clip(1e-9)))

    @property
    def tokens_by_tenth(self) -> NDArray[np.float64]:
        """[spans, TENTHS]: tokens of each counted span in each tenth of its response."""
        size, start, end, _ = np.array(self._pieces, float).reshape(-1, 4, 1).swapaxes(0, 1)
        tenth = np.arange(TENTHS)
        overlap = np.minimum(end, (tenth + 1) * size) - np.maximum(start, tenth * size)
        return np.asarray(overlap.clip(0.0), float)


def mean_of(counts: Counter[int]) -> float:
    """Mean of integers that are counted by how often they occur; 0 if there is none."""
    total = counts.total()
    return sum(number * count for number, count in counts.items()) / total if total else 0.0
