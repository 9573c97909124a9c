"""Fits the [sim] section of a config to the files of a run.

The embedded engine records sums over its decode steps (`events.Decoded`), about ten times a second. A step
takes base_s + slope_s * running + context_s * positions (sim/engine.py): a linear problem with coefficients
that are not negative. Servers record no steps. Of them only base_s and the prefill are fitted, to the
durations of requests.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, median, pstdev
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.contracts.engine import DecodeSums
from tailrace.errors import ConfigError
from tailrace.record.events import Decoded, Interval
from tailrace.record.intervals import union
from tailrace.record.metrics import read_row
from tailrace.record.timeline import RunTimelines, Scoring, Timeline
from tailrace.sim.settings import SimSettings
from tailrace.sim.world import read_recorded

Array = npt.NDArray[np.float64]

ALONE = 0.05
"""Share of a duration in which others may work on the host, for work that counts as undisturbed."""
MIN_ALONE, MIN_ALONE_SHARE = 8, 0.25
"""Undisturbed pieces of work, and (of decode steps) their share, from which on only those give the
undisturbed cost."""
WIDE = 1.5
"""Ratio of the largest to the smallest pass from which on their fixed part is fitted."""
COLLINEAR = 0.02
"""A column of which the columns before it leave less than this share is not fitted."""
FAST_PREFILL = 1e9
"""Positions in a second, where prefills take no measurable time."""
_SHORTEST_S = 1e-6
"""A shorter time counts as this one."""


@dataclass(frozen=True, slots=True)
class FitPart:
    """Fitted parameters of one kind of work.

    Args:
        values: by the key of the config, such as "sim.engines.base_s".
        observations: how many the fit rests on.
        explained: share of the variance that it explains; None where there is no such share.
        notes: what could not be identified, in words.
    """

    name: str
    values: Mapping[str, object]
    observations: int
    explained: float | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Fit:
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
    """Fit a run from its events.jsonl, its metrics.jsonl and its folder of samples. Raises a ConfigError if a
    file is missing or damaged (the message names the first bad line), or nothing was trained. `workers`:
    samples that were scored at the same time."""
    timelines = RunTimelines(events)
    timelines.update()
    run = timelines.all
    if not any(each.requests for each in run):
        raise _refused(metrics.parent, f"{events.name} has no request", "name a run that has begun")
    prompt_tokens = _prompt_tokens(metrics)
    parts = [
        fit_engines(run, prompt_tokens),
        fit_aborts(run),
        fit_passes(run, prompt_tokens),
        fit_steps(run),
        fit_publications(run),
        fit_rewards(run, workers),
        fit_lengths(run, samples, prompt_tokens),
    ]
    return Fit(parts)


def _prompt_tokens(metrics: Path) -> float:
    """The mean length of the trained prompts."""
    num_tokens = num_trained = num_samples = last_step = 0.0
    for number, line in enumerate(metrics.read_bytes().splitlines() if metrics.exists() else [], 1):
        where, remedy = f"line {number} of {metrics.name} is", "remove that line, or name another run"
        try:
            row = read_row(line)
            if "loss" in row:
                num_tokens = row["num_tokens"]
                num_trained += row["tokens/trained"] + row.get("tokens/masked", 0.0)
                num_samples += row["samples/trained"]
        except (ValueError, LookupError) as why:
            raise _refused(metrics.parent, f"{where} torn or of another version ({why})", remedy) from None
        if row["step"] < last_step:
            problem = f"{where} out of order: step {row['step']} is after {last_step}"
            raise _refused(metrics.parent, problem, remedy)
        last_step = row["step"]
    if not num_samples:
        problem = f"{metrics.name} has no optimizer step"
        raise _refused(metrics.parent, problem, "name a run that has trained")
    return max(1.0, (num_tokens - num_trained) / num_samples)


def _refused(path: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError("RUN", str(path), problem, remedy)


class Solution(NamedTuple):
    """Coefficients by the name of their column. Columns that the ones before explain are left out."""

    coefficients: dict[str, float]
    explained: float
    """Share of the target's variance; 1 if it has none."""


def non_negative(columns: Mapping[str, Array], target: Array, variances: Array | None = None) -> Solution:
    """Fit a target by columns, with coefficients of at least 0.

    Args:
        columns: in the order of their importance.
        variances: relative variance of each observation; None: all are equal. In proportion to a column, the
            sum of the fitted values is that of the target.
    """
    matrix = np.column_stack([*columns.values()])
    weights = np.ones(len(target)) if variances is None else 1 / np.sqrt(variances)
    weighted = matrix * weights[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    # The diagonal of R is what each column adds to those before it. A column of zeros keeps its place.
    added = np.abs(np.diag(np.linalg.qr(weighted / scale)[1]))
    kept = [n for n, column in enumerate(matrix.T) if not column.any() or added[n : n + 1].sum() > COLLINEAR]
    found = least_squares(weighted[:, kept] / scale[kept], target * weights) / scale[kept]
    names = [*columns]
    coefficients = {names[n]: float(value) for n, value in zip(kept, found, strict=True)}
    return Solution(coefficients, explained(matrix[:, kept] @ found, target))


def least_squares(matrix: Array, target: Array) -> Array:
    """Return the x >= 0 with the least norm of `matrix @ x - target` (Lawson and Hanson, Solving Least
    Squares Problems, 1974, chapter 23).

    Args:
        matrix: [rows, columns], of linearly independent columns.
        target: [rows].
    """
    num = matrix.shape[1]
    found, is_free = np.zeros(num), np.zeros(num, bool)  # a coefficient that is not free is 0
    tolerance = 10 * max(matrix.shape) * np.finfo(float).eps * np.abs(matrix).sum(axis=0).max(initial=0.0)
    for _ in range(3 * num):  # rounding can free and bind the same coefficient for ever
        gradient = np.where(is_free, -np.inf, matrix.T @ (target - matrix @ found))
        if gradient.max(initial=-np.inf) <= tolerance:
            break
        is_free[gradient.argmax()] = True
        while True:
            solved = np.zeros(num)
            solved[is_free] = np.linalg.lstsq(matrix[:, is_free], target)[0]
            if not (is_low := is_free & (solved < 0)).any():
                break
            # The share of the way from `found` to `solved` after which a coefficient is 0.
            shares = np.divide(found, found - solved, out=np.full(num, np.inf), where=is_low)
            found = np.where(shares == shares.min(), 0.0, found + shares.min() * (solved - found))
            is_free &= shares > shares.min()
        found = solved
    return found


def explained(predicted: Array, target: Array) -> float:
    """The share of the target's variance that a prediction explains; 1 if there is none."""
    total = float(np.sum((target - target.mean()) ** 2))
    rest = float(np.sum((target - predicted) ** 2))
    return 1 - rest / total if total > 1e-18 * float(np.sum(target**2)) else 1.0


def slowdown(duration_s: Array, disturbed_s: Array, alone_s: Array) -> float:
    """The factor, at least 1, by which work is slower while others work (disturbed_s of each duration)."""
    left_s = float(np.sum(alone_s - (duration_s - disturbed_s)))
    return max(1.0, float(np.sum(disturbed_s)) / left_s) if left_s > 0 else 1.0


def overlap(work: Sequence[Interval], others: Iterable[Interval]) -> Array:
    """The seconds of each piece of work in which at least one other lasts."""
    starts, ends = union([(each.start_s, each.end_s) for each in others]).T
    times = np.array([(each.start_s, each.end_s) for each in work]).reshape(-1, 2)
    if not len(starts):
        return np.zeros(len(times))
    corners = np.stack((starts, ends), axis=1).ravel()
    busy_s = np.stack((np.cumsum(ends - starts) - (ends - starts), np.cumsum(ends - starts)), axis=1).ravel()
    first_s, last_s = (np.interp(time_s, corners, busy_s) for time_s in times.T)
    return np.asarray(last_s - first_s)


def fit_engines(run: Sequence[Timeline], prompt_tokens: float) -> FitPart:
    """Fit the costs of a decode step, of prefills and loads, drafts, and the slow-down by the trainer."""
    decoded = [each for process in run for each in process.decoded if each.sums.steps]
    if not decoded:
        return _fit_servers(run, prompt_tokens)
    sums = {
        name: np.array([getattr(each.sums, name) for each in decoded], float)
        for name in DecodeSums.__struct_fields__
    }
    seconds = sums["seconds"]
    busy_s = np.array([each.duration_s for each in decoded])
    trained_s = np.concatenate([overlap(process.decoded, process.trainer) for process in run])
    trained_s *= np.minimum(1.0, seconds / np.maximum(busy_s, _SHORTEST_S))  # its share of the decoding
    is_alone = trained_s <= ALONE * seconds
    separable = is_alone.sum() >= max(MIN_ALONE, MIN_ALONE_SHARE * len(decoded))
    used = is_alone if separable else np.ones(len(decoded), dtype=bool)
    columns = {
        "base_s": sums["steps"],
        "slope_s": sums["running"] + sums["checked"],
        "context_s": sums["positions"],
    }
    solution = non_negative(
        {name: column[used] for name, column in columns.items()}, seconds[used], sums["steps"][used]
    )
    cost = dict.fromkeys(columns, 0.0) | solution.coefficients
    cost["base_s"] = cost["base_s"] or 1e-9
    values: dict[str, object] = {f"sim.engines.{name}": value for name, value in cost.items()}
    read = {name: sums[name] for name in ("prefilled", "verified")}
    prefill = non_negative(read, sums["prefill_s"], np.maximum(1.0, sums["prefilled"]))
    position_s, verified_s = (prefill.coefficients.get(name, 0.0) for name in ("prefilled", "verified"))
    values["sim.engines.prefill_tokens_per_s"] = rate(1.0, position_s)
    if position_s and verified_s:
        values["sim.engines.verify_positions"] = verified_s / position_s
    notes = [
        f"{name} cannot be told apart from the other costs of a decode step: the batches of this run were "
        "too much alike. It is left out"
        for name in columns
        if name not in solution.coefficients
    ]
    notes += [
        f"{name} would be below 0, and is 0: more of it took no longer in this run"
        for name, value in solution.coefficients.items()
        if not value
    ]
    if num_drafts := sums["drafted"].sum():
        depth, gained = (float(sums[name].sum() / num_drafts) for name in ("checked", "accepted"))
        values["sim.engines.acceptance"] = accepted_by_depth(round(depth), gained)
        values["sim.engines.draft_share"] = min(1.0, float(num_drafts / sums["running"].sum()))
    if load_s := [each for process in run for each in _loads_s(process)]:
        values["sim.engines.load_s"] = fmean(load_s)
    else:
        notes.append("no request ran after a publication: load_s keeps its default")
    alone_s = sum((column * cost[name] for name, column in columns.items()), np.zeros(len(decoded)))
    if is_alone.all():
        notes.append(
            "engines and trainer never worked at the same time: how much they slow each other down is not "
            "known, and taken as nothing"
        )
    elif not separable:
        notes.append("the trainer worked nearly always: the costs of a decode step include its slow-down")
    elif (factor := slowdown(seconds[~is_alone], trained_s[~is_alone], alone_s[~is_alone])) > 1:
        values["sim.host.engine_slowdown"] = factor
    return FitPart("decode", values, int(used.sum()), solution.explained, notes)


def accepted_by_depth(depth: int, gained: float) -> list[float]:
    """The shares of drafts that are right up to each depth, where a draft has so many tokens and `gained` of
    them are right in the mean. A token is taken to be right after right ones with the same chance at each
    depth, as in the embedded engine (drivers/engine/native/drafts.py)."""
    chances = np.linspace(0.0, 1.0, 10_001)
    shares = chances[:, None] ** np.arange(1, depth + 1)
    chance = float(np.interp(gained, shares.sum(1), chances))
    return [chance**each for each in range(1, depth + 1)]


def _loads_s(process: Timeline) -> list[float]:
    """The seconds that each load of weights stalled an engine that had requests.

    A load begins when its weights are published, and stalls the next request if none runs. It is the time in
    which the engine had requests and neither decoded nor prefilled.
    """
    by_engine: defaultdict[str, list[Decoded]] = defaultdict(list)
    for each in process.decoded:
        by_engine[each.engine].append(each)
    found = []
    published_s = [each.end_s for each in process.publications]
    for busy in by_engine.values():
        numbers = np.searchsorted([each.end_s for each in busy], published_s, side="right")
        num_loads = np.bincount(numbers, minlength=len(busy))[: len(busy)]
        rest_s = np.array([each.duration_s - each.sums.seconds - each.sums.prefill_s for each in busy])
        usual_s = float(np.median(rest_s[num_loads == 0])) if (num_loads == 0).any() else 0.0
        stalled = num_loads > 0
        found += np.repeat(
            np.maximum(0.0, rest_s - usual_s)[stalled] / num_loads[stalled], num_loads[stalled]
        ).tolist()
    return found


def _fit_servers(run: Sequence[Timeline], prompt_tokens: float) -> FitPart:
    """Fit base_s and prefill_tokens_per_s to the durations of the requests of engines that count no steps."""
    requests = [each for process in run for each in process.requests if each.num_gained and each.duration_s]
    if not requests:
        return FitPart("decode", {}, 0, None, ["no request gained a token: [sim.engines] stays open"])
    gained = np.array([each.num_gained for each in requests], float)
    prefilled = np.array([0.0 if each.had else prompt_tokens for each in requests])
    duration_s = np.array([each.duration_s for each in requests])
    cost, share = non_negative({"base": gained, "prefill": prefilled}, duration_s, gained)
    values = {
        "sim.engines.base_s": cost["base"] or 1e-9,
        "sim.engines.slope_s": 0.0,
        "sim.engines.prefill_tokens_per_s": rate(1.0, cost.get("prefill", 0.0)),
    }
    notes = [
        "the engines record no decode steps, so only the mean step and the prefill are fitted, to the "
        "durations of requests: larger batches are predicted to be as fast as those of this run"
    ]
    return FitPart("decode", values, len(requests), share, notes)


def rate(num_tokens: float, seconds: float) -> float:
    return min(FAST_PREFILL, float(num_tokens / seconds)) if seconds else FAST_PREFILL


def fit_aborts(run: Sequence[Timeline]) -> FitPart:
    """Fit abort_s: from the reward that ends a rollout until its last requests are cancelled."""
    seconds: list[float] = []
    for process in run:
        rewards = np.array([each.end_s for each in process.scorings if each.reward is not None])
        cancelled = sorted({each.end_s for each in process.requests if each.outcome == "cancelled"})
        before = np.searchsorted(rewards, cancelled, side="left")
        bursts = {
            int(index): end_s - float(rewards[index - 1])
            for index, end_s in zip(before, cancelled, strict=True)
            if index
        }
        seconds += bursts.values()
    if not seconds:
        return FitPart("aborts", {}, 0, None, ["no request was cancelled: abort_s keeps its default"])
    return FitPart("aborts", {"sim.engines.abort_s": float(np.median(seconds))}, len(seconds))


def fit_passes(run: Sequence[Timeline], prompt_tokens: float) -> FitPart:
    """Fit tokens_per_s and pass_s, and the slow-down by the engines.

    A pass takes pass_s + positions / tokens_per_s. Its positions are its tokens and mean prompts.
    """
    passes = [each for process in run for each in process.passes]
    if not passes:
        return FitPart("passes", {}, 0, None, ["nothing was accumulated"])
    positions = np.array([each.num_tokens + len(each.samples) * prompt_tokens for each in passes])
    duration_s = np.array([each.duration_s for each in passes])
    disturbed_s = np.concatenate([overlap(process.passes, process.requests) for process in run])
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
    token_s, pass_s = solution.coefficients["tokens"], solution.coefficients.get("pass", 0.0)
    values: dict[str, object] = {"sim.trainer.pass_s": pass_s}
    if token_s > 0:
        values["sim.trainer.tokens_per_s"] = 1 / token_s
    else:
        notes.append("passes took no longer with more tokens: tokens_per_s keeps its default")
    disturbed = ~is_alone
    if separable and disturbed.any():
        alone_s = token_s * positions[disturbed] + pass_s
        factor = slowdown(duration_s[disturbed], disturbed_s[disturbed], alone_s)
        if factor > 1:
            values["sim.host.trainer_slowdown"] = factor
    elif disturbed.any():
        notes.append("engines worked during nearly all passes: tokens_per_s includes their slow-down")
    return FitPart("passes", values, int(used.sum()), solution.explained, notes)


def fit_steps(run: Sequence[Timeline]) -> FitPart:
    """Fit step_s: the mean optimizer step, of those without engines at work where there are some."""
    seconds = np.array([each.duration_s for process in run for each in process.steps])
    if not len(seconds):
        return FitPart("steps", {}, 0, None, ["there was none: step_s keeps its default"])
    disturbed_s = np.concatenate([overlap(process.steps, process.requests) for process in run])
    is_alone = disturbed_s <= ALONE * seconds
    used = seconds[is_alone] if is_alone.sum() >= MIN_ALONE else seconds
    return FitPart("steps", {"sim.trainer.step_s": float(used.mean())}, len(used))


def fit_publications(run: Sequence[Timeline]) -> FitPart:
    """Fit publish_s: the median publication. A longer one waited until the one before had arrived."""
    seconds = [each.duration_s for process in run for each in process.publications]
    values = {"sim.trainer.publish_s": median(seconds)} if seconds else {}
    notes = [] if seconds else ["no weights were published: publish_s keeps its default"]
    return FitPart("publish", values, len(seconds), None, notes)


def fit_rewards(run: Sequence[Timeline], workers: int) -> FitPart:
    """Fit median_s and sigma of a lognormal distribution of the seconds of a reward."""
    seconds = [each for process in run for each in _service_s(process.scorings, workers)]
    if not seconds:
        return FitPart("rewards", {}, 0, None, ["no sample had a reward: [sim.rewards] keeps its defaults"])
    logs = [math.log(max(each, _SHORTEST_S)) for each in seconds]
    values = {
        "sim.rewards.workers": workers,
        "sim.rewards.median_s": math.exp(fmean(logs)),
        "sim.rewards.sigma": pstdev(logs),
    }
    return FitPart("rewards", values, len(seconds))


def _service_s(scorings: list[Scoring], workers: int) -> list[float]:
    """Seconds of each reward without the wait for a worker: one is free after the last but `workers`."""
    seconds, ends = [], [0.0] * workers
    for each in scorings:
        if each.reward is None:
            continue
        free_s = heapq.heapreplace(ends, each.end_s)
        seconds.append(each.end_s - max(each.start_s, free_s))
    return seconds


def fit_lengths(run: Sequence[Timeline], samples: Path, prompt_tokens: float) -> FitPart:
    """Take the recorded lengths as the distribution, and fit the correlation. Raises a ConfigError if a line
    of the samples is torn, or there are none."""
    recorded = read_recorded(samples)
    values = {
        "sim.lengths.prompt_tokens": max(1, round(prompt_tokens)),
        "sim.lengths.distribution": {"kind": "recorded", "path": str(samples.resolve())},
    }
    notes = []
    begun = {each.sample.prompt for process in run for each in process.requests if not each.is_evaluation}
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
    """Return the intraclass correlation of the normal scores of lengths, from 0 to 1, by analysis of variance
    (Fisher, Statistical Methods for Research Workers, 1925, section 40); None if no prompt has several
    responses, or all are equal."""
    scores = _normal_scores([*lengths.values()])
    _, group, sizes = np.unique([prompt for prompt, _ in lengths], return_inverse=True, return_counts=True)
    num_samples, num_groups = len(scores), len(sizes)
    if num_samples == num_groups or num_groups < 2:
        return None
    means = np.bincount(group, scores) / sizes
    between = float(np.sum(sizes * (means - scores.mean()) ** 2)) / (num_groups - 1)
    within = float(np.sum((scores - means[group]) ** 2)) / (num_samples - num_groups)
    size = (num_samples - float(np.sum(sizes**2)) / num_samples) / (num_groups - 1)
    total = between + (size - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total else None


def _normal_scores(lengths: Sequence[int]) -> Array:
    """The standard normal quantile of each length's rank. Equal lengths share their mean rank."""
    _, rank, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    shares = (np.cumsum(counts) - counts / 2) / len(lengths)
    return np.array([NormalDist().inv_cdf(share) for share in shares])[rank]
