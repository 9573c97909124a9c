"""The decode steps that an engine made between the starts and ends of its requests.

All running requests decode together, so a request that gained g tokens saw g decode steps. How they divide
over the intervals between two events is not recorded. It follows from the times of the steps, which are
fitted: both are found in turn (decode.py).
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tailrace.fit.least_squares import Array
from tailrace.fit.overlap import Busy
from tailrace.record.events import Interval
from tailrace.record.timeline import ServedRequest

INNER_REPETITIONS = 8
"""The positions of an interval follow from the steps before it, and its steps from the positions."""


class EngineTimeline:
    """One engine in one life of a run.

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
