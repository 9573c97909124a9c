"""The tables and figures of learning.py, from its files of results."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from common import EXAMPLES
from studies import STUDIES

FORMAT = 1
"""Version of the files of results."""
RESULTS = EXAMPLES.parent / "benchmarks" / "results" / "learning"
PAGE = RESULTS.with_suffix(".md")
FIGURES = EXAMPLES.parent / "docs" / "images"
CURVE = (
    "samples",
    "generated",
    "generated_tokens",
    "seconds",
    "reward",
    "ess",
    "kl",
    "lag",
    "lag_max",
    "length",
)
"""The columns of a curve: at the end of a part of the run; then over the samples of the part."""
HEAD = (
    "format",
    "study",
    "schedule",
    "seed",
    "samples",
    "parameters",
    "settings",
    "config",
    "made",
    "machine",
)
INTRODUCTION = """\
# Learning, measured

Made by `python benchmarks/learning.py --report` from the files in `learning/`, one a run.
`benchmarks/studies.py` has the settings. ±: the half-width of a 95% interval over the seeds (Student's t).
Runs of one seed have the same prompts, so the difference to the first row is taken seed by seed. "Samples to
0.7": trained until the mean reward of 512 samples was so high, of the seeds that came there.
"""
COLUMNS = ("seeds", "accuracy", "less the first", "reward, first quarter", "last quarter", "all")
COLUMNS += ("less the first", "samples to 0.7", "ESS", "lag, mean", "lag, largest")
COLUMNS += ("wasted", "generated a trained sample", "length")
MASKED = ("masked", "of each tenth")
"""Columns of a study that has such runs: shares of tokens, of all and of each tenth of the response."""

Result = dict[str, Any]
Row = dict[str, float]


def read_result(path: Path) -> Result:
    """The results of a run. A file that is not one, or of another format, ends the program."""
    try:
        found: Result = json.loads(path.read_text(encoding="utf-8"))
        number = found["format"]
    except (ValueError, LookupError, TypeError) as why:
        raise SystemExit(f"{path}: it is not a file of learning.py ({why!r}); move it away") from None
    if number != FORMAT:
        raise SystemExit(f"{path}: format {number!r}; this is a program of format {FORMAT}: measure it anew")
    study, schedule = found.get("study"), found.get("schedule")
    if missing := [key for key in HEAD if key not in found]:
        raise SystemExit(f"{path}: it has no {', '.join(missing)}; move it away")
    if study not in STUDIES:
        raise SystemExit(f"{path}: study {study!r}: there is no such study; choose from {', '.join(STUDIES)}")
    if schedule not in STUDIES[study].schedules:
        names = ", ".join(STUDIES[study].schedules)
        raise SystemExit(f"{path}: schedule {schedule!r}: not in {study}; it has {names}")
    return found


def read_all(results: Path) -> dict[str, dict[str, list[Result]]]:
    """The runs by study and schedule, in the order of studies.py and of the seeds."""
    found = [read_result(path) for path in sorted(results.glob("*.json"))]
    runs: dict[str, dict[str, list[Result]]] = {name: {} for name in STUDIES}
    for name, study in STUDIES.items():
        for schedule in study.schedules:
            those = [each for each in found if (each["study"], each["schedule"]) == (name, schedule)]
            those.sort(key=lambda each: each["seed"])
            for key in ("samples", "parameters", "settings", "config"):
                if any(each[key] != those[0][key] for each in those):
                    raise SystemExit(f"{results}: the runs of {name}, {schedule} differ in {key}: keep one")
            if those:
                runs[name][schedule] = those
    return runs


def runs_of(runs: dict[str, dict[str, list[Result]]], name: str) -> dict[str, list[Result]]:
    """The runs that a study shares, and its own."""
    found: dict[str, list[Result]] = {}
    for other, schedules in STUDIES[name].shared.items():
        found |= {schedule: runs[other][schedule] for schedule in schedules if schedule in runs[other]}
    return found | runs[name]


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean; 0 with one value."""
    from scipy.stats import t

    if len(values) < 2:
        return 0.0
    return float(t.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values))


def over(
    curve: dict[str, list[float]], key: str, begin: float, end: float, *, weight: str = "samples"
) -> float:
    """The mean of a column from sample `begin` to sample `end`, by samples, or by tokens ("length")."""
    ends = [0, *curve["samples"]]
    weights = [max(0.0, min(end, after) - max(begin, before)) for before, after in pairwise(ends)]
    if weight == "length":
        weights = [n * length for n, length in zip(weights, curve["length"], strict=True)]
    return sum(n * each for n, each in zip(weights, curve[key], strict=True)) / sum(weights)


def samples_to(curve: dict[str, list[float]], reward: float, of: float = 512) -> float | None:
    """The trained samples until the mean reward of the last ones, `of` or those of a point, is as high; None
    if it never is."""
    begin, ends = 0, [0, *curve["samples"]]
    for end in range(1, len(ends)):
        while begin < end - 1 and ends[end] - ends[begin + 1] >= of:
            begin += 1
        if (
            ends[end] - ends[begin] >= min(of, ends[-1])
            and over(curve, "reward", ends[begin], ends[end]) >= reward
        ):
            return ends[end]
    return None


def summary(run: Result, samples: float | None = None) -> Row:
    """The figures of a run; `samples`: of its first ones."""
    curve = run["curve"]
    ends = [each for each in curve["samples"] if not samples or each <= samples]
    total = samples or ends[-1]
    found = {
        "accuracy": [each for at, each in run["evaluations"] if at <= total][-1],
        "reward, first quarter": over(curve, "reward", 0, total / 4),
        "last quarter": over(curve, "reward", total * 3 / 4, total),
        "all": over(curve, "reward", 0, total),
        "length": over(curve, "length", 0, total),
    }
    if (reached := samples_to(curve, 0.7)) is not None:
        found["samples to 0.7"] = reached
    if "ess" in curve:
        found["ESS"] = over(curve, "ess", 0, total)
        found["lag, mean"] = over(curve, "lag", 0, total, weight="length")
        found["lag, largest"] = max(curve["lag_max"][: len(ends)])
        found["generated a trained sample"] = curve["generated"][len(ends) - 1] / ends[-1]
    if "tokens" in run and not samples:
        found["wasted"] = sum(run["tokens"]["wasted"].values()) / run["tokens"]["generated"]
    return found


def shown(values: Sequence[float], *, share: bool = False, sign: bool = False) -> str:
    """A mean with its interval; nothing of no values."""
    if not values:
        return ""
    centre, half = fmean(values), interval(values)
    if share:
        return f"{centre:.0%}"
    digits = 0 if centre >= 100 else 1 if centre >= 10 else 3 if centre < 1 else 2
    return f"{centre:{'+' if sign else ''},.{digits}f}" + (f" ±{half:,.{digits}f}" if len(values) > 1 else "")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [["schedule", *columns], ["---"] * (len(columns) + 1), *rows]
    return "\n".join("|" + "|".join(f" {each} " for each in line) + "|" for line in lines)


def part(name: str, runs: dict[str, list[Result]]) -> str:
    """The section of a study."""
    study = STUDIES[name]
    lengths = {run["samples"] for found in runs.values() for run in found}
    number = min(lengths) if len(lengths) > 1 else None
    lines = [f"## {name}", study.claim + "."]
    if study.runner == "kl":
        return "\n\n".join([*lines, divergence_table(runs)])
    rows = []
    figures = {
        schedule: {run["seed"]: summary(run, number) for run in found} for schedule, found in runs.items()
    }
    first = next(iter(figures.values()))
    masks = MASKED if any("masked" in run for found in runs.values() for run in found) else ()
    for schedule, found in figures.items():
        cells, before = [f"`{schedule}`", str(len(found))], ""
        for column in COLUMNS[1:]:
            values = [row[column] for row in found.values() if column in row]
            if column == "less the first":
                both = found.keys() & first.keys() if found is not first else {}
                values = [found[seed][before] - first[seed][before] for seed in sorted(both)]
            cell = shown(values, share=column == "wasted", sign=column == "less the first")
            fewer = column == "samples to 0.7" and 0 < len(values) < len(found)
            cells.append(f"{cell} ({len(values)} seeds)" if fewer else cell)
            before = column
        if masks:
            cells += masked_cells([run["masked"] for run in runs[schedule] if "masked" in run])
        rows.append(cells)
    samples = f"{number or next(iter(runs.values()))[0]['samples']:,} trained samples"
    machine = "quiet" if all(run["machine"]["quiet"] for each in runs.values() for run in each) else "busy"
    lines.append(f"{samples}, {study.config.name}, {HELD} held-out prompts; the machine was {machine}.")
    return "\n\n".join([*lines, table((*COLUMNS, *masks), rows)])


def masked_cells(found: Sequence[Result]) -> list[str]:
    """The masked shares of the runs of a schedule; of each tenth in percent."""
    if not found:
        return ["", ""]
    tenths = [fmean(column) for column in zip(*(each["tenths"] for each in found), strict=True)]
    return [f"{fmean(each['share'] for each in found):.0%}", " ".join(f"{100 * each:.0f}" for each in tenths)]


HELD = "1,024"


def divergence_table(runs: dict[str, list[Result]]) -> str:
    """KL in nats a token to on-policy, for each start and lag g; "late": from t_1 on."""
    kinds = {"old": "old weights", "kept": "mixed, cache kept", "recomputed": "mixed, recomputed"}
    columns = ["start", "g", "seeds", *kinds.values(), "kept over old", "recomputed over old"]
    columns += ["late: kept over old", "late: recomputed over old"]
    rows = []
    for name, found in runs.items():
        for start, first in found[0]["divergences"].items():
            for place, lag in enumerate(first["g"]):
                columns_of = (run["divergences"][start].items() for run in found)
                of = [{key: each[place] for key, each in row if isinstance(each, list)} for row in columns_of]
                cells = [f"{fmean(row[kind] for row in of):.2g}" for kind in kinds]
                for late in ("", ", late"):
                    for kind in ("kept", "recomputed"):
                        cells.append(shown([row[kind + late] / row["old" + late] for row in of]))
                rows.append([name, start, str(lag), str(len(found)), *cells])
    return table(columns, rows)


def text(runs: dict[str, dict[str, list[Result]]]) -> str:
    """The page of all studies that have results."""
    parts = [part(name, found) for name in STUDIES if runs[name] and (found := runs_of(runs, name))]
    return "\n\n".join([INTRODUCTION.strip(), *parts]) + "\n"


def write(results: Path, page: Path, figures: Path) -> None:
    """Write the page of the tables, and the figures that pages of docs/ show."""
    runs = read_all(results)
    page.write_text(text(runs), encoding="utf-8")
    for name, study in STUDIES.items():
        if runs[name] and study.figure:
            draw(name, runs_of(runs, name), figures / f"learning_{name}.png")


def draw(name: str, runs: dict[str, list[Result]], path: Path) -> None:
    """The figure of a study."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    kl, lags, peer = STUDIES[name].runner == "kl", name == "lagcurve", STUDIES[name].runner == "trl"
    shape, size = ((len(runs), 3), (11, 3.2 * len(runs))) if kl else ((1, 2), (11, 4))
    figure, axes = plt.subplots(*shape, figsize=size, layout="constrained", sharey=not lags, squeeze=False)
    if peer:
        draw_minutes(axes[0], runs)
    elif lags:
        draw_lags(axes[0], runs)
    elif kl:
        draw_divergences(axes, runs)
    else:
        draw_curves(axes[0], runs, right="seconds" if STUDIES[name].checkpoints else "generated")
    if not kl:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=100)
    plt.close(figure)
    Image.open(path).quantize(64).save(path, optimize=True)  # few colours: a third of the bytes


def draw_curves(axes: Any, runs: dict[str, list[Result]], right: str) -> None:
    """The reward over trained samples, with its interval, and over what else a schedule takes."""
    for name, found in runs.items():
        curves = [run["curve"] for run in found]
        length = min(len(curve["samples"]) for curve in curves)
        columns = {
            key: [[curve[key][place] for curve in curves] for place in range(length)]
            for key in ("samples", "reward", right)
            if all(key in curve for curve in curves)
        }
        means = list(map(fmean, columns["reward"]))
        half = list(map(interval, columns["reward"]))
        places = list(map(fmean, columns["samples"]))
        (line,) = axes[0].plot(places, means, label=name)
        low, high = ([m + sign * h for m, h in zip(means, half, strict=True)] for sign in (-1, 1))
        axes[0].fill_between(places, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        if right in columns:
            axes[1].plot(list(map(fmean, columns[right])), means, color=line.get_color())
    axes[0].set(xlabel="trained samples", ylabel="reward", ylim=(0, 1))
    labels = {"generated": "generated samples", "seconds": "seconds of training, on a busy machine"}
    axes[1].set(xlabel=labels[right])


WINDOW = 512
"""Samples of a mean reward in the figure of `trl`."""


def draw_minutes(axes: Any, runs: dict[str, list[Result]]) -> None:
    """The mean reward of the last WINDOW samples, and the accuracy (circles), over trained samples and over
    minutes of training."""
    for name, found in runs.items():
        color, label = None, name
        for run in found:
            curve = run["curve"]
            ends, minutes = curve["samples"], [each / 60 for each in curve["seconds"]]
            rewards = [over(curve, "reward", max(0, end - WINDOW), end) for end in ends]
            for each, at in zip(axes, (ends, minutes), strict=True):
                (line,) = each.plot(at, rewards, color=color, label=label, linewidth=1.2)
                color, label = line.get_color(), None
                of = dict(zip([0, *ends], [0, *at], strict=True))
                marks = [(of[samples], accuracy) for samples, accuracy in run["evaluations"] if samples in of]
                each.plot(*zip(*marks, strict=True), color=color, marker="o", markersize=5, linestyle="")
    quiet = all(run["machine"]["quiet"] for found in runs.values() for run in found)
    axes[0].set(xlabel="trained samples", ylabel="reward; circles: held-out accuracy", ylim=(0, 1))
    axes[1].set(xlabel=f"minutes of training on one core{'' if quiet else ' of a busy machine'}")


def draw_lags(axes: Any, runs: dict[str, list[Result]]) -> None:
    """Accuracy, and mean reward, after equal samples over the mean lag."""
    from matplotlib import colormaps

    for key, label, each in zip(("accuracy", "all"), ("accuracy", "mean reward"), axes, strict=True):
        for number, (name, found) in enumerate(runs.items()):
            rows = [summary(run, 4096) for run in found]
            lags, values = ([row[column] for row in rows] for column in ("lag, mean", key))
            marker, color = "os^v"[number % 4], colormaps["tab20"](number)
            errors = (interval(values), interval(lags))
            each.errorbar(fmean(lags), fmean(values), *errors, label=name, marker=marker, color=color, ls="")
        each.set(xlabel="mean lag of a trained token, optimizer steps", ylabel=f"{label}, 4,096 samples")
        each.set_xscale("symlog", linthresh=1)


def draw_divergences(axes: Any, runs: dict[str, list[Result]]) -> None:
    """KL to on-policy over the lag: a row each L, a column each start."""
    labels = {"old": "old weights", "kept": "mixed, cache kept", "recomputed": "mixed, cache recomputed"}
    for row, (name, found) in zip(axes, runs.items(), strict=True):
        for each, start in zip(row, found[0]["divergences"], strict=True):
            of = [run["divergences"][start] for run in found]
            for kind, label in labels.items():
                means = [fmean(column) for column in zip(*(one[kind] for one in of), strict=True)]
                each.plot(of[0]["g"], means, marker="o", markersize=4, label=label)
            each.set(xlabel="lag g", title=f"{name}, from step {start}", xscale="log", yscale="log")
        row[0].set(ylabel="KL to on-policy, nats a token")
        row[0].legend(frameon=False)
