"""The costs of rewards."""

import heapq
import math
from statistics import fmean, pstdev

from tailrace.fit.base import FitPart
from tailrace.fit.observed import Observed
from tailrace.record.timeline import Scoring

_SHORTEST_S = 1e-6
"""A shorter time counts as this one."""


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
