"""The tables and figures of learning.py, from its files of results."""

import json
import tomllib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from claims import CLAIMS
from common import EXAMPLES
from studies import STUDIES, Study
from tailrace.drivers.commands.intervals import half_width

FORMAT = 1
"""Version of the files of results."""
RESULTS = EXAMPLES.parent / "benchmarks" / "results" / "learning"
PAGE = RESULTS.with_suffix(".md")
FIGURES = EXAMPLES.parent / "docs" / "images"
PAGES = EXAMPLES.parent / "docs" / "why"
MARKS = ("<!-- made by benchmarks/learning.py --report -->\n", "<!-- end -->\n")
"""Between them the report writes a table of a page: one of `TABLES`, in their order."""
LAGS = {"lag up to 1": 1.0, "lag up to 4": 4.0, "longer lag": inf}
"""Largest mean lags of the schedules that are shown together."""
MODELS = {"quickstart": "live, 0.4M", "tools": "live, 0.2M", "long_tail": "live, 135M, one CPU core"}
"""How a run is measured, by the name of its config."""
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
Runs of one seed have the same prompts, so a difference of two runs is taken seed by seed. "Samples to 0.7":
trained until the mean reward of 512 samples was so high, of the seeds that came there. It is a multiple of a
32nd of the run's samples: runs of different lengths do not compare in it.

The second table of a study has a verdict on each run. *Agrees*: the interval of the difference lies within
the margin. *Less*, *more*: it excludes zero. A run is compared with the first one of its settings, with the
one that `studies.py` names, and in flight with conventional where the mean lags differ by at most 15%. Of a
hundred intervals five exclude zero by chance. *Best*: the highest accuracy of any run of the task. *Untuned*:
no setting was searched for any schedule.
"""
COMPARED = {"accuracy": "accuracy", "all": "mean reward", "second half": "reward, second half"}
"""The figures that have verdicts: columns of a summary, and their names."""
ALIKE = 0.15
"""Largest relative difference of two mean lags that count as equal."""
COLUMNS: tuple[str, ...] = (
    "seeds",
    "accuracy",
    "less the first",
    "reward, first quarter",
    "last quarter",
    "all",
)
COLUMNS += ("less the first", "samples to 0.7", "ESS", "lag, mean", "lag, largest")
COLUMNS += ("wasted", "generated a trained sample", "length")
MASKED = ("masked", "of each tenth")
"""Columns of a study that has such runs: shares of tokens, of all and of each tenth of the response."""

Result = dict[str, Any]
Row = dict[str, float]
Runs = dict[str, list[Result]]
Figures = dict[str, dict[int, Row]]
"""The summaries of the runs of a study, by schedule and seed."""


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


def read_all(results: Path) -> dict[str, Runs]:
    """The runs by study and schedule, in the order of studies.py and of the seeds."""
    found = [read_result(path) for path in sorted(results.glob("*.json"))]
    runs: dict[str, Runs] = {name: {} for name in STUDIES}
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


def runs_of(runs: dict[str, Runs], name: str) -> Runs:
    """The runs that a study shares, and its own."""
    found: Runs = {}
    for other, schedules in STUDIES[name].shared.items():
        found |= {schedule: runs[other][schedule] for schedule in schedules if schedule in runs[other]}
    return found | runs[name]


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean; 0 with one value."""
    return half_width(values) if len(values) > 1 else 0.0


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
        "second half": over(curve, "reward", total / 2, total),
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
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("|" + "|".join(f" {each} " for each in line) + "|" for line in lines)


def samples_of(runs: Runs) -> int:
    """The trained samples of the shortest run."""
    return min(int(run["samples"]) for found in runs.values() for run in found)


def figures_of(runs: Runs) -> Figures:
    """The figures of the first samples of each run, as many as the shortest run has."""
    number = samples_of(runs)
    return {
        schedule: {run["seed"]: summary(run, number if run["samples"] > number else None) for run in found}
        for schedule, found in runs.items()
    }


def paired(figures: Figures, schedule: str, against: str, column: str) -> list[float]:
    """A figure less that of another run, for each seed that both have."""
    one, other = figures[schedule], figures[against]
    return [one[seed][column] - other[seed][column] for seed in sorted(one.keys() & other.keys())]


def verdict(differences: Sequence[float], margin: float) -> str:
    """The words that an interval allows."""
    if len(differences) < 2:
        return "fewer than two seeds: none"
    low, high = (fmean(differences) + sign * interval(differences) for sign in (-1, 1))
    if max(-low, high) <= margin:
        return f"agrees within {margin}"
    if low > 0 or high < 0:
        return "more" if low > 0 else "less"
    return f"no difference seen; a loss of up to {-low:.3f} is not excluded"


def pairs(study: Study, runs: Runs, figures: Figures) -> list[tuple[str, str]]:
    """The runs that are compared, each with the other one."""
    names = list(runs)
    settings = {name: found[0]["settings"] for name, found in runs.items()}
    first = {name: next(each for each in names if settings[each] == settings[name]) for name in names}
    found = {(name, first[name] if first[name] != name else names[0]): None for name in names}
    found |= {pair: None for pair in study.against.items() if {*pair} <= runs.keys()}
    rounds = [name for name in names if runs[name][0]["parameters"].get("steps_per_round", 1) > 1]
    lag = {name: fmean(row.get("lag, mean", 0.0) for row in each.values()) for name, each in figures.items()}
    for other in rounds:
        for name in (each for each in names if each not in rounds and settings[each] == settings[other]):
            if abs(lag[name] - lag[other]) <= ALIKE * max(lag[name], lag[other]):
                found[name, other] = None
    return [pair for pair in found if pair[0] != pair[1]]


def conditions(runs: Sequence[Result], samples: int) -> str:
    """The trained samples, optimizer steps and learning rates of runs of one task."""
    task = tomllib.loads((EXAMPLES.parent / runs[0]["config"]).read_text(encoding="utf-8"))
    steps, rates = [], []
    for run in runs:
        settings, schedule = run["settings"], run["parameters"]
        groups = schedule.get("groups_per_step") or schedule["groups_per_round"]
        members = settings.get("run.groups.keep") or settings.get("run.group_size", task["run"]["group_size"])
        steps.append(f"{samples // (groups * int(members)):,}")
        rate = settings.get("trainer.learning_rate", task["trainer"]["learning_rate"])
        rates.append(f"{float(schedule.get('learning_rate', rate)):.0e}".replace("e-0", "e-"))
    step, rate = (" and ".join(dict.fromkeys(each)) for each in (steps, rates))
    return f"{samples:,} samples in {step} optimizer steps at a learning rate of {rate}"


def best_of(runs: dict[str, Runs]) -> dict[str, float]:
    """The highest accuracy of any run, by config."""
    found: dict[str, float] = {}
    for run in (run for study in runs.values() for each in study.values() for run in each):
        reached = [accuracy for _, accuracy in run.get("evaluations", [])]
        found[run["config"]] = max([found.get(run["config"], 0.0), *reached])
    return found


def verdicts(name: str, runs: Runs, best: dict[str, float]) -> str:
    """The table of the verdicts of a study."""
    study, figures, rows = STUDIES[name], figures_of(runs), []
    margin = f"margin {study.margin} chosen {study.margin_named}"
    config = next(iter(runs.values()))[0]["config"]
    task = f"{study.config.name}, best {best[config]:.2f}"
    for schedule, against in pairs(study, runs, figures):
        cells = [f"`{schedule}`", f"`{against}`", str(len(paired(figures, schedule, against, "all")))]
        for column in COMPARED:
            values = paired(figures, schedule, against, column)
            cells += [shown(values, sign=True), verdict(values, study.margin)]
        regime = conditions([runs[schedule][0], runs[against][0]], samples_of(runs))
        rows.append([*cells, f"{task}; {regime}; untuned; {margin}"])
    columns = [each for what in COMPARED.values() for each in (what, "verdict")]
    return table(["schedule", "less", "seeds", *columns, "conditions"], rows)


def answers(runs: dict[str, Runs]) -> str:
    """The table of the claims of claims.py whose runs are there, and the conditions of their studies."""
    rows: list[list[str]] = []
    seeds: dict[str, set[int]] = {}
    compared: dict[str, list[Result]] = {}
    for claim in CLAIMS:
        study, found = STUDIES[claim.study], runs_of(runs, claim.study)
        if not {claim.schedule, claim.against} <= found.keys():
            continue
        compared.setdefault(claim.study, []).extend(
            found[each][0] for each in (claim.schedule, claim.against)
        )
        values = paired(figures_of(found), claim.schedule, claim.against, claim.figure)
        seeds.setdefault(claim.study, set()).add(len(values))
        margin = study.margin if claim.figure in COMPARED else 0.0
        figure = f"{COMPARED.get(claim.figure, claim.figure)}: `{claim.schedule}` less `{claim.against}`"
        answer = [figure, shown(values, sign=True), verdict(values, margin), MODELS[study.config.stem]]
        rows.append([claim.words, *answer, f"`python benchmarks/learning.py {claim.study}`"])
    lines = []
    for name, found_of in compared.items():
        number = " to ".join(map(str, sorted(seeds[name])))
        margin_of = f"margin {STUDIES[name].margin}, chosen {STUDIES[name].margin_named}"
        regime = conditions(found_of, samples_of(runs_of(runs, name)))
        lines.append(f"- `{name}`: {number} seeds, {regime}; {margin_of}.")
    columns = ["claim", "figure", "difference", "verdict", "measured", "command"]
    head = "\nConditions of the studies, which the commands name:\n"
    return "\n".join([table(columns, rows), head, *lines, ""])


def verification(runs: dict[str, Runs]) -> str:
    """The table of what verified runs learn and waste, against `serial` and no bound; "": there are none."""
    found = runs_of(runs, "verified")
    others = ("serial", "pipelinerl")
    if not {*others} <= found.keys():
        return ""
    figures, rows = figures_of(found), []
    for name in (each for each in found if each != "serial"):
        own = figures[name].values()
        cells = [f"`{name}`", f"{fmean(row['lag, mean'] for row in own):.1f}"]
        for column, other in (("all", "serial"), ("all", "pipelinerl"), ("accuracy", "serial")):
            values = paired(figures, name, other, column) if name != other else []
            cells.append(shown(values, sign=True))
        rows.append([*cells, shown([row["wasted"] for row in own], share=True)])
    study, number = STUDIES["verified"], " to ".join(map(str, sorted({len(each) for each in found.values()})))
    regime = conditions([each[0] for each in found.values()], samples_of(found))
    measured = f"L{MODELS[study.config.stem][1:]}, {number} seeds, {regime}. Differences are paired by seed:"
    columns = ["schedule", "mean lag", "reward less `serial`", "less `pipelinerl`", "accuracy less `serial`"]
    return f"{measured}\n\n{table([*columns, 'wasted tokens'], rows)}\n"


def costs(runs: dict[str, Runs]) -> str:
    """The table of what lag costs against one step a round: shares of the reward, and accuracy."""
    found, base = runs_of(runs, "lagcurve"), "G=1"
    if base not in found:
        return ""
    figures, longer = figures_of(found), figures_of(runs["lag"])
    kinds: dict[str, list[str]] = {}
    means = {
        name: {
            column: fmean(row[column] for row in each.values())
            for column in ("lag, mean", "all", "second half")
        }
        for name, each in figures.items()
    }
    for name in sorted(means.keys() - {base}, key=lambda name: means[name]["lag, mean"]):
        is_rounds = found[name][0]["parameters"]["name"] == "conventional"
        lag = next(lag for lag, most in LAGS.items() if means[name]["lag, mean"] <= most)
        kinds.setdefault(f"`conventional`, {name}" if is_rounds else f"others, {lag}", []).append(name)
    rows = []
    for kind, names in sorted(kinds.items(), key=lambda each: each[0][0], reverse=True):  # others first
        cells = [
            " to ".join(dict.fromkeys(f"{means[name]['lag, mean']:.0f}" for name in (names[0], names[-1])))
        ]
        for column in ("all", "second half"):
            shares = sorted(f"{1 - means[name][column] / means[base][column]:4.0%}" for name in names)
            cells.append(" to ".join(dict.fromkeys(share.strip() for share in (shares[0], shares[-1]))))
        for each in (figures, longer):
            lost = [paired(each, name, base, "accuracy") for name in names if {name, base} <= each.keys()]
            said = [
                f"{-fmean(values):.3f}" if verdict(values, 0) == "less" else "none seen" for values in lost
            ]
            cells.append(", ".join(dict.fromkeys(said)))
        rows.append([kind, *cells])
    columns = ["schedules", "mean lag", "less reward, 4,096 samples", "their second half", "less accuracy"]
    return table([*columns, "after 20,480"], rows) + "\n"


TABLES = {"results.md": (answers,), "staleness.md": (costs, verification)}
"""The tables of each page, in their order there."""


def filled(page: Path, runs: dict[str, Runs]) -> str:
    """The text of a page with its present tables between the marks."""
    text, rest = "", page.read_text(encoding="utf-8")
    for made in TABLES[page.name]:
        before, begin, rest = rest.partition(MARKS[0])
        _, end, rest = rest.partition(MARKS[1])
        if not end:
            raise SystemExit(f"{page}: it has no place for a table; add the lines {' and '.join(MARKS)}")
        text += f"{before}{begin}\n{made(runs)}\n{end}"
    return text + rest


def part(name: str, runs: Runs, best: dict[str, float]) -> str:
    """The section of a study."""
    study = STUDIES[name]
    lines = [f"## {name}", study.claim + "."]
    if study.runner == "kl":
        return "\n\n".join([*lines, divergence_table(runs)])
    rows, figures = [], figures_of(runs)
    first = next(iter(figures))
    masks = MASKED if any("masked" in run for found in runs.values() for run in found) else ()
    for schedule, found in figures.items():
        cells, before = [f"`{schedule}`", str(len(found))], ""
        for column in COLUMNS[1:]:
            values = [row[column] for row in found.values() if column in row]
            if column == "less the first":
                values = paired(figures, schedule, first, before) if schedule != first else []
            cell = shown(values, share=column == "wasted", sign=column == "less the first")
            fewer = column == "samples to 0.7" and 0 < len(values) < len(found)
            cells.append(f"{cell} ({len(values)} seeds)" if fewer else cell)
            before = column
        if masks:
            cells += masked_cells([run["masked"] for run in runs[schedule] if "masked" in run])
        rows.append(cells)
    samples = f"{samples_of(runs):,} trained samples"
    machine = "quiet" if all(run["machine"]["quiet"] for each in runs.values() for run in each) else "busy"
    lines.append(f"{samples}, {study.config.name}, {HELD} held-out prompts; the machine was {machine}.")
    compared = [verdicts(name, runs, best)] if len(runs) > 1 else []
    return "\n\n".join([*lines, table(["schedule", *COLUMNS, *masks], rows), *compared])


def masked_cells(found: Sequence[Result]) -> list[str]:
    """The masked shares of the runs of a schedule; of each tenth in percent."""
    if not found:
        return ["", ""]
    tenths = [fmean(column) for column in zip(*(each["tenths"] for each in found), strict=True)]
    return [f"{fmean(each['share'] for each in found):.0%}", " ".join(f"{100 * each:.0f}" for each in tenths)]


HELD = "1,024"


def divergence_table(runs: Runs) -> str:
    """KL in nats a token to on-policy, for each start and lag g; "late": from t_1 on."""
    from kl_study import switch_positions

    kinds = {"old": "old weights", "kept": "mixed, cache kept", "recomputed": "mixed, recomputed"}
    columns = ["schedule", "start", "g", "updates in a mean response", "seeds", *kinds.values()]
    columns += ["kept over old", "recomputed over old"]
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
                tokens = fmean(run["divergences"][start]["tokens"] for run in found)
                places = switch_positions(lag, found[0]["parameters"]["length"])
                updates = sum(place < tokens for place in places)
                rows.append([name, start, str(lag), str(updates), str(len(found)), *cells])
    return table(columns, rows)


def text(runs: dict[str, Runs]) -> str:
    """The page of all studies that have results."""
    best = best_of(runs)
    parts = [part(name, found, best) for name in STUDIES if runs[name] and (found := runs_of(runs, name))]
    return "\n\n".join([INTRODUCTION.strip(), *parts]) + "\n"


def write(results: Path, page: Path, figures: Path, pages: Path) -> None:
    """Write the page of the tables, and the tables and figures of the pages of docs/."""
    runs = read_all(results)
    page.write_text(text(runs), encoding="utf-8")
    for name in TABLES:
        (pages / name).write_text(filled(pages / name, runs), encoding="utf-8")
    for name, study in STUDIES.items():
        if runs[name] and study.figure:
            draw(name, runs_of(runs, name), figures / f"learning_{name}.png")


def draw(name: str, runs: Runs, path: Path) -> None:
    """The figure of a study."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    kl, lags = STUDIES[name].runner == "kl", name == "lagcurve"
    shape, size = ((len(runs), 3), (11, 3.2 * len(runs))) if kl else ((1, 2), (11, 4))
    figure, axes = plt.subplots(*shape, figsize=size, layout="constrained", sharey=not lags, squeeze=False)
    if lags:
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


def draw_curves(axes: Any, runs: Runs, right: str) -> None:
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


def draw_lags(axes: Any, runs: Runs) -> None:
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


def draw_divergences(axes: Any, runs: Runs) -> None:
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
