"""The answers of the page in words: what the trainer waited for, and what became of tokens, time and money.

The figures are those of `record/summary.py`, which has them from the rows of the run.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from tailrace.extras.view.causes import BUSY, TRAINER, CauseShare
from tailrace.record.figures import BIASES, COSTS, QUALITIES, TIMES, Row, counts_of, family, rounds_of
from tailrace.record.summary import RunSummary, Summary
from tailrace.record.timeline import Timeline

CAUSES: Mapping[str, str] = {
    "gradients": "gradients",
    "step": "optimizer step",
    "generating": "generating",
    "tail": "the rollout's tail",
    "generation": "generation",
    "rewards": "rewards",
    "weights": "new weights",
    "publication": "publication of weights",
    "evaluation": "evaluation",
    "checkpoint": "writing of a checkpoint",
    "lent": "its device, which is lent",
    "dead": "dead engines",
    "start": "the start of the run",
    "end": "the end of the run",
    "between": "bookkeeping between rounds",
    "other": "other reasons",
}
"""The causes of `causes.py` in words; a wait is one "for ..."."""
HIGHER_IS_BETTER = ("samples_per_s", "tokens_per_s", "rollout_tokens_per_s", "reward", "ess_mean")
NEITHER = ("length_mean", "length_max", "bound_s", "trainer_compute_s", *BIASES)
"""Figures of which no run has the best."""
Cells: TypeAlias = tuple[str, str, float | None]
"""A row of the accounts: label, text, share."""
MAX_NAMED, LEAST_SHARE = 3, 0.01


def verdict(shares: Iterable[CauseShare], recorded_s: float, figures: Row, bound_share: float | None) -> str:
    """Say in one sentence what the trainer waited for, and how far the run is from its lower bound.

    Args:
        figures: of the trial; empty before the first round.
        bound_share: the bound of the whole run as a share of its time; None: it is not known yet.
    """
    waits = [each for each in shares if each.lane == TRAINER and each.cause not in BUSY]
    if not recorded_s or not figures:
        return ""
    share = sum(each.share for each in waits)
    named = [each for each in waits if each.share >= LEAST_SHARE][:MAX_NAMED]
    text = f"The trainer waited {share:.0%} of {duration(recorded_s)}"
    text += ": " * bool(named) + ", ".join(f"{each.share:.0%} for {CAUSES[each.cause]}" for each in named)
    if bound_share:
        return f"{text}. The lower bound of this run is {1 / bound_share:.1f} times faster."
    if figures.get("bound_s"):
        times = figures["main_time_s"] / figures["bound_s"]
        return f"{text}. The lower bound of its rounds is {times:.1f} times faster."
    return f"{text}."


def duration(seconds: float) -> str:
    """Seconds with a unit that a reader can imagine: "57 s", "12 min", "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def trial_figures(summary: Summary, accuracy: float | None) -> list[dict[str, Any]]:
    """The figures of a run for the comparison with others: key, label, value, text, and which is better: 1:
    the higher one, -1: the lower one, 0: neither."""
    figures = summary.figures() if rounds_of(summary.rows) else {}
    forms = TIMES | QUALITIES | BIASES | {key: (label, "{:,.4f}") for key, label in COSTS.items()}
    rows = [("accuracy", "held-out accuracy", accuracy, "{:.3f}", 1)] if accuracy is not None else []
    for key, (label, form) in forms.items():
        if (value := figures.get(key)) is not None:
            better = 0 if key in NEITHER else 1 if key in HIGHER_IS_BETTER else -1
            rows.append((key, label, value, form, better))
    return [
        {"key": key, "label": label, "value": value, "text": form.format(value), "better": better}
        for key, label, value, form, better in rows
    ]


def accounts(
    summary: Summary, figures: Sequence[Mapping[str, Any]], lives: Sequence[Timeline], cost: str
) -> list[dict[str, Any]]:
    """The sections of the accounts: a title, a sentence, and rows of a label, a text and a share or None."""
    totals, counts = summary.summary(), counts_of(summary.rows)
    by_key = {each["key"]: (each["label"], each["text"], None) for each in figures}

    def chosen(keys: Iterable[str]) -> list[Cells]:
        return [by_key[key] for key in keys if key in by_key]

    problems: Mapping[str, Mapping[str, float]] = {
        "samples without a reward": totals.failures,
        "rows of the data skipped": totals.rows_skipped,
        "deaths of engines": family(counts, "engines/died/"),
        "requests preempted": family(counts, "engines/preempted/"),
    }
    sections = [
        _tokens(totals),
        _groups(totals),
        ("Time", totals.bound.line if totals.bound else "", chosen(TIMES)),
        ("Age and length", "", chosen(QUALITIES)),
        ("Weights", weights_in_words(lives), []),
        ("Money", cost, chosen(COSTS)),
        ("Bias of the rules", "", chosen(BIASES)),
        (
            "Problems",
            "",
            [
                (f"{what}: {why.replace('_', ' ')}", f"{n:,.0f}", None)
                for what, by in problems.items()
                for why, n in by.items()
            ],
        ),
    ]
    return [{"title": title, "text": text, "rows": rows} for title, text, rows in sections if text or rows]


def _tokens(totals: RunSummary) -> tuple[str, str, list[Cells]]:
    tokens = totals.tokens
    fates = {"trained": tokens.trained, "masked, because too old": tokens.masked, "parked": tokens.parked}
    fates |= {f"wasted: {reason.replace('_', ' ')}": number for reason, number in tokens.wasted.items()}
    known = sum(fates.values())
    fates["still open"] = max(0, tokens.generated - known)
    of = max(1, tokens.generated, known)
    rows: list[Cells] = [(fate, f"{number:,}", number / of) for fate, number in fates.items() if number]
    wasted = sum(tokens.wasted.values())
    text = f"{tokens.generated:,} tokens were generated; {tokens.trained / of:.1%} were trained"
    text += f", {wasted / of:.1%} wasted." if wasted else ", none wasted."
    return "Tokens", text if tokens.generated else "", rows


def _groups(totals: RunSummary) -> tuple[str, str, list[Cells]]:
    groups = totals.groups
    fates = {"trained": groups.trained, "parked": groups.parked}
    fates |= {
        reason.replace("/", ": ").replace("_", " "): number for reason, number in groups.reasons.items()
    }
    of = max(1, sum(fates.values()))
    rows: list[Cells] = [(fate, f"{n:,}", n / of) for fate, n in fates.items() if n]
    return "Groups", "", rows


def weights_in_words(lives: Sequence[Timeline]) -> str:
    """Say whether published weights arrived in the engines."""
    probes = [probe for life in lives for probe in life.probes]
    publications = sum(len(life.publications) for life in lives)
    if not probes:
        return f"{publications:,} publications, which no engine was asked to prove." if publications else ""
    failed = [probe for probe in probes if probe.arrival.cause]
    worst = max(probes, key=lambda probe: probe.arrival.difference)
    text = f"{publications:,} publications, {len(probes):,} probes of engines: "
    if failed:
        last = failed[-1]
        text += f"{len(failed):,} show that the weights had not arrived, the last one "
        return f"{text}of {last.engine}: {last.arrival.cause}."
    difference, limit = worst.arrival.difference, worst.arrival.limit
    text += f"the weights arrived each time. The largest difference of log-probs is {difference:.2g} nats a "
    return f"{text}token, and up to {limit:.2g} is good."
