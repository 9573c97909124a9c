"""The totals of a run for the page, which puts them into words: those of `record/summary.py`, and more."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tailrace.record.figures import BIASES, COSTS, QUALITIES, TIMES, counts_of, family, rounds_of
from tailrace.record.summary import Summary
from tailrace.record.timeline import Timeline

HIGHER_IS_BETTER = ("samples_per_s", "tokens_per_s", "rollout_tokens_per_s", "reward", "ess_mean")
NEITHER = ("length_mean", "length_max", "bound_s", "trainer_compute_s", *BIASES)
"""Figures of which no run has the best."""
SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "time": TIMES,
    "age": QUALITIES,
    "bias": BIASES,
    "money": {key: (label, "{:,.4f}") for key, label in COSTS.items()},
}


def trial_figures(summary: Summary, accuracy: float | None) -> list[dict[str, Any]]:
    """Return the figures of a run for the comparison with others. `better`: 1: the higher one, -1: the lower
    one, 0: neither."""
    figures = summary.figures() if rounds_of(summary.rows) else {}
    forms = {(kind, key): form for kind, section in SECTIONS.items() for key, form in section.items()}
    forms = {("learning", "accuracy"): ("held-out accuracy", "{:.3f}")} | forms
    better = {"accuracy": 1} | dict.fromkeys(HIGHER_IS_BETTER, 1) | dict.fromkeys(NEITHER, 0)
    values = figures | ({} if accuracy is None else {"accuracy": accuracy})
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
