"""The costs of an engine: decode steps, prefill, loads of weights and aborts.

A decode step takes base_s + slope_s * running + context_s * positions (sim/engine.py). The duration of a
request is the sum over its steps, and over the stalls for prefills and loads in its time. This is linear in
the costs, given how many steps each interval has. That follows from the costs, so both are repeated in turn.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tailrace.fit.observed import Array, Busy, FitPart, Observed
from tailrace.record.events import Interval
from tailrace.record.timeline import ServedRequest

Mask = npt.NDArray[np.bool_]

REPETITIONS = 12
ALONE = 0.05
"""Share of a duration in which others may work on the host, for work that counts as undisturbed."""
MIN_OBSERVATIONS, MIN_ALONE_SHARE = 20, 0.25
"""Undisturbed requests, and their share of all, from which on only those give the undisturbed costs."""
FAST_PREFILL = 1e9
"""Positions in a second, where prefills take no measurable time."""

NAMES = {
    "base": "base_s",
    "slope": "slope_s",
    "context": "context_s",
    "prefill": "prefill_tokens_per_s",
    "load": "load_s",
}
"""The settings by the column of the fit."""
INNER_REPETITIONS = 8
"""The positions of an interval follow from the steps before it, and its steps from the positions."""
COLLINEAR = 0.999
"""Share of a column's variance that the other columns explain, from which on it is not fitted."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Coefficients by the name of their column.

    Args:
        coefficients: those that were fitted.
        collinear: columns that the others explain. The later one of such columns is left out.
        explained: share of the variance that the fit explains.
    """

    coefficients: dict[str, float]
    collinear: Sequence[str]
    explained: float

    def __getitem__(self, name: str) -> float:
        return self.coefficients.get(name, 0.0)


def non_negative(columns: dict[str, Array], target: Array, variances: Array | None = None) -> Solution:
    """Fit a target by columns. A column whose coefficient would be negative gets the coefficient 0.

    Args:
        columns: [observations] each, in the order of their importance.
        target: [observations].
        variances: relative variance of each observation; None: all are equal. In proportion to a column, the
            sum of the fitted values is that of the target.
    """
    weights = np.ones(len(target)) if variances is None else 1 / np.sqrt(variances)
    weighted = {name: column * weights for name, column in columns.items()}
    names: list[str] = []
    collinear: list[str] = []
    for name, column in columns.items():
        known = [columns[other] for other in names]
        if not np.any(column):
            continue
        if names and _explained(known, column) > COLLINEAR:
            collinear.append(name)
        else:
            names.append(name)
    found: Array = np.zeros(0)
    while names:
        found = _solved([weighted[name] for name in names], target * weights)
        if found.min() >= 0:
            break
        names.pop(int(found.argmin()))
    coefficients = dict.fromkeys(columns, 0.0) | dict(
        zip(names, found.tolist(), strict=True) if names else {}
    )
    for name in collinear:
        del coefficients[name]
    predicted = sum((columns[name] * value for name, value in coefficients.items()), np.zeros(len(target)))
    return Solution(coefficients, collinear, explained(predicted, target))


def explained(predicted: Array, target: Array) -> float:
    """Return the share of the target's variance that a prediction explains; 1 if there is none."""
    total = float(np.sum((target - target.mean()) ** 2))
    rest = float(np.sum((target - predicted) ** 2))
    return 1 - rest / total if total > 1e-18 * float(np.sum(target**2)) else 1.0


def _explained(known: Sequence[Array], column: Array) -> float:
    """The share of a column that others explain, about zero: a constant column is one, too."""
    predicted = np.column_stack(known) @ _solved(known, column)
    centred = float(np.sum((column - column.mean()) ** 2)) or float(np.sum(column**2))
    return 1 - float(np.sum((column - predicted) ** 2)) / centred if centred else 1.0


def _solved(columns: Sequence[Array], target: Array) -> Array:
    """Columns are scaled to one length first, so that the rank does not depend on units."""
    scale = np.array([float(np.linalg.norm(column)) or 1.0 for column in columns])
    solution = np.linalg.lstsq(np.column_stack(columns) / scale, target, rcond=None)[0]
    return np.asarray(solution / scale)


class EngineSteps:
    """The decode steps that an engine of one process made between the starts and ends of its requests.

    All running requests decode together, so a request that gained g tokens saw g decode steps. How they
    divide over the intervals between two events is not recorded. It follows from the times of the steps,
    which are fitted: both are found in turn.

    Args:
        requests: of this engine.
        prompt_tokens: of each prompt.
        training: when the trainer worked.
        publications: when new weights were written and loaded.
    """

    def __init__(
        self,
        requests: Sequence[ServedRequest],
        prompt_tokens: float,
        training: Busy,
        publications: Sequence[Interval],
    ) -> None:
        self._starts = np.array([each.start_s for each in requests])
        self._ends = np.array([each.end_s for each in requests])
        self._context = np.array([prompt_tokens + each.had for each in requests])
        self.gained = np.array([float(each.num_gained) for each in requests])
        self.duration_s = self._ends - self._starts
        self.is_continued = np.array([each.had > 0 for each in requests])
        self.trained_s = training.seconds(self._starts, self._ends)
        loads = _load_times(publications, self._starts, self._ends)
        self._times = np.unique(np.concatenate([self._starts, self._ends, loads]))
        self._first = np.searchsorted(self._times, self._starts)
        self._last = np.searchsorted(self._times, self._ends)
        num_times = len(self._times)
        joined, left = (np.bincount(index, minlength=num_times) for index in (self._first, self._last))
        self._running = np.cumsum(joined - left)[:-1].astype(float)
        self._interval_s = np.diff(self._times)
        self._trained = training.seconds(self._times[:-1], self._times[1:])
        computed = np.array(_computed(requests, prompt_tokens))
        self._prefilled = np.bincount(self._first, computed, num_times)[:-1].astype(np.float64)
        number = np.searchsorted(self._times, loads)
        self._loads = np.bincount(number, minlength=num_times)[:-1].astype(np.float64)

    def columns(self, cost: dict[str, float]) -> dict[str, Array]:
        """Return what each request's duration is a sum of: [requests] each.

        Args:
            cost: the present estimate of the coefficients of these columns, and "slowdown", the factor on a
                step while the trainer works.
        """
        stalled_s = cost["prefill"] * self._prefilled + cost["load"] * self._loads
        decoding_s = np.maximum(self._interval_s - stalled_s, 0.0) * (self._running > 0)
        decoding_s -= np.minimum(self._trained, decoding_s) * (1 - 1 / cost["slowdown"])
        alone_s = cost["base"] + cost["slope"] * self._running
        steps = self._steps(decoding_s, alone_s)
        for _ in range(INNER_REPETITIONS if cost["context"] else 1):
            positions = self._positions(steps)
            steps = self._steps(decoding_s, alone_s + cost["context"] * positions)
        seen = self._sums(steps)
        scale = np.divide(self.gained, seen, out=np.zeros_like(seen), where=seen > 0)
        return {
            "base": self.gained,
            "slope": scale * self._sums(steps * self._running),
            "prefill": self._sums(self._prefilled),
            "load": self._sums(self._loads),
            "context": scale * self._sums(steps * positions),
        }

    def _steps(self, decoding_s: Array, step_s: Array) -> Array:
        """Decode steps in each interval. Their sum is right for the mean request."""
        steps: Array = decoding_s / np.maximum(step_s, 1e-12)
        seen = self._sums(steps).sum()
        return steps * (self.gained.sum() / seen) if seen else steps

    def _positions(self, steps: Array) -> Array:
        """Positions in the KV cache in the middle of each interval."""
        done = np.concatenate([[0.0], np.cumsum(steps)])
        fixed = self._context - done[self._first]
        num_times = len(self._times)
        changes = np.bincount(self._first, fixed, num_times) - np.bincount(self._last, fixed, num_times)
        middle = (done[:-1] + done[1:]) / 2
        return np.asarray(np.cumsum(changes)[:-1] + self._running * middle)

    def _sums(self, values: Array) -> Array:
        """The sum of each request's intervals."""
        until = np.concatenate([[0.0], np.cumsum(values)])
        return np.asarray(until[self._last] - until[self._first])


def _load_times(publications: Sequence[Interval], starts: Array, ends: Array) -> Array:
    """The times at which loads of weights begin to stall requests. A load begins when its weights are
    published, and stalls the next request if none runs."""
    ends, starts = np.sort(ends), np.sort(starts)
    times = []
    for each in publications:
        num_started = int(np.searchsorted(starts, each.end_s, side="right"))
        if num_started > np.searchsorted(ends, each.end_s, side="right"):
            times.append(each.end_s)
        elif num_started < len(starts):
            times.append(float(starts[num_started]))
    return np.array(times)


def _computed(requests: Sequence[ServedRequest], prompt_tokens: float) -> list[float]:
    """Positions whose keys and values are computed when each request joins.

    A prompt is computed once for the samples of a group that run together. A continued request is taken to
    find its KV cache.
    """
    events = [(each.start_s, 1, number) for number, each in enumerate(requests)]
    events += [(each.end_s, 0, number) for number, each in enumerate(requests)]
    computed, running = [0.0] * len(requests), Counter[int]()
    for _, is_start, number in sorted(events):
        request = requests[number]
        if is_start and not request.had and not running[request.sample.prompt]:
            computed[number] = prompt_tokens
        running[request.sample.prompt] += 1 if is_start else -1
    return computed


def fit_engines(run: Observed) -> FitPart:
    """Fit base_s, slope_s, context_s, prefill_tokens_per_s and load_s, and the slow-down by the trainer."""
    engines = _engines(run)
    if not engines:
        return FitPart("decode", {}, 0, None, ["no request gained a token: [sim.engines] stays open"])
    duration_s, gained, trained_s = (
        np.concatenate([getattr(each, name) for each in engines])
        for name in ("duration_s", "gained", "trained_s")
    )
    counted = gained > 0
    is_alone = counted & (trained_s <= ALONE * duration_s)
    separable = is_alone.sum() >= max(MIN_OBSERVATIONS, MIN_ALONE_SHARE * counted.sum())
    used = is_alone if separable else counted
    cost = {"base": 1.0, "slope": 0.0, "context": 0.0, "prefill": 0.0, "load": 0.0, "slowdown": 1.0}
    for _ in range(REPETITIONS):
        each_columns = [engine.columns(cost) for engine in engines]
        columns = {name: np.concatenate([each[name] for each in each_columns]) for name in each_columns[0]}
        target = duration_s - trained_s * (1 - 1 / cost["slowdown"])
        solution = non_negative({name: column[used] for name, column in columns.items()}, target[used])
        cost |= {name: solution[name] for name in columns}
        cost["base"] = cost["base"] or 1e-9
        alone_s = sum((columns[name] * cost[name] for name in columns), np.zeros(len(gained)))
        disturbed = counted & ~is_alone
        if separable and disturbed.sum() >= MIN_OBSERVATIONS:
            cost["slowdown"] = slowdown(duration_s[disturbed], trained_s[disturbed], alone_s[disturbed])
    values = {
        "sim.engines.base_s": cost["base"],
        "sim.engines.slope_s": cost["slope"],
        "sim.engines.context_s": cost["context"],
        "sim.engines.prefill_tokens_per_s": min(1 / cost["prefill"], FAST_PREFILL)
        if cost["prefill"]
        else FAST_PREFILL,
    }
    if np.any(columns["load"][used]):
        values["sim.engines.load_s"] = cost["load"]
    if cost["slowdown"] > 1:
        values["sim.host.engine_slowdown"] = cost["slowdown"]
    fit = explained(alone_s[used], target[used])
    notes = _notes(solution, columns, used, separable, bool((counted & ~is_alone).any()))
    return FitPart("decode", values, int(used.sum()), fit, notes)


def slowdown(duration_s: Array, disturbed_s: Array, alone_s: Array) -> float:
    """Return the factor by which work is slower while others work, at least 1.

    Args:
        duration_s: of each piece of work.
        disturbed_s: the part of it in which others worked.
        alone_s: what each piece would have taken alone.
    """
    left_s = float(np.sum(alone_s - (duration_s - disturbed_s)))
    return max(1.0, float(np.sum(disturbed_s)) / left_s) if left_s > 0 else 1.0


def fit_aborts(run: Observed) -> FitPart:
    """Fit abort_s: from the reward that ends a rollout until its last requests are cancelled."""
    seconds: list[float] = []
    for process in run.processes:
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
        notes = ["no request was cancelled: abort_s keeps its default"]
        return FitPart("aborts", {}, 0, None, notes)
    return FitPart("aborts", {"sim.engines.abort_s": float(np.median(seconds))}, len(seconds), None, [])


def _engines(run: Observed) -> list[EngineSteps]:
    found = []
    for process in run.processes:
        engines: defaultdict[str, list[ServedRequest]] = defaultdict(list)
        for request in process.requests:
            if request.duration_s > 0:
                engines[request.engine].append(request)
        training = Busy(process.trainer)
        for requests in engines.values():
            if any(each.num_gained for each in requests):
                found.append(EngineSteps(requests, run.prompt_tokens, training, process.publications))
    return found


def _notes(
    solution: Solution, columns: dict[str, Array], used: Mask, separable: bool, overlapped: bool
) -> Sequence[str]:
    notes = []
    for name in solution.collinear:
        notes.append(
            f"{NAMES[name]} cannot be told apart from the other costs of a decode step: the batches of this "
            "run were too much alike. It is left out"
        )
    for name in ("base", "slope", "context"):
        if solution.coefficients.get(name) == 0.0:
            notes.append(f"{NAMES[name]} would be below 0, and is 0: more of it took no longer in this run")
    if not solution["prefill"] and "prefill" not in solution.collinear:
        notes.append("prefills took no measurable time")
    if not np.any(columns["load"][used]):
        notes.append("no request ran after a publication: load_s keeps its default")
    if not overlapped:
        notes.append(
            "engines and trainer never worked at the same time: how much they slow each other down is not "
            "known, and taken as nothing"
        )
    elif not separable:
        notes.append("the trainer worked nearly always: the costs of a decode step include its slow-down")
    return notes
