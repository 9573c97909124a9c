"""Whether a run goes on, what it does now, and what a person should look at, with the cause.

A live run writes at least every two seconds what is open, and the page reads it as often. So what hangs is
named within 30 s. The other advisories are looked for in the newest steps or requests, and are gone when
these are good again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from tailrace.record.advisories import NUM_STEPS, Advisory, Figures, advisories_of_steps, last_steps, sums
from tailrace.record.events import Interval
from tailrace.record.timeline import ServedRequest, Timeline, verb_of

SILENT_S = 15.0
"""A live run writes its events every 2 s. Longer silence has a reason."""

LATE_S = 20.0
"""Seconds before which no work counts as late."""
TIMES_MEDIAN = 4.0
"""Work of the trainer is late after so many times its median."""
TIMES_LONGEST = 2.0
"""Requests and rewards are late after so many times the longest before: long responses are healthy."""
NUM_RECENT = 1000
"""Durations that say what is usual."""
MIN_SAMPLES, MIN_ROUNDS = 20, 2
"""Samples and rounds before which there is no usual time."""
MAX_WAITS = 8

NUM_REQUESTS = 200
"""The requests that are looked at for an abort storm."""
MIN_REQUESTS = 20
ABORTED_SHARE, GAINED_SHARE = 0.5, 0.1
"""A storm: at least this share of the requests is aborted, after less than this share of a response."""
CLOSE_S = 0.1
"""An abort this close to a publication belongs to it."""


class RunStatus(NamedTuple):
    """Whether a run goes on, by its files and by the lock that its process holds."""

    kind: str
    """'finished', 'starting', 'written', 'blocked': its process lives and writes nothing, 'ended': without
    closing, or 'silent': a simulation, or a run of another machine."""
    text: str


def state_of(folder: Path, now_s: float, *, is_closed: bool = False) -> RunStatus:
    """The state of the run in an output directory, at a Unix time. It takes no lock itself."""
    written_s = max(_modified(folder / name) for name in ("metrics.jsonl", "events.jsonl"))
    lock, silent_s = folder / "lock", now_s - written_s
    process, summarized_s = _holder(lock), _modified(folder / "summary.json")
    # summary.json is the last file that a run writes. A copy of the folder may have other times.
    is_copy = is_closed and not process and silent_s >= SILENT_S
    if summarized_s and (summarized_s >= written_s or is_copy):
        return RunStatus("finished", "finished")
    if process and (begun_s := _modified(lock)) > written_s:
        said = f"process {process} has been starting its workers for {now_s - begun_s:,.0f} s; see logs/"
        return RunStatus("starting", said)
    if silent_s < SILENT_S:
        return RunStatus("written", "is being written")
    said = f"nothing was written for {silent_s:,.0f} s" if written_s else "nothing was written"
    if process:
        return RunStatus("blocked", f"process {process} lives, but {said}")
    if lock.exists():
        return RunStatus("ended", "ended without closing")
    return RunStatus("silent", f"not finished, and {said}")


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _holder(lock: Path) -> int | None:
    """The process of this machine that holds a lock file; None: none that is known."""
    try:
        inode = str(lock.stat().st_ino)
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            # 1: FLOCK  ADVISORY  WRITE 708 fe:00:5505 0 EOF
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode:
                return int(words[4])
    except (OSError, IndexError, ValueError):
        pass
    return None


# -- what a run does now -------------------------------------------------------------------------------


class OpenWork(NamedTuple):
    """Something that has begun and not ended."""

    what: str
    is_late: bool = False


class Pace:
    """Seconds in which each engine generated no token, by the counts of a live run in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._life = 0
        self._counts: dict[str, bytes] = {}
        self._changed_s: dict[str, float] = {}
        self._longest_s: dict[str, float] = {}

    def update(self, timeline: Timeline) -> None:
        """Read the counts."""
        if timeline.life != self._life:
            self._life, self._counts, self._changed_s, self._longest_s = timeline.life, {}, {}, {}
        serving = {each.engine for each in timeline.open_requests}
        for engine in timeline.slots:
            try:
                count = (self._folder / f"{engine}-{timeline.life}.count").read_bytes()
            except (OSError, ValueError):  # a damaged log may name an engine that is no file's name
                continue
            if count != self._counts.get(engine) or engine not in serving:
                pause_s = timeline.end_s - self._changed_s.get(engine, timeline.end_s)
                self._longest_s[engine] = max(pause_s, self._longest_s.get(engine, 0.0))
                self._counts[engine], self._changed_s[engine] = count, timeline.end_s

    def pauses(self, timeline: Timeline) -> Iterator[tuple[str, float, float]]:
        """Yield engines with open requests, the seconds since they last generated a token, and the longest
        such pause that the page has seen end."""
        serving = {each.engine for each in timeline.open_requests}
        for engine, changed_s in self._changed_s.items():
            if engine in serving:
                yield engine, timeline.end_s - changed_s, self._longest_s[engine]


def open_work(timeline: Timeline, pauses: Iterable[tuple[str, float, float]] = ()) -> list[OpenWork]:
    """Return the open work of a run, late work first. Nothing is late in a simulation, which records no
    waits. The pauses are those of `Pace.pauses`."""
    waits = [_wait(timeline, *wait) for wait in islice(timeline.waits.items(), MAX_WAITS)]
    requests = [*_engines_without_tokens(timeline, pauses)] or [*_requests(timeline)]
    found = [*waits, *_nothing(timeline), *requests, *_rewards(timeline), *_stages(timeline)]
    if not waits:
        return [each._replace(is_late=False) for each in found]
    return sorted(found, key=lambda each: not each.is_late)


def _wait(timeline: Timeline, wait: str, since_s: float) -> OpenWork:
    for_s = timeline.end_s - since_s
    works: Mapping[str, tuple[str, Sequence[Interval]]] = {
        "accumulate": ("gradients", timeline.passes),
        "step": ("optimizer step", timeline.steps),
        "publish": ("publication of weights", timeline.publications),
    }
    if (verb := verb_of(wait)) not in works:
        return OpenWork(f"{wait}, for {_seconds(for_s)}")
    name, ended = works[verb]
    what = f"{wait.partition(': ')[0]}: {name}, for {_seconds(for_s)}"
    if not ended:
        return OpenWork(f"{what}; none has ended before")
    median_s = median(each.duration_s for each in ended[-NUM_RECENT:])
    is_late = for_s > max(LATE_S, TIMES_MEDIAN * median_s)
    return OpenWork(f"{what}; the median is {_seconds(median_s)}", is_late)


def _nothing(timeline: Timeline) -> Iterator[OpenWork]:
    """Every device is idle, and no checkpoint is written."""
    is_open = timeline.open_requests or timeline.open_scorings
    if is_open or timeline.open_calls("accumulate", "step", "publish", "save"):
        return
    works: Sequence[Sequence[Interval]]
    works = timeline.requests, timeline.scorings, timeline.trainer, timeline.publications
    for_s = timeline.end_s - max(timeline.first_round_s, *(each[-1].end_s for each in works if each), 0.0)
    if for_s > LATE_S:
        yield OpenWork(f"nothing is generated, rewarded or trained, for {_seconds(for_s)}", True)


def _engines_without_tokens(
    timeline: Timeline, pauses: Iterable[tuple[str, float, float]]
) -> Iterator[OpenWork]:
    for engine, pause_s, longest_s in pauses:
        if pause_s > max(LATE_S, TIMES_LONGEST * longest_s):
            mine = [each for each in timeline.open_requests if each.engine == engine]
            what = f"{engine} has generated no token for {_seconds(pause_s)}; {_oldest(mine)}"
            yield OpenWork(what, True)


def _requests(timeline: Timeline) -> Iterator[OpenWork]:
    if opened := timeline.open_requests:
        oldest_s = timeline.end_s - min(each.start_s for each in opened)
        what = f"{_oldest(opened)}, for {_seconds(oldest_s)}"
        ended = (each.duration_s for each in timeline.requests if not each.is_evaluation)
        if longest_s := max(ended, default=0.0):
            what += f"; the longest before took {_seconds(longest_s)}"
        is_known = len(timeline.rounds) >= MIN_ROUNDS and len(timeline.requests) >= MIN_SAMPLES
        yield OpenWork(what, is_known and oldest_s > max(LATE_S, TIMES_LONGEST * longest_s))


def _rewards(timeline: Timeline) -> Iterator[OpenWork]:
    if opened := timeline.open_scorings:
        oldest = min(opened, key=lambda each: each.start_s)
        for_s = timeline.end_s - oldest.start_s
        num = f"samples that wait for their rewards: {len(opened)}"
        what = f"{num}, the oldest {oldest.sample}, for {_seconds(for_s)}"
        usual = [each.duration_s for each in timeline.scorings[-NUM_RECENT:]]
        if not usual:
            yield OpenWork(f"{what}; none has got one before")
            return
        what += f"; the median is {_seconds(median(usual))}, the longest {_seconds(max(usual))}"
        is_late = len(usual) >= MIN_SAMPLES and for_s > max(LATE_S, TIMES_LONGEST * max(usual))
        yield OpenWork(what, is_late)


def _stages(timeline: Timeline) -> Iterator[OpenWork]:
    """How full the stages were in the last optimizer step; a full one blocks the one before it."""
    for last in timeline.stages[-1:]:
        found = (f"{most} {name} (full for {_seconds(s)})" for name, (most, s) in last.stages.items())
        yield OpenWork(f"groups between engines and trainer in the last step, at most: {', '.join(found)}")


def _oldest(requests: Sequence[ServedRequest]) -> str:
    oldest = min(requests, key=lambda each: each.start_s)
    return f"open requests: {len(requests)}, the oldest of sample {oldest.sample} on {oldest.engine}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


# -- advisories ----------------------------------------------------------------------------------------


def advisories(
    steps: Sequence[Figures],
    timeline: Timeline | None,
    state: RunStatus | None = None,
    work: Sequence[OpenWork] = (),
) -> list[Advisory]:
    """Return advice from the last optimizer steps and the newest process of the run. `work`: the open work,
    or that at the process's last write."""
    recent = steps[-NUM_STEPS:]
    found: list[Advisory] = []
    if timeline and state:
        found += _silent(timeline, state, work)
    if timeline:
        found += (*_alarm(timeline), *_dead_engines(timeline), *_abort_storm(timeline, recent))
    return found + advisories_of_steps(steps)


def _silent(timeline: Timeline, state: RunStatus, work: Sequence[OpenWork]) -> Iterator[Advisory]:
    """A run that ended or hangs, or something in it that takes longer than usual."""
    late = [each.what for each in work if each.is_late]
    others = [each.what for each in work if not each.is_late]
    if state.kind == "written" and late:
        beside = ["What else is open:", *others] if others else []
        yield Advisory("longer than usual", "\n".join([*late, *beside]))
    if state.kind not in ("ended", "blocked"):
        return
    text = f"The last record is of {timeline.end_s:.0f} s"
    text += "".join(f", in {each.name}" for each in timeline.open_rounds)
    text += "".join(f"; step {each.number} had ended at {each.end_s:.0f} s" for each in timeline.steps[-1:])
    then = "\n".join([text + ". What was open then:", *late, *others] if work else [text + "."])
    if state.kind == "blocked":
        why = "The process lives and writes nothing: it is stopped, or code in it blocks its event loop. "
        yield Advisory("stalled", why + then)
    else:
        why = "No process holds the run's lock, and the run was not closed: it was killed. "
        yield Advisory("ended without closing", why + then)


def _alarm(timeline: Timeline) -> Iterator[Advisory]:
    """The run's own alarm: no step came for long, and none has come since."""
    for alarm in timeline.alarms[-1:]:
        if timeline.steps and alarm.time_s < timeline.steps[-1].end_s:
            return
        text = f"At {alarm.time_s:.0f} s: no optimizer step for {alarm.quiet_s:.0f} s. "
        text += f"What waits for what:\n{alarm.what}"
        if opened := timeline.open_requests:
            oldest = min(opened, key=lambda request: request.start_s)
            text += f"\nThe oldest request is sample {oldest.sample} on {oldest.engine}, "
            text += f"begun at {oldest.start_s:.0f} s; {len(opened)} are open."
        yield Advisory("stalled", text)


def _dead_engines(timeline: Timeline) -> Iterator[Advisory]:
    newest = {state.engine: state for state in timeline.states}
    for state in newest.values():
        if state.state == "dead":
            yield Advisory("engine dead", f"{state.engine} is dead since {state.time_s:.0f} s: {state.why}")


def _abort_storm(timeline: Timeline, steps: Sequence[Figures]) -> Iterator[Advisory]:
    trained = (each for each in reversed(timeline.requests) if not each.is_evaluation)
    recent = [*islice(trained, NUM_REQUESTS)]
    aborted = [request for request in recent if request.outcome in ("cancelled", "evicted")]
    if len(recent) < MIN_REQUESTS or len(aborted) < ABORTED_SHARE * len(recent):
        return
    lengths = [request.num_tokens for request in timeline.requests if request.is_response]
    length = fmean(lengths) if lengths else 0.0
    gained = fmean(request.num_gained for request in aborted)
    if length and gained >= GAINED_SHARE * length:
        return
    text = f"{len(aborted)} of the last {len(recent)} requests were aborted, after {gained:.0f} tokens in "
    text += f"the mean{f' of {length:.0f} in a response' if length else ''}: "
    text += _why_aborted(timeline, aborted)
    for engine, num in sums(steps, "engines/preempted/").items():
        text += f"; the KV cache of {engine} was full for {num:.0f} requests in {last_steps(steps)}"
    yield Advisory("abort storm", text)


def _why_aborted(timeline: Timeline, aborted: Sequence[ServedRequest]) -> str:
    evicted = [request.engine for request in aborted if request.outcome == "evicted"]
    if 2 * len(evicted) >= len(aborted):
        (engine, num), *_ = Counter(evicted).most_common(1)
        why = [state.why for state in timeline.states if state.engine == engine and state.state != "open"]
        return f"{engine} gave {num} of them back" + (f" ({why[-1]})" if why and why[-1] else "")
    num = sum(
        any(p.start_s - CLOSE_S <= request.end_s <= p.end_s + CLOSE_S for p in timeline.publications)
        for request in aborted
    )
    if 2 * num >= len(aborted):
        return f"publications of weights stopped {num} of them"
    return "the schedule stopped them: it parks or discards what it launched"
