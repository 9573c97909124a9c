"""The ages of the tokens of an optimizer step.

Two words for the age of a token are kept apart. Staleness counts publications of weights: it is what
schedules declare. Lag counts optimizer steps (PipelineRL 2.2): it grows within a round that has several
steps, too.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tailrace.types import Sample

TENTHS = 10
Piece = tuple[float, int, int, int]
"""Tokens in a tenth of a response, first token and end token of a piece of it, and the weight of each."""


@dataclass(slots=True)
class Lags:
    """Counts of the tokens of an optimizer step by their age, added up while the step is accumulated. Masked
    tokens have no age: they are not trained."""

    publications: Counter[int] = field(default_factory=Counter)
    """Tokens by staleness."""
    steps: Counter[int] = field(default_factory=Counter)
    """Tokens by lag."""
    carried: int = 0
    """Samples that have a token older than the published weights."""
    _pieces: list[Piece] = field(default_factory=list)
    """The spans of all samples, with their lags in optimizer steps as weights."""
    _masked: list[Piece] = field(default_factory=list)
    """The masked tokens of each sample, with a weight of 1."""

    def add(self, sample: Sample, version: int, steps_since: Callable[[int], int]) -> None:
        """Count the tokens of a sample that is about to be trained, with the version that is published then.
        The function gives the number of optimizer steps since a version was published."""
        loss_spans, start, size = sample.loss_spans, sample.num_masked, sample.num_tokens / TENTHS
        self.carried += any(span.version < version for span in loss_spans)
        if start:
            self._masked.append((size, 0, start, 1))
        for span in loss_spans:
            lag, end = steps_since(span.version), start + span.num_tokens
            self.publications[version - span.version] += span.num_tokens
            self.steps[lag] += span.num_tokens
            self._pieces.append((size, start, end, lag))
            start = end

    def figures(self, num_samples: int) -> dict[str, float]:
        """The figures of the step (`figures.py`)."""
        total, masked = self.publications.total(), sum(end for _, _, end, _ in self._masked)
        figures = {
            "staleness/mean": _mean_of(self.publications),
            "staleness/max": max(self.publications, default=0),
            "lag/mean": self.mean,
            "lag/max": max(self.steps, default=0),
            **{f"lag/tenth/{tenth}": lag for tenth, lag in enumerate(self.profile)},
            "carried/tokens": 1.0 - self.publications[0] / total if total else 0.0,
            "carried/samples": self.carried / num_samples,
        }
        if masked:
            figures["tokens/masked"] = masked
            figures |= {f"masked/tenth/{tenth}": share for tenth, share in enumerate(self.masked_profile)}
        return figures

    @property
    def mean(self) -> float:
        """Mean lag of a token, in optimizer steps."""
        return _mean_of(self.steps)

    @property
    def profile(self) -> list[float]:
        """Mean lag of each tenth of the response, in optimizer steps (PipelineRL, Fig. 3a)."""
        sums = _by_tenth(self._pieces)
        return [lag / max(num, 1e-9) for lag, num in zip(sums, self.tokens_by_tenth, strict=True)]

    @property
    def masked_profile(self) -> list[float]:
        """Share of each tenth of the response that is masked."""
        found = zip(_by_tenth(self._masked), self.tokens_by_tenth, strict=True)
        return [masked / max(masked + trained, 1e-9) for masked, trained in found]

    @property
    def tokens_by_tenth(self) -> list[float]:
        """Tokens with an age in each tenth of the response."""
        return _by_tenth((size, start, end, 1) for size, start, end, _ in self._pieces)


def _by_tenth(pieces: Iterable[Piece]) -> list[float]:
    """The sum of the weights of the tokens in each tenth."""
    sums = [0.0] * TENTHS
    for size, start, end, weight in pieces:
        for tenth in range(int(start // size), min(TENTHS, int(end // size) + 1)):
            sums[tenth] += weight * max(0.0, min(end, (tenth + 1) * size) - max(start, tenth * size))
    return sums


def _mean_of(counts: Counter[int]) -> float:
    total = counts.total()
    return sum(number * count for number, count in counts.items()) / total if total else 0.0
