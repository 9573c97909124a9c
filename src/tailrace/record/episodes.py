"""Figures of the episodes of an optimizer step."""

from collections.abc import Sequence
from statistics import fmean
from typing import TypedDict

from tailrace.types import Sample


class EpisodeFigures(TypedDict, total=False):
    """As in rows.StepRow."""

    num_turns: dict[str, float]
    num_branches: dict[str, float]
    environment_tokens: float
    calls: float


def episode_figures(samples: Sequence[Sample]) -> EpisodeFigures:
    """The figures of at least one sample; none if no sample is an episode of turns."""
    if not any(sample.turns for sample in samples):
        return {}
    num_turns = [len(sample.turns) - bool(sample.opening_ids) for sample in samples]
    num_branches = [len(sample.branches) for sample in samples]
    return {
        "num_turns": {"mean": fmean(num_turns), "max": max(num_turns)},
        "num_branches": {"mean": fmean(num_branches), "max": max(num_branches)},
        "environment_tokens": fmean(
            sample.num_observation_tokens - len(sample.opening_ids) for sample in samples
        ),
        "calls": fmean(sum(len(turn.results) for turn in sample.turns) for sample in samples),
    }
