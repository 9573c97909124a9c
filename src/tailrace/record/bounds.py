"""Lower bounds on the time of a round and of a run, from the run's own events.

The bound of a round holds for every schedule that trains the same samples in it, from what they had at its
start, on the same devices, at the highest rates that the run has shown so far. What was generated before the
round is given, so in-flight updates and carried samples do not beat the bound. It is the greatest of

    longest response  over the groups: its longest response at the fastest decode step, a reward, the
                      training of the group, an optimizer step
    tokens            all tokens of the samples at the peak rate of all engines together, an optimizer step
    training          the first group that can be trained, then everything that the trainer computes

Where the trainer computes only while every engine is asleep, both sides have the same devices. Then the first
two are followed by everything that the trainer computes.

A schedule that generates for later rounds leaves little generation to each round. For it there is
`RoundBound.run_bound_s`: the bound on the time from the start of the first round, for all samples trained so
far, with no token given. It holds for every division of these samples into rounds. The computation of the
trainer is taken as it was measured.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from tailrace.record.events import (
    Accumulated,
    EngineStateChanged,
    Event,
    Interval,
    Moment,
    RequestEnded,
    RequestStarted,
    RoundStarted,
    SampleScored,
    Stepped,
    TokensWasted,
)
from tailrace.types import SampleId

RESWEEP = 4
"""The peak rate is computed anew when a quarter of the requests that it is computed from are new."""


def merged(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as `intervals.union` does, without numpy, which the heart imports only
    where it computes with it."""
    found = list[tuple[float, float]]()
    for start_s, end_s in sorted(times):
        if found and start_s <= found[-1][1]:
            start_s, earlier_s = found.pop()
            end_s = max(end_s, earlier_s)
        found.append((start_s, end_s))
    return [(start_s, end_s) for start_s, end_s in found if end_s > start_s]


class RoundBound(Moment, frozen=True):
    """Why a round takes longer than its lower bound, and the lower bound of the run so far."""

    gap: str
    """Main time, bound, and what makes the difference, in words."""
    run_time_s: float
    """Seconds from the first round's start in this process to the end of the round's last optimizer step."""
    run_bound_s: float
    """The lower bound of run_time_s."""


class _GainingRequest(Interval, frozen=True):
    """A request of training that gained tokens."""

    engine: str
    num_gained: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_gained / self.duration_s


@dataclass(slots=True)
class _Peaks:
    """The highest rate of each engine, in tokens a second: of the sum over the requests that it serves at
    once, each at its own mean rate."""

    rates: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended: list[_GainingRequest] = field(default_factory=list)
    _num_swept: int = 0

    def sweep(self, oldest_s: float) -> None:
        """Compute the rates, and forget requests that ended before the oldest one that is served now."""
        if (len(self.ended) - self._num_swept) * RESWEEP < max(1, self._num_swept):
            return
        by_engine: dict[str, list[_GainingRequest]] = defaultdict(list)
        for request in self.ended:
            by_engine[request.engine].append(request)
        for engine, mine in by_engine.items():
            changes = [(each.start_s, each.rate) for each in mine] + [
                (each.end_s, -each.rate) for each in mine
            ]
            # Ends come first: where one ends as another begins, they are not open at once.
            peak = max(accumulate(change for _, change in sorted(changes)))
            self.rates[engine] = max(self.rates[engine], peak)
        self.ended = [request for request in self.ended if request.end_s > oldest_s]
        self._num_swept = len(self.ended)


@dataclass(slots=True)
class _Rates:
    """The best that the run has shown so far, in seconds."""

    token_s: float = inf
    """A token of one request: the fastest decode step."""
    reward_s: float = inf
    """Seconds from the end of a response to its reward."""
    train_s: float = inf
    """A trained token in the accumulation of a batch."""
    step_s: float = inf
    """An optimizer step."""


@dataclass(slots=True)
class _Work:
    """Work that was trained in a round, or in all rounds so far."""

    start_s: float
    num_tokens: float = 0.0
    """Tokens of the trained samples that were generated after the start."""
    compute_s: float = 0.0
    first_s: float = 0.0
    """Seconds from the start to the first group that can be trained."""
    longest_tokens: float = 0.0
    """The most of them in one response."""
    longest_s: float = 0.0
    """Seconds from the start to the end of the step of the group that takes longest, where it is known."""
    in_turn: bool = True
    """Every engine was asleep while the trainer computed."""

    def generated(self, num_tokens: Collection[float]) -> None:
        """Count the tokens generated after the start, one number for each sample."""
        self.num_tokens += sum(num_tokens)
        self.longest_tokens = max(self.longest_tokens, *num_tokens)

    def bound_s(self, rates: _Rates, peak: float, time_s: float) -> tuple[float, str]:
        """The bound on a time, and what it consists of. The peak, in tokens a second of all engines, may
        lack the newest requests."""
        if not self.num_tokens:
            return self.compute_s, "its training"
        tokens_s, response_s = self.num_tokens / peak, self.longest_tokens * rates.token_s
        bounds = {
            "its longest response": max(self.longest_s, response_s + rates.step_s),
            "its tokens at the peak rate": min(tokens_s + rates.step_s, time_s),
            "its first group, then all training": self.first_s + self.compute_s,
        }
        if self.in_turn:
            bounds["its longest response, then all training"] = response_s + self.compute_s
            bounds["its tokens at the peak rate, then all training"] = min(tokens_s + self.compute_s, time_s)
        limit = max(bounds, key=lambda name: bounds[name])
        return bounds[limit], limit


class BoundMeter:
    """Reads events; `end_round` gives the bounds of a round that has trained."""

    def __init__(self) -> None:
        self._rates, self._peaks = _Rates(), _Peaks()
        self._open: dict[SampleId, float] = {}
        """The starts of the requests that are served now, in their order."""
        self._requests: dict[SampleId, list[_GainingRequest]] = defaultdict(list)  # of samples without a fate
        self._scored: dict[SampleId, float] = {}
        self._are_open: dict[str, bool] = {}
        self._closed_since = -inf  # when the last open engine closed; infinite while one is open
        self._run: _Work | None = None
        self._number = 0
        self._round = _Work(0.0)
        self._busy: list[Accumulated | Stepped] = []
        self._trained: dict[SampleId, int] = {}  # their tokens

    def on(self, event: Event) -> None:
        match event:
            case RequestStarted():
                self._open[event.sample] = event.time_s
                if event.engine not in self._are_open:
                    self._engine_changed(event.engine, True, event.time_s)
            case RequestEnded() if event.sample in self._open:
                self._request_ended(event, self._open.pop(event.sample))
            case SampleScored() if event.sample in self._requests:
                self._scored[event.sample] = event.time_s
                reward_s = event.time_s - self._requests[event.sample][-1].end_s
                self._rates.reward_s = min(self._rates.reward_s, reward_s)
            case TokensWasted():
                self._forget([event.sample])
            case Accumulated() | Stepped():
                self._trainer_computed(event)
            case EngineStateChanged():
                self._engine_changed(event.engine, event.state == "open", event.time_s)
            case RoundStarted():
                self._number, self._round = event.round, _Work(event.time_s)
                self._run = self._run or _Work(event.time_s)
                self._busy.clear()
                self._trained.clear()

    def end_round(self, main_time_s: float, compute_s: float) -> tuple[float, RoundBound]:
        """The lower bound on the main time of the round that has just ended, and what belongs to it. The
        computation is as the trainer measured it."""
        work, rates = self._round, self._rates
        run = self._run = self._run or _Work(work.start_s)
        busy_s = sum(end_s - start_s for start_s, end_s in self._computed())
        work.compute_s = min(compute_s, busy_s)  # replicas may compute at the same time
        work.generated([self._tokens_after(sample, work.start_s) for sample in self._trained])
        run.generated([self._tokens_after(sample, run.start_s) for sample in self._trained])
        work.first_s, work.longest_s = self._group_times()
        run.first_s = run.first_s if run.compute_s else work.first_s
        run.compute_s += work.compute_s
        run.in_turn &= work.in_turn
        run_time_s = work.start_s + main_time_s - run.start_s

        self._peaks.sweep(next(iter(self._open.values()), inf))
        peak = sum(self._peaks.rates.values())
        bound_s, limit = work.bound_s(rates, peak, main_time_s)
        run_bound_s, _ = run.bound_s(rates, peak, run_time_s)
        wait = self._longest_wait()
        needed = f"{bound_s:.1f} s would do for {limit}"
        gap = f"round {self._number + 1} took {main_time_s:.1f} s, {needed}; {wait}"
        self._forget(self._trained)
        return bound_s, RoundBound(work.start_s + main_time_s, gap, run_time_s, run_bound_s)

    # -- the round ---------------------------------------------------------------------------------

    def _tokens_after(self, sample: SampleId, time_s: float) -> float:
        """The tokens generated after a time, as if they were evenly spread over each request."""
        return sum(
            each.num_gained * max(0.0, each.end_s - max(each.start_s, time_s)) / each.duration_s
            for each in self._requests.get(sample, ())
        )

    def _group_times(self) -> tuple[float, float]:
        """The least time from the round's start until the first group can be trained, and until the step of
        the group that takes longest has ended."""
        rates, start_s = self._rates, self._round.start_s
        reward_s, train_s = (rate if rate < inf else 0.0 for rate in (rates.reward_s, rates.train_s))
        ready_s: dict[tuple[int, int], float] = defaultdict(float)
        num_tokens: dict[tuple[int, int], int] = defaultdict(int)
        for sample, length in self._trained.items():
            group, num_new = sample[:2], self._tokens_after(sample, start_s)
            ready_s[group] = max(ready_s[group], num_new * rates.token_s + reward_s if num_new else 0.0)
            num_tokens[group] += length
        trained_s = max(ready_s[group] + count * train_s for group, count in num_tokens.items())
        return min(ready_s.values()), trained_s + rates.step_s

    def _computed(self) -> list[tuple[float, float]]:
        """The times of the round in which the trainer computed, which do not overlap, in their order."""
        return merged((max(each.start_s, self._round.start_s), each.end_s) for each in self._busy)

    def _longest_wait(self) -> str:
        """The longest time in which the trainer did not compute, and what it waited for."""
        waits, idle_s = [(0.0, 0.0)], self._round.start_s
        for start_s, end_s in self._computed():
            waits.append((idle_s, start_s))
            idle_s = end_s
        from_s, to_s = max(waits, key=lambda wait: wait[1] - wait[0])
        if from_s == to_s:
            return "the trainer never waited"
        scored = {id: self._scored[id] for id in self._trained if self._scored.get(id, inf) <= to_s}
        if not scored or max(scored.values()) <= from_s:
            return f"the trainer waited {to_s - from_s:.1f} s while its next samples were complete"
        last = max(scored, key=lambda id: scored[id])
        request = self._requests[last][-1]
        reasons = {
            f"for sample {last} on {request.engine}": min(max(request.end_s, from_s), to_s) - from_s,
            f"for the reward of sample {last}": scored[last] - max(request.end_s, from_s),
            f"after sample {last} was complete": to_s - scored[last],
        }
        what = max(reasons, key=lambda name: reasons[name])
        return f"the trainer waited {reasons[what]:.1f} s {what}"

    # -- events ------------------------------------------------------------------------------------

    def _request_ended(self, event: RequestEnded, start_s: float) -> None:
        request = _GainingRequest(start_s, event.time_s, event.engine, event.num_gained)
        if request.num_gained and request.duration_s > 0 and not event.sample.is_held_out:
            self._requests[event.sample].append(request)
            self._peaks.ended.append(request)
            self._rates.token_s = min(self._rates.token_s, request.duration_s / request.num_gained)

    def _trainer_computed(self, event: Accumulated | Stepped) -> None:
        self._busy.append(event)
        self._round.in_turn &= self._closed_since <= event.start_s
        if isinstance(event, Stepped):
            self._rates.step_s = min(self._rates.step_s, event.end_s - event.start_s)
            self._trained |= {sample.id: sample.num_tokens for sample in event.samples}
        elif event.num_tokens:
            self._rates.train_s = min(self._rates.train_s, event.duration_s / event.num_tokens)

    def _engine_changed(self, name: str, is_open: bool, time_s: float) -> None:
        was_open = any(self._are_open.values())
        self._are_open[name] = is_open
        if any(self._are_open.values()):
            self._closed_since = inf
        elif was_open:
            self._closed_since = time_s

    def _forget(self, samples: Iterable[SampleId]) -> None:
        for sample in samples:
            self._requests.pop(sample, None)
            self._scored.pop(sample, None)
