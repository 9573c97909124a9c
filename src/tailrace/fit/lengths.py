"""The lengths of a run's responses, and their correlation within groups."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from statistics import NormalDist, fmean

from tailrace.fit.base import FitPart
from tailrace.fit.observed import Observed
from tailrace.sim.lengths import read_recorded


def fit_lengths(run: Observed, samples: Path) -> FitPart:
    """Take the recorded lengths as the distribution, and fit the correlation.

    Args:
        samples: the run's folder of samples.

    Raises:
        ConfigError: a line of the samples is torn, or there are none.
    """
    recorded = read_recorded(samples)
    values = {
        "sim.lengths.prompt_tokens": max(1, round(run.prompt_tokens)),
        "sim.lengths.distribution": {"kind": "recorded", "path": str(samples.resolve())},
    }
    notes = []
    begun = {each.sample.prompt for process in run.processes for each in process.requests}
    begun = {prompt for prompt in begun if prompt >= 0}  # not those of evaluations
    if untrained := begun - {prompt for prompt, _ in recorded}:
        notes.append(
            f"{len(untrained)} of {len(begun)} prompts were begun and not trained: their lengths are drawn "
            "from those of the others, which may be shorter"
        )
    correlation = correlation_within_groups(recorded)
    if correlation is None:
        notes.append("no prompt has several responses: the correlation within groups keeps its default")
    else:
        values["sim.lengths.correlation"] = correlation
    return FitPart("lengths", values, len(recorded), None, notes)


def correlation_within_groups(lengths: Mapping[tuple[int, int], int]) -> float | None:
    """Return the intraclass correlation of the normal scores of lengths, by analysis of variance (Fisher,
    Statistical Methods for Research Workers, 1925, section 40).

    Args:
        lengths: by prompt and number in the group.

    Returns:
        A number from 0 to 1; None if no prompt has several responses, or all are equal.
    """
    scores = _normal_scores(lengths)
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for (prompt, _), score in scores.items():
        groups[prompt].append(score)
    num_samples, num_groups = len(scores), len(groups)
    if num_samples == num_groups or num_groups < 2:
        return None
    mean = fmean(scores.values())
    means = {prompt: fmean(group) for prompt, group in groups.items()}
    between = sum(len(group) * (means[prompt] - mean) ** 2 for prompt, group in groups.items())
    within = sum((score - means[prompt]) ** 2 for prompt, group in groups.items() for score in group)
    between, within = between / (num_groups - 1), within / (num_samples - num_groups)
    size = (num_samples - sum(len(group) ** 2 for group in groups.values()) / num_samples) / (num_groups - 1)
    total = between + (size - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total else None


def _normal_scores(lengths: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], float]:
    """The standard normal quantile of each length's rank. Equal lengths share their mean rank."""
    standard, below = NormalDist(), 0
    scores: dict[tuple[int, int], float] = {}
    ordered = sorted(lengths.items(), key=lambda item: item[1])
    for _, equal in groupby(ordered, key=lambda item: item[1]):
        ids = [id for id, _ in equal]
        score = standard.inv_cdf((below + len(ids) / 2) / len(ordered))
        scores |= dict.fromkeys(ids, score)
        below += len(ids)
    return scores
