"""`tailrace compare` on finished runs: their figures side by side, and the keys that differ."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from rich.table import Table

from tailrace.config import changed_keys
from tailrace.drivers.assembly.folder import RunFolder, runs_in
from tailrace.drivers.commands.intervals import recorded_estimate
from tailrace.errors import ConfigError, say
from tailrace.record.events import Row
from tailrace.record.figures import QUALITIES, TIMES, evaluations_of, over_steps, steps_of
from tailrace.record.metrics import read_rows
from tailrace.record.summary import Summary

OF_TRIALS = ("samples_per_s", "waiting_ratio", "lag_mean", "ess_mean", "truncated_share")
FIGURES = {
    "held_out": ("held-out reward", "{:.3f}"),
    "reward": ("reward, last round", "{:.3f}"),
    "eval_loss": ("held-out loss", "{:.4f}"),
    "loss": ("loss, last step", "{:.4f}"),
    "steps": ("optimizer steps", "{:.0f}"),
    "step_s": ("s/step, without evaluations", "{:.2f}"),
    **{key: {**TIMES, **QUALITIES}[key] for key in OF_TRIALS},
}
"""Label and format of the rows."""


def folders_of(paths: Sequence[Path]) -> dict[str, RunFolder]:
    """The runs with metrics in some folders, by name (`runs_in`). Raises a ConfigError for less than two."""
    named = runs_in(paths, lambda path: RunFolder(path).metrics.exists())
    found = {name: folder for name, path in named if (folder := RunFolder(path)).metrics.exists()}
    if len(found) < max(2, len(paths)):
        remedy = "name two or more output directories of runs with optimizer steps"
        raise ConfigError("RUN", " ".join(map(str, paths)), f"{len(found)} of them hold metrics", remedy)
    return found


def figures_of(folder: RunFolder) -> Row:
    """The figures of a run. Raises a ConfigError if it has no round yet."""
    rows = read_rows(folder.metrics)
    try:
        if folder.command == "sft":
            return _figures_of_losses(folder, rows)
        summary = Summary(earlier=rows)
        if not (totals := summary.summary()).rounds or not totals.reward:
            raise ConfigError("RUN", str(folder.path), "it has no finished round", "wait for the first one")
        figures: Row = {key: summary.figures()[key] for key in OF_TRIALS}
        figures |= {"steps": totals.steps, "reward": totals.reward.last}
        figures |= {"step_s": over_steps(steps_of(rows), "time/step")}
    except LookupError as why:
        problem = f"a row of its metrics.jsonl lacks {why}"
        raise ConfigError("RUN", str(folder.path), problem, "name runs of this version") from None
    for row in evaluations_of(rows)[-1:]:
        figures["held_out"] = row["eval/reward"]
        if (estimate := recorded_estimate(folder.samples, row["round"])) and estimate.interval:
            figures["low"], figures["high"] = estimate.interval
    return figures


def _figures_of_losses(folder: RunFolder, rows: Sequence[Row]) -> Row:
    if not (steps := steps_of(rows)):
        raise ConfigError("RUN", str(folder.path), "it has no finished step", "wait for the first one")
    step_s, held_out = fmean(row["time/step"] for row in steps), [row for row in rows if "eval/loss" in row]
    figures = {"steps": steps[-1]["step"], "step_s": step_s, "loss": steps[-1]["loss"]}
    return {**figures, "eval_loss": held_out[-1]["eval/loss"]} if held_out else figures


def verdict(runs: Mapping[str, Row]) -> str:
    """Which run is better, by held-out reward, or by reward where a run has none, or by loss; and which is
    faster."""
    keys = ("held_out", "reward", "eval_loss", "loss")
    key = next(key for key in keys if all(key in run for run in runs.values()))
    better, sign = ("lower", 1) if "loss" in key else ("higher", -1)
    best, second, *_ = sorted(runs, key=lambda name: sign * runs[name][key])
    label, form = FIGURES[key]
    high, low = (form.format(runs[name][key]) for name in (best, second))
    text = f"{best} has the {better} {label}: {high}, {second} {low}"
    if high == low:
        text = f"{best} and {second} have the same {label}: {high}"
    elif key == "held_out" and all("low" in runs[name] for name in (best, second)):
        if (least := runs[best]["low"]) <= (most := runs[second]["high"]):
            text += f", which may be chance: their 95% intervals go from {least:.3f} and to {most:.3f}"
    else:
        text += ", whose spread is not known"
    fast, slow = (pick(runs, key=lambda name: runs[name]["step_s"]) for pick in (min, max))
    least_s, times = runs[fast]["step_s"], f"{runs[slow]['step_s'] / (runs[fast]['step_s'] or 1.0):.2f}"
    if times == "1.00":
        return f"{text}. A step took equally long, {least_s:.2f} s."
    return f"{text}. A step of {fast} took the least time, {least_s:.2f} s; the most {times} times that."


def table_of(folders: Mapping[str, RunFolder], runs: Mapping[str, Row]) -> Table:
    """A column for each run; a row for each figure, and for each key in which their configs differ. If one
    cannot be read, the table has no keys, and a message says why."""
    table = Table("run", *runs, title="runs", title_justify="left")
    for figure, (label, form) in FIGURES.items():
        values = [run.get(figure) for run in runs.values()]
        if any(value is not None for value in values):
            table.add_row(label, *("-" if value is None else form.format(value) for value in values))
    try:
        configs = [folder.read_config() for folder in folders.values()]
    except ConfigError as why:
        say(f"settings are not compared: {str(why).splitlines()[0]}")
        return table
    changed = [changed_keys(configs[0].to_json(), config) for config in configs]
    for key in sorted({*chain(*changed)}):
        first = next(keys[key][0] for keys in changed if key in keys)
        table.add_row(key, *(str(keys[key][1] if key in keys else first) for keys in changed))
    return table
