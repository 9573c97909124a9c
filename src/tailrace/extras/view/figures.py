"""The figures of a run for the page: as curves, and as totals, which the page puts into words.

A curve has at most as many points as a chart can show, each with the lowest and highest value of its steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tailrace.drivers.commands.intervals import recorded_estimate
from tailrace.record.events import Row
from tailrace.record.figures import (
    BIASES,
    COSTS,
    QUALITIES,
    TIMES,
    counts_of,
    family,
    figure_of,
    rounds_of,
    steps_of,
)
from tailrace.record.summary import Summary
from tailrace.record.timeline import Timeline

MAX_POINTS = 1_000
EARLIEST_S = 1e9
"""Unix time before which no run was: `wall_time` is virtual."""
DIGITS = 5
"""Significant digits of a value."""


class Curves:
    """The optimizer steps and evaluations in the rows of a run. `samples`: its folder of samples."""

    def __init__(self, rows: Sequence[Row], samples: Path) -> None:
        self._steps = steps_of(rows)
        self.is_simulated = bool(rows) and rows[0]["wall_time"] < EARLIEST_S
        names = dict.fromkeys(name for row in self._steps for name in row)
        self.names = [name for name in names if not (self.is_simulated and name.startswith(OF_REWARDS))]
        positions = _positions(rows)
        steps = [at for at, row in zip(positions, rows, strict=True) if "loss" in row]
        num = len(steps)
        self._firsts = np.unique(np.linspace(0, num, min(num, MAX_POINTS), endpoint=False).astype(int))
        lasts = [*(self._firsts[1:] - 1).tolist(), *([num - 1] if num else [])]
        self.x = {name: _short(steps[at][name] for at in lasts) for name in (positions[-1] if rows else ())}
        placed = zip(rows, positions, strict=True)
        self.evaluations = [
            _evaluation(row, at, samples)
            for row, at in placed
            if row.keys() & {"eval/reward", "eval/loss"} and not self.is_simulated
        ]

    def of(self, name: str) -> Sequence[Sequence[float | None]]:
        """Return the points of a figure: the mean of its steps, and if they are several the lowest and the
        highest value."""
        values = np.array([row.get(name, nan) for row in self._steps], float)
        values[~np.isfinite(values)] = nan
        if len(self._firsts) == len(values):
            return [_short(values)]
        known = ~np.isnan(values)
        number = np.add.reduceat(known.astype(float), self._firsts)
        with np.errstate(invalid="ignore"):
            mean = np.add.reduceat(np.nan_to_num(values), self._firsts) / number
        low, high = np.fmin.reduceat(values, self._firsts), np.fmax.reduceat(values, self._firsts)
        return [_short(mean), _short(low), _short(high)]


def _positions(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Where each row stands on the axes that a chart may have. A run without prices has no cost."""
    found: list[dict[str, float]] = []
    began = next((row for row in rows if isfinite(row["wall_time"])), {"wall_time": 0.0})
    origin = began["wall_time"] - began.get("time/step", 0.0)
    samples = cost = 0.0
    is_priced = any("cost/total" in row for row in rows)
    for row in rows:
        samples, cost = samples + row.get("samples/trained", 0.0), row.get("cost/total", cost)
        at = {"step": row["step"], "samples": samples, "seconds": row["wall_time"] - origin}
        found.append(at | ({"cost": cost} if is_priced else {}))
    return found


def _evaluation(row: Row, at: Mapping[str, float], samples: Path) -> dict[str, Any]:
    if "eval/loss" in row:
        return {**at, "loss": row["eval/loss"]}
    estimate = recorded_estimate(samples, row["round"])
    low, high = (estimate and estimate.interval) or (None, None)
    n = estimate and estimate.num_prompts
    return {
        **at,
        "reward": row["eval/reward"],
        "solved": row.get("eval/solved"),
        "low": low,
        "high": high,
        "n": n,
    }


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if isfinite(value) else None for value in values]


OF_REWARDS = ("reward", "frac_reward_zero_std", "round/reward", "control/reward", "bias/reward", "eval/")
"""Beginnings of the names of figures that a simulation draws at random."""


def meanings(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return unit and meaning of figures by their names."""
    return {name: (found.unit, found.meaning) for name in names if (found := figure_of(name))}


HIGHER_IS_BETTER = ("samples_per_s", "tokens_per_s", "rollout_tokens_per_s", "reward", "ess_mean")
NEITHER = ("length_mean", "length_max", "bound_s", "trainer_compute_s", *BIASES)
"""Figures of which no run has the best."""
SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "time": TIMES,
    "age": QUALITIES,
    "bias": BIASES,
    "money": COSTS,
}


def trial_figures(
    summary: Summary, held_out: float | None, *, simulated: bool = False
) -> list[dict[str, Any]]:
    """Return the figures of a run for the comparison with others. `better`: 1: the higher one, -1: the lower
    one, 0: neither. A simulation has no rewards."""
    figures = summary.figures() if rounds_of(summary.rows) else {}
    if simulated:
        figures, held_out = {k: v for k, v in figures.items() if not k.startswith("reward")}, None
    forms = {(kind, key): form for kind, section in SECTIONS.items() for key, form in section.items()}
    reward = {("learning", "reward"): ("reward, mean of rounds", forms.pop(("time", "reward"))[1])}
    forms = {("learning", "held_out"): ("held-out reward", "{:.3f}")} | reward | forms
    better = {"held_out": 1} | dict.fromkeys(HIGHER_IS_BETTER, 1) | dict.fromkeys(NEITHER, 0)
    values = figures | ({} if held_out is None else {"held_out": held_out})
    return [
        {"section": kind, "key": key, "label": label, "better": better.get(key, -1)}
        | {"value": values[key], "text": form.format(values[key])}
        for (kind, key), (label, form) in forms.items()
        if key in values
    ]


def totals(summary: Summary, lives: Sequence[Timeline]) -> dict[str, Any]:
    """Return the totals of tokens, groups and samples; deaths and preemptions by engine; and answers
    to the probes of published weights."""
    counts, probes = counts_of(summary.rows), [probe for life in lives for probe in life.probes]
    failed = [probe for probe in probes if probe.arrival.cause]
    worst = max((probe.arrival for probe in probes), key=lambda each: each.difference, default=None)
    found: dict[str, Any] = msgspec.to_builtins(summary.summary())
    return found | {
        "died": family(counts, "engines/died/"),
        "preempted": family(counts, "engines/preempted/"),
        "publications": sum(len(life.publications) for life in lives),
        "probes": len(probes),
        "probes_failed": len(failed),
        "last_failed": f"{failed[-1].engine}: {failed[-1].arrival.cause}" if failed else "",
        "difference": worst.difference if worst else None,
        "limit": worst.limit if worst else None,
    }
