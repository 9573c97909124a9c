"""What a live run is doing, and what of it takes longer than is usual in this run.

The run writes what is open every 2 s, and the page reads it every 2 s. So what hangs is named within 30 s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tailrace.page.life import Life, Request, Work, verb_of

LATE_S = 20.0
"""Nothing is late before."""
TIMES_MEDIAN = 4.0
"""Work of the trainer is late after so many times its median."""
TIMES_LONGEST = 2.0
"""Requests and rewards are late after so many times the longest before: long responses are healthy."""
NUM_RECENT = 1000
"""Durations that say what is usual."""
MIN_SAMPLES, MIN_ROUNDS = 20, 2
"""Before so many there is no usual time."""
MAX_WAITS = 8


class Doing(NamedTuple):
    """Something that has begun and not ended."""

    what: str
    is_late: bool = False


class Pace:
    """How long each engine has generated no token, by the counts that a live run keeps up to date.

    Args:
        folder: of the counts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: dict[str, bytes] = {}
        self._changed_s: dict[str, float] = {}
        self._longest_s: dict[str, float] = {}

    def update(self, life: Life) -> None:
        """Read the counts."""
        number = life.path.stem.removeprefix("trace").removeprefix("-") or "1"
        for engine in life.slots:
            try:
                count = (self._folder / f"{engine}-{number}.count").read_bytes()
            except OSError:
                continue
            if count != self._counts.get(engine) or engine not in _engines(life.unfinished):
                pause_s = life.end_s - self._changed_s.get(engine, life.end_s)
                self._longest_s[engine] = max(pause_s, self._longest_s.get(engine, 0.0))
                self._counts[engine], self._changed_s[engine] = count, life.end_s

    def pauses(self, life: Life) -> Iterator[tuple[str, float, float]]:
        """Yield engines with open requests, the seconds since they last generated a token, and the longest
        such pause that the page has seen end."""
        for engine, changed_s in self._changed_s.items():
            if engine in _engines(life.unfinished):
                yield engine, life.end_s - changed_s, self._longest_s[engine]


def doing(life: Life, pauses: Iterable[tuple[str, float, float]] = ()) -> list[Doing]:
    """What a run does, what is late first. In a simulation, where no task's wait is recorded, nothing is.

    Args:
        pauses: of `Pace.pauses`.
    """
    waits = [_wait(life, wait) for wait in life.open_waits[:MAX_WAITS]]
    requests = [*_engines_without_tokens(life, pauses)] or [*_requests(life)]
    found = [*waits, *_nothing(life), *requests, *_rewards(life)]
    if not waits:
        return [each._replace(is_late=False) for each in found]
    return sorted(found, key=lambda each: not each.is_late)


def _wait(life: Life, wait: Work) -> Doing:
    who, verb = wait.name.partition(": ")[0], verb_of(wait)
    for_s = wait.end_s - wait.start_s
    if verb not in WORK:
        return Doing(f"{wait.name}, for {_seconds(for_s)}")
    name, works = WORK[verb]
    what = f"{who}: {name}, for {_seconds(for_s)}"
    usual = _durations(works(life))
    if not len(usual):
        return Doing(f"{what}; none has ended before")
    median_s = float(np.median(usual))
    is_late = for_s > max(LATE_S, TIMES_MEDIAN * median_s)
    return Doing(f"{what}; the median is {_seconds(median_s)}", is_late)


WORK: Mapping[str, tuple[str, Callable[[Life], Sequence[Work]]]] = {
    "Accumulate": ("gradients", lambda life: [each for each in life.trainer if each.name == "accumulate"]),
    "Step": ("optimizer step", lambda life: [each for each in life.trainer if each.name != "accumulate"]),
    "Publish": ("publication of weights", lambda life: life.publications),
}
"""What the trainer's process is asked for: its name, and where the trace records it."""


def _nothing(life: Life) -> Iterator[Doing]:
    """Every device is idle, and no checkpoint is written."""
    verbs = [verb_of(wait) for wait in life.open_waits]
    if life.unfinished or life.open_scoring or any(verb in WORK or verb == "Save" for verb in verbs):
        return
    for_s = life.end_s - max(life.worked_s, life.start_s)
    if for_s > LATE_S:
        yield Doing(f"nothing is generated, rewarded or trained, for {_seconds(for_s)}", True)


def _engines_without_tokens(life: Life, pauses: Iterable[tuple[str, float, float]]) -> Iterator[Doing]:
    for engine, pause_s, longest_s in pauses:
        if pause_s > max(LATE_S, TIMES_LONGEST * longest_s):
            mine = [each for each in life.unfinished if each.engine == engine]
            yield Doing(f"{engine} has generated no token for {_seconds(pause_s)}; {_oldest(mine)}", True)


def _requests(life: Life) -> Iterator[Doing]:
    if life.unfinished:
        oldest_s = life.end_s - min(each.start_s for each in life.unfinished)
        what = f"{_oldest(life.unfinished)}, for {_seconds(oldest_s)}"
        if longest_s := life.longest_request_s:
            what += f"; the longest before took {_seconds(longest_s)}"
        is_known = len(life.rounds) >= MIN_ROUNDS and len(life.requests) >= MIN_SAMPLES
        yield Doing(what, is_known and oldest_s > max(LATE_S, TIMES_LONGEST * longest_s))


def _rewards(life: Life) -> Iterator[Doing]:
    if life.open_scoring:
        oldest = min(life.open_scoring, key=lambda each: each.start_s)
        for_s = life.end_s - oldest.start_s
        what = f"samples that wait for their rewards: {len(life.open_scoring)}, the oldest {oldest.name}"
        what += f", for {_seconds(for_s)}"
        usual = _durations(life.scoring)
        if not len(usual):
            yield Doing(f"{what}; none has got one before")
            return
        what += f"; the median is {_seconds(float(np.median(usual)))}, the longest {_seconds(max(usual))}"
        is_late = len(usual) >= MIN_SAMPLES and for_s > max(LATE_S, TIMES_LONGEST * max(usual))
        yield Doing(what, is_late)


def _oldest(requests: Sequence[Request]) -> str:
    oldest = min(requests, key=lambda each: each.start_s)
    return f"open requests: {len(requests)}, the oldest of sample {oldest.sample} on {oldest.engine}"


def _engines(requests: Sequence[Request]) -> set[str]:
    return {each.engine for each in requests}


def _durations(works: Sequence[Work]) -> Sequence[float]:
    return [each.end_s - each.start_s for each in works[-NUM_RECENT:]]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"
