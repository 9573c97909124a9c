"""The costs of the trainer: passes, optimizer steps and publications."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from tailrace.fit.base import FitPart
from tailrace.fit.decode import ALONE, slowdown
from tailrace.fit.least_squares import Array, explained, non_negative
from tailrace.fit.observed import Observed
from tailrace.fit.overlap import Busy
from tailrace.record.events import Interval
from tailrace.record.timeline import Timeline

MIN_ALONE = 8
"""Passes or steps without engines at work, from which on only those give the undisturbed cost."""
WIDE = 1.5
"""Ratio of the largest to the smallest pass from which on their fixed part is fitted."""


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
