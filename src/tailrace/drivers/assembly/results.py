"""Results of commands for Python, beside the totals of a run (record/summary.py)."""

from dataclasses import dataclass, field
from typing import Any

from tailrace.record.events import Row


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """The numbers of `tailrace eval`.

    Args:
        reward: mean over the held-out prompts.
        solved: share of samples whose reward is at least `run.eval_solved_at`.
        interval: of 95%, of the reward; None: one prompt, or a reward that is not finite.
        base: mean reward of the base model; None: it was not evaluated.
        num_samples: samples of all prompts.
        num_tokens: tokens of their completions.
        model: the folder of the weights.
        greedy: whether the most likely tokens were taken; else they were sampled.
        sets: avg@n and pass@k by name, of each named data source, and of all with several samples a prompt.
    """

    reward: float
    solved: float
    interval: tuple[float, float] | None
    base: float | None
    num_samples: int
    num_tokens: int
    model: str
    greedy: bool
    sets: dict[str, float]


@dataclass(frozen=True, slots=True)
class ComparisonSummary:
    """The numbers of `tailrace compare`.

    Args:
        verdict: which is best, and by how much, in words.
        schedules: of a race: medians over the trials of each candidate by name (docs/reference/metrics.md, "A
            trial"), the spread of the main time in s, and every trial as `laps`. Empty for finished runs.
        bound_s: lower bound on the main time of a round of serial, in s; None: it did not race.
        runs: of finished runs: the figures of each by name. Empty for a race.
    """

    verdict: str
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict)
    bound_s: float | None = None
    runs: dict[str, Row] = field(default_factory=dict)
