"""From the files of a run to the [sim] section of a config. `decode.py` fits the costs of engines."""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import NormalDist, fmean, median, pstdev
from typing import Any

import numpy as np

from tailrace.fit.decode import ALONE, explained, fit_aborts, fit_engines, non_negative, slowdown
from tailrace.fit.observed import Array, Busy, FitPart, Observed, observe
from tailrace.record.events import Interval
from tailrace.record.timeline import Scoring, Timeline
from tailrace.sim.settings import SimSettings
from tailrace.sim.world import read_recorded

MIN_ALONE = 8
"""Passes or steps without engines at work, from which on only those give the undisturbed cost."""
WIDE = 1.5
"""Ratio of the largest to the smallest pass from which on their fixed part is fitted."""
_SHORTEST_S = 1e-6
"""A shorter time counts as this one."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What was fitted."""

    parts: Sequence[FitPart]

    @property
    def tree(self) -> dict[str, Any]:
        """The config: a table "sim" with the fitted values only."""
        tree: dict[str, Any] = {}
        for part in self.parts:
            for key, value in part.values.items():
                *sections, name = key.split(".")
                table = tree
                for section in sections:
                    table = table.setdefault(section, {})
                table[name] = value
        return tree

    @property
    def sim(self) -> SimSettings:
        return SimSettings.model_validate(self.tree["sim"])


def fit(events: Path, metrics: Path, samples: Path, workers: int) -> Fit:
    """Fit a run.

    Args:
        events: events.jsonl.
        metrics: metrics.jsonl.
        samples: the folder of the trained samples.
        workers: reward workers of the run.

    Raises:
        ConfigError: a file is missing or damaged; the message names the first bad line.
    """
    run = observe(events, metrics)
    parts = [
        fit_engines(run),
        fit_aborts(run),
        fit_passes(run),
        fit_steps(run),
        fit_publications(run),
        fit_rewards(run, workers),
        fit_lengths(run, samples),
    ]
    return Fit(parts)


def fit_passes(run: Observed) -> FitPart:
    """Fit tokens_per_s and pass_s, and the slow-down by the engines.

    A pass takes pass_s + positions / tokens_per_s. Its positions are its tokens and mean prompts.
    """
    passes = [each for process in run.processes for each in process.passes]
    if not passes:
        return FitPart("passes", {}, 0, None, ["nothing was accumulated"])
    positions = np.array([each.num_tokens + len(each.samples) * run.prompt_tokens for each in passes])
    duration_s = np.array([each.duration_s for each in passes])
    disturbed_s = np.concatenate([_disturbed_s(process.passes, process) for process in run.processes])
    is_alone = disturbed_s <= ALONE * duration_s
    separable = is_alone.sum() >= MIN_ALONE
    used = is_alone if separable else np.ones(len(passes), dtype=bool)
    columns = {"tokens": positions}
    notes = []
    if used.sum() >= MIN_ALONE and positions[used].max() > WIDE * positions[used].min():
        columns["pass"] = np.ones(len(passes))
    else:
        notes.append("passes were too few or too much alike: their fixed part is counted in tokens_per_s")
    solution = non_negative(
        {name: column[used] for name, column in columns.items()}, duration_s[used], positions[used]
    )
    alone_s = solution["tokens"] * positions + solution["pass"]
    values: dict[str, object] = {"sim.trainer.pass_s": solution["pass"]}
    if solution["tokens"] > 0:
        values["sim.trainer.tokens_per_s"] = 1 / solution["tokens"]
    else:
        notes.append("passes took no longer with more tokens: tokens_per_s keeps its default")
    disturbed = ~is_alone
    if separable and disturbed.any():
        factor = slowdown(duration_s[disturbed], disturbed_s[disturbed], alone_s[disturbed])
        if factor > 1:
            values["sim.host.trainer_slowdown"] = factor
    elif disturbed.any() and not separable:
        notes.append("engines worked during nearly all passes: tokens_per_s includes their slow-down")
    fit = explained(alone_s[used], duration_s[used])
    return FitPart("passes", values, int(used.sum()), fit, notes)


def fit_steps(run: Observed) -> FitPart:
    """Fit step_s: the mean optimizer step, of those without engines at work where there are some."""
    seconds = np.array([each.duration_s for process in run.processes for each in process.steps])
    if not len(seconds):
        return FitPart("steps", {}, 0, None, ["there was none: step_s keeps its default"])
    disturbed_s = np.concatenate([_disturbed_s(process.steps, process) for process in run.processes])
    is_alone = disturbed_s <= ALONE * seconds
    used = seconds[is_alone] if is_alone.sum() >= MIN_ALONE else seconds
    return FitPart("steps", {"sim.trainer.step_s": float(used.mean())}, len(used), None, [])


def fit_publications(run: Observed) -> FitPart:
    """Fit publish_s: the median publication. A longer one waited until the one before had arrived."""
    seconds = [each.duration_s for process in run.processes for each in process.publications]
    values = {"sim.trainer.publish_s": median(seconds)} if seconds else {}
    notes = [] if seconds else ["no weights were published: publish_s keeps its default"]
    return FitPart("publish", values, len(seconds), None, notes)


def _disturbed_s(work: Sequence[Interval], process: Timeline) -> Array:
    """The seconds of each piece of work in which engines had requests."""
    starts, ends = (np.array([getattr(each, name) for each in work]) for name in ("start_s", "end_s"))
    return Busy(process.requests).seconds(starts, ends)


def fit_rewards(run: Observed, workers: int) -> FitPart:
    """Fit median_s and sigma of a lognormal distribution of the seconds of a reward.

    Args:
        workers: samples that were scored at the same time.
    """
    seconds = [each for process in run.processes for each in _service_s(process.scorings, workers)]
    if not seconds:
        notes = ["no sample had a reward: [sim.rewards] keeps its defaults"]
        return FitPart("rewards", {}, 0, None, notes)
    logs = [math.log(max(each, _SHORTEST_S)) for each in seconds]
    values = {
        "sim.rewards.workers": workers,
        "sim.rewards.median_s": math.exp(fmean(logs)),
        "sim.rewards.sigma": pstdev(logs),
    }
    return FitPart("rewards", values, len(seconds), None, [])


def _service_s(scorings: list[Scoring], workers: int) -> list[float]:
    """The seconds of each reward without the wait for a worker: one is free after the last rewards but
    `workers`."""
    seconds, ends = [], [0.0] * workers
    for each in scorings:
        if each.reward is None:
            continue
        free_s = heapq.heapreplace(ends, each.end_s)
        seconds.append(each.end_s - max(each.start_s, free_s))
    return seconds


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
