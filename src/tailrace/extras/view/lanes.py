"""The lanes of a run's timeline in a range of time: single pieces of work where they are few, and otherwise
the share of each cause in each of some bins. So the cost of a picture does not grow with the run."""

from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace.extras.view.causes import Causes, causes_of, evaluated, saved
from tailrace.extras.view.requests import drawn_request
from tailrace.record.intervals import EMPTY, Intervals, union, union_of
from tailrace.record.timeline import Timeline

MAX_REQUESTS, MAX_PIECES = 4_000, 600
"""The most requests, and the most pieces of a lane, that are given one by one."""
MAX_MARKS = 200
"""The most stragglers and states of engines."""
MAX_BARS, MIN_ROUNDS, PARTS = 400, 40, 16
"""The most bars of a lane. From so many rounds on, a bar is of whole ones. Parts of a bar for its range."""

Bins = NDArray[np.float64]


class Straggler(NamedTuple):
    """The sample that ended last in a round, of those that were generated in it."""

    round: int
    sample: str
    engine: str
    tokens: int
    start_s: float
    """End of the sample before it."""
    end_s: float

    @property
    def alone_s(self) -> float:
        return self.end_s - self.start_s


class RunLanes:
    """The work of all processes of a run."""

    def __init__(self, lives: Sequence[Timeline]) -> None:
        self.lives = [life.start_s for life in lives]
        self.end_s = lives[-1].end_s if lives else 0.0
        self.causes = [causes_of(life) for life in lives]
        self.rounds = [each for life in lives for each in (*life.rounds, *life.open_rounds)]
        self.stragglers = [each for life in lives for each in stragglers_of(life)]
        self._states = [each for life in lives for each in life.states]
        names = {name: None for causes in self.causes for name in causes}
        self._lanes: dict[str, Causes] = {name: _joined(self.causes, name) for name in names}
        marks = {
            "stragglers": {"tail": union([(each.start_s, each.end_s) for each in self.stragglers])},
            "evaluations": {"evaluation": union_of(map(evaluated, lives))},
            "checkpoints": {"checkpoint": union_of(map(saved, lives))},
        }
        self._marks = {name: causes for name, causes in marks.items() if any(map(len, causes.values()))}
        self._requests = {name: _Requests(name, lives) for name in self._lanes if name != "trainer"}

    @property
    def engines(self) -> Mapping[str, int]:
        """The slots of each engine that requests of training used at once."""
        return {name: self._requests[name].slots for name in sorted(self._requests, key=_natural)}

    def window(self, start_s: float, end_s: float, bins: int) -> dict[str, Any]:
        """Return what a timeline of a range of time shows."""
        edges = np.linspace(start_s, max(end_s, start_s + 1e-6), min(bins, MAX_BARS) + 1)
        rounds = [each for each in self.rounds if _in(each, start_s, end_s)]
        num = sum(each.count(start_s, end_s) for each in self._requests.values())
        is_detailed = num <= MAX_REQUESTS
        size = -(-len(rounds) // (MAX_BARS - 1)) or 1
        together = [rounds[at : at + size] for at in range(0, len(rounds), size)]
        if not is_detailed and len(rounds) >= MIN_ROUNDS:
            firsts = [each[0].start_s for each in together]
            edges = np.unique([start_s, *np.clip(firsts, start_s, end_s), end_s])
        lanes = [self._lane(name, self._lanes.get(name, {}), edges) for name in ("trainer", *self.engines)]
        for lane in lanes[1:]:
            requests = self._requests[lane["name"]]
            lane["slots"] = requests.slots
            lane |= requests.columns(start_s, end_s) if is_detailed else requests.occupancy(edges)
        return {
            "from": start_s,
            "to": end_s,
            "requests": num,
            "edges": np.round(edges, 4).tolist(),
            "lanes": lanes + [self._lane(name, causes, edges) for name, causes in self._marks.items()],
            "rounds": [(each[0].round, each[0].start_s, each[-1].end_s, each[-1].round) for each in together],
            "stragglers": self._worst(start_s, end_s),
            "states": _few(
                (each.time_s, each.engine, each.state, each.why)
                for each in self._states
                if start_s <= each.time_s <= end_s
            ),
        }

    def last_rounds(self, num: int) -> float:
        """Return the start of the last rounds."""
        return self.rounds[-num].start_s if len(self.rounds) >= num else 0.0

    def _lane(self, name: str, causes: Causes, edges: Bins) -> dict[str, Any]:
        start_s, end_s = edges[0], edges[-1]
        mine = {cause: _within(times, start_s, end_s) for cause, times in causes.items()}
        mine = {cause: times for cause, times in mine.items() if len(times)}
        if sum(map(len, mine.values())) <= MAX_PIECES:
            pieces = [(s, e, cause) for cause, times in mine.items() for s, e in np.round(times, 4).tolist()]
            return {"name": name, "pieces": sorted(pieces)}
        shares = {cause: _bytes(_covered(times, edges)) for cause, times in mine.items()}
        return {"name": name, "shares": shares}

    def _worst(self, start_s: float, end_s: float) -> Sequence[dict[str, Any]]:
        found = (each for each in self.stragglers if _in(each, start_s, end_s))
        worst = sorted(found, key=lambda each: -each.alone_s)[:MAX_MARKS]
        return [each._asdict() for each in worst]


class _Requests:
    """The requests of an engine, in the order in which they began."""

    def __init__(self, engine: str, lives: Sequence[Timeline]) -> None:
        every = (each for life in lives for each in (*life.requests, *life.open_requests))
        self._all = sorted((each for each in every if each.engine == engine), key=lambda each: each.start_s)
        columns = [(each.start_s, each.end_s, each.slot, each.is_evaluation) for each in self._all]
        self._start, self._end, slot, held_out = np.array(columns, float).reshape(-1, 4).T
        self._held_out = held_out > 0
        self.slots = int(slot[~self._held_out].max(initial=0))
        # Held-out prompts come all at once: they are drawn closer where they take more slots than training.
        self._closer = max(1.0, float(slot[self._held_out].max(initial=0)) / max(1, self.slots))
        self.slots = self.slots or int(slot.max(initial=0))

    def count(self, start_s: float, end_s: float) -> int:
        return int(np.sum((self._start < end_s) & (self._end > start_s)))

    def columns(self, start_s: float, end_s: float) -> dict[str, Any]:
        chosen = np.flatnonzero((self._start < end_s) & (self._end > start_s)).tolist()
        return {"requests": [drawn_request(self._all[at], self._closer) for at in chosen]}

    def occupancy(self, edges: Bins) -> dict[str, Any]:
        """The share of the slots that requests take in each bin: those of training and of evaluations in the
        mean, and the range of their sum."""
        kinds = {"generating": ~self._held_out, "evaluation": self._held_out}
        of = {"generating": self.slots, "evaluation": self.slots * self._closer}
        parts = np.arange(PARTS * (len(edges) - 1) + 1) / PARTS
        fine = np.interp(parts, np.arange(len(edges)), edges)
        open_s = {kind: _open_time(self._start[mine], self._end[mine], fine) for kind, mine in kinds.items()}
        used = {kind: (open_s[kind] / max(1.0, of[kind])).reshape(-1, PARTS) for kind in kinds}
        every = np.sum([*used.values()], axis=0)
        return {
            "slots_used": {kind: _bytes(each.mean(1)) for kind, each in used.items()},
            "range": {"low": _bytes(every.min(1)), "high": _bytes(every.max(1))},
        }


def _covered(times: Intervals, edges: Bins) -> Bins:
    """The share of each bin that a set covers."""
    lengths = np.stack((np.zeros(len(times)), times[:, 1] - times[:, 0]), axis=1)
    before = np.interp(edges, times.ravel(), np.cumsum(lengths.ravel()))
    shares: Bins = np.diff(before) / np.diff(edges)
    return shares


def _open_time(start: Bins, end: Bins, edges: Bins) -> Bins:
    """How many of the intervals, which may overlap, are open in each bin in the mean."""
    before = _elapsed(start, edges) - _elapsed(end, edges)
    counts: Bins = np.diff(before) / np.diff(edges)
    return counts


def _elapsed(since: Bins, edges: Bins) -> Bins:
    """The sum over points in time of the time that has elapsed since then at each edge."""
    since = np.sort(since)
    number, sums = np.searchsorted(since, edges), np.concatenate(([0.0], np.cumsum(since)))
    elapsed: Bins = number * edges - sums[number]
    return elapsed


def _bytes(shares: Bins) -> str:
    """Shares in steps of 1/255, as base64."""
    return b64encode(np.round(np.clip(shares, 0.0, 1.0) * 255).astype(np.uint8).tobytes()).decode()


def _within(times: Intervals, start_s: float, end_s: float) -> Intervals:
    return times[(times[:, 0] < end_s) & (times[:, 1] > start_s)]


def _joined(lives: Sequence[Mapping[str, Causes]], lane: str) -> Causes:
    """The causes of a lane over all processes."""
    causes = {cause: None for life in lives for cause in life.get(lane, {})}
    return {cause: union_of(life.get(lane, {}).get(cause, EMPTY) for life in lives) for cause in causes}


def _in(work: Any, start_s: float, end_s: float) -> bool:
    return bool(work.start_s < end_s and work.end_s > start_s)


def _few(found: Iterator[tuple[object, ...]]) -> Sequence[tuple[object, ...]]:
    """All of them, or none if they are too many to be seen one by one."""
    all = [*found]
    return all if len(all) <= MAX_MARKS else []


def stragglers_of(timeline: Timeline) -> Iterator[Straggler]:
    """Yield the straggler of each round in which at least two samples began and ended."""
    responses = [each for each in timeline.requests if each.is_response]
    ends = [each.end_s for each in responses]
    for round in timeline.rounds:
        ended = responses[bisect_right(ends, round.start_s) : bisect_right(ends, round.end_s)]
        mine = [each for each in ended if each.start_s >= round.start_s]
        if len(mine) > 1:
            before, last = mine[-2:]
            place = (last.engine, last.num_tokens, before.end_s, last.end_s)
            yield Straggler(round.round, str(last.sample), *place)


def _natural(name: str) -> tuple[str, int]:
    """Return a key by which engine-10 comes after engine-9."""
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0)
