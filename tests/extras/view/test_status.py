"""Whether a run goes on, what it does, what of it is late, and what a person should look at."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.record_story import GOOD
from tailrace.extras.view.status import OpenWork, Pace, RunStatus, advisories, open_work, state_of
from tailrace.record.events import EngineStateChanged, OptimizerStep, Published, StagesFilled, Waiting
from tailrace.record.timeline import Lanes, Pairs, RoundSpan, Scoring, ServedRequest, Timeline
from tailrace.types import SampleId

WRITTEN = RunStatus("written", "is being written")


# -- the state of a run --


def touch(path: Path, time_s: float) -> None:
    path.touch()
    os.utime(path, (time_s, time_s))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that last wrote at 1,000 s."""
    touch(tmp_path / "events.jsonl", 1000.0)
    touch(tmp_path / "metrics.jsonl", 900.0)
    return tmp_path


def test_a_run_is_finished_when_its_summary_is_the_newest_file(folder: Path) -> None:
    touch(folder / "summary.json", 950.0)  # of an earlier life
    assert state_of(folder, 1002.0) == ("written", "is being written")
    assert state_of(folder, 1100.0, is_closed=True) == ("finished", "finished")  # a copy
    touch(folder / "summary.json", 1000.0)
    assert state_of(folder, 1001.0) == ("finished", "finished")


def test_silence_without_a_lock_has_no_known_reason(folder: Path) -> None:
    assert state_of(folder, 1020.0) == ("silent", "not finished, and nothing was written for 20 s")


def test_a_run_whose_lock_is_free_has_ended(folder: Path) -> None:
    touch(folder / "lock", 10.0)
    assert state_of(folder, 1010.0) == ("written", "is being written")
    assert state_of(folder, 1020.0) == ("ended", "ended without closing")


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="locks are not listed here")
def test_a_run_whose_lock_is_held_starts_writes_or_is_blocked(folder: Path) -> None:
    touch(folder / "lock", 10.0)
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state_of(folder, 1010.0) == ("written", "is being written")
        said = f"process {os.getpid()} lives, but nothing was written for 20 s"
        assert state_of(folder, 1020.0) == ("blocked", said)
        touch(folder / "lock", 1010.0)
        said = f"process {os.getpid()} has been starting its workers for 10 s; see logs/"
        assert state_of(folder, 1020.0) == ("starting", said)
    assert state_of(folder, 1020.0).kind == "ended"


# -- what a run does --


def step(number: int, start_s: float, end_s: float) -> OptimizerStep:
    return OptimizerStep(start_s, end_s, number, (), 9, 0.5)


def timeline_at(
    end_s: float, *, running: Sequence[ServedRequest] = (), scored: Sequence[Scoring] = (), **parts: Any
) -> Timeline:
    """A process in its third round, with two optimizer steps of 3 s and 20 requests of 1 s.

    Args:
        running, scored: open requests, and samples that wait for their reward.
    """
    timeline = Timeline(end_s=end_s)
    timeline.rounds = [RoundSpan(0.0, 10.0, 0, 0), RoundSpan(10.0, 20.0, 1, 1)]
    timeline.steps = [step(n, 10.0 * n - 3, 10.0 * n) for n in (1, 2)]
    for n in range(20):
        sample = SampleId(n, 0, 0)
        timeline.requests.append(ServedRequest(n - 0.1, n + 0.9, sample, "engine-0", 1, 0, 9, "stop"))
        timeline.scorings.append(Scoring(n + 0.9, n + 1.0, sample, 1, 1.0, "reward"))
    timeline.waits = {"the schedule": 20.0}
    timeline.pairs.requests = {each.sample: each for each in running}
    timeline.pairs.scorings = {each.sample: each for each in scored}
    for name, value in parts.items():
        setattr(timeline, name, value)
    return timeline


def running(prompt: int, number: int, start_s: float) -> ServedRequest:
    return ServedRequest(start_s, start_s, SampleId(prompt, 0, number), "engine-0", 1, 0, 0)


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        (
            {"waits": {"trainer: Step": 15.0}},
            OpenWork("trainer: optimizer step, for 21 s; the median is 3.0 s", is_late=True),
        ),
        (
            {"waits": {"trainer: Step": 17.0}},
            OpenWork("trainer: optimizer step, for 19 s; the median is 3.0 s"),
        ),
        (  # 21 s is long, but not against steps of 6 s
            {"waits": {"trainer: Step": 15.0}, "steps": [step(1, 0.0, 6.0), step(2, 20.0, 26.0)]},
            OpenWork("trainer: optimizer step, for 21 s; the median is 6.0 s"),
        ),
        (
            {"waits": {"trainer-1: Accumulate": 6.0}},
            OpenWork("trainer-1: gradients, for 30 s; none has ended before"),
        ),
        ({"waits": {"engine-0: Load": 6.0}}, OpenWork("engine-0: Load, for 30 s")),
        (
            {"running": [running(7, 1, 14.0), running(8, 1, 30.0)]},
            OpenWork(
                "open requests: 2, the oldest of sample 7.0/1 on engine-0, for 22 s; "
                "the longest before took 1.0 s",
                is_late=True,
            ),
        ),
        (  # the tail of the first rounds is not known yet
            {"running": [running(7, 1, 14.0)], "rounds": []},
            OpenWork(
                "open requests: 1, the oldest of sample 7.0/1 on engine-0, for 22 s; "
                "the longest before took 1.0 s"
            ),
        ),
        (
            {
                "scored": [
                    Scoring(35.0, 35.0, SampleId(9, 0, 0), 1),
                    Scoring(15.0, 15.0, SampleId(5, 0, 2), 2),
                ]
            },
            OpenWork(
                "samples that wait for their rewards: 2, the oldest 5.0/2, for 21 s; "
                "the median is 0.1 s, the longest 0.1 s",
                is_late=True,
            ),
        ),
    ],
)
def test_what_is_open_is_compared_with_what_ended(parts: dict[str, Any], found: OpenWork) -> None:
    assert found in open_work(timeline_at(36.0, **parts))


@pytest.mark.parametrize(
    ("end_s", "parts", "is_late"),
    [
        (41.0, {}, True),
        (39.0, {}, False),
        (41.0, {"running": [running(1, 0, 40.0)]}, False),
        (41.0, {"waits": {"trainer: Save": 21.0}}, False),
    ],
)
def test_devices_that_are_all_idle_for_long_are_named(
    end_s: float, parts: dict[str, Any], is_late: bool
) -> None:
    said = OpenWork("nothing is generated, rewarded or trained, for 21 s", is_late=True)
    assert (said in open_work(timeline_at(end_s, **parts))) is is_late


def test_an_engine_that_generates_no_token_is_named(tmp_path: Path) -> None:
    """It pauses for 15 s while it has a request, goes on, and then hangs."""
    count, pace = tmp_path / "engine-0-2.count", Pace(tmp_path)
    opened = [running(7, 1, 9.0), running(8, 0, 12.0)]
    timeline = timeline_at(10.0, running=opened, life=2, rounds=[])
    timeline.pairs.engines = {"engine-0": Lanes()}
    late = []
    for end_s, tokens in ((10.0, b"1"), (25.0, b"1"), (26.0, b"2"), (50.0, b"2"), (60.0, b"2")):
        count.write_bytes(tokens)
        timeline.end_s = end_s
        pace.update(timeline)
        late.append([each.what for each in open_work(timeline, pace.pauses(timeline)) if each.is_late])
    said = "open requests: 2, the oldest of sample 7.0/1 on engine-0"
    assert late == [[], [], [], [], [f"engine-0 has generated no token for 34 s; {said}"]]
    timeline.pairs.requests = {}
    assert list(pace.pauses(timeline)) == []


def test_full_stages_are_named_with_their_groups() -> None:
    stages = [StagesFilled(9.0, {"generated": (12, 4.2), "scoring": (8, 0.0), "ready": (3, 0.0)})]
    said = "groups between engines and trainer in the last step, at most: "
    said += "12 generated (full for 4.2 s), 8 scoring (full for 0.0 s), 3 ready (full for 0.0 s)"
    assert OpenWork(said) in open_work(timeline_at(10.0, stages=stages))


def test_a_simulation_is_never_late() -> None:
    assert not any(each.is_late for each in open_work(timeline_at(99.0, waits={})))


def test_what_is_late_is_an_advisory_of_a_run_that_is_written() -> None:
    timeline = timeline_at(36.0, waits={"the pool: 4 groups": 30.0, "trainer: Step": 15.0})
    assert advisories([], timeline, WRITTEN, open_work(timeline)) == [
        (
            "longer than usual",
            "trainer: optimizer step, for 21 s; the median is 3.0 s\n"
            "What else is open:\nthe pool: 4 groups, for 6.0 s",
        )
    ]
    timeline = timeline_at(36.0, waits={"the pool: 4 groups": 30.0})
    assert advisories([], timeline, WRITTEN, open_work(timeline)) == []


def test_a_run_that_was_killed_or_hangs_says_what_it_did_last() -> None:
    timeline = timeline_at(22.0)
    timeline.pairs.round = RoundSpan(20.0, 20.0, 2, 2)
    then = (
        "The last record is of 22 s, in round 3; step 2 had ended at 20 s. What was open then:\n"
        "the schedule, for 2.0 s"
    )
    (killed,) = advisories([], timeline, RunStatus("ended", "ended without closing"), open_work(timeline))
    assert killed.kind == "ended without closing" and killed.text.endswith(f"it was killed. {then}")
    (hangs,) = advisories([], timeline, RunStatus("blocked", "process 7 lives"), open_work(timeline))
    assert hangs.kind == "stalled" and hangs.text.endswith(f"blocks its event loop. {then}")


# -- advisories --


def request(number: int, outcome: str, gained: int) -> ServedRequest:
    return ServedRequest(0.0, 1.0, SampleId(number, 0, 0), "engine-0", 1, 100, 100 + gained, outcome)


def test_a_good_run_has_none() -> None:
    requests = [request(n, "cancelled" if n % 2 else "stop", 300) for n in range(50)]
    assert advisories([GOOD] * 9, Timeline(requests=requests)) == []
    assert advisories([], None) == []


def test_a_stalled_phase_says_what_waits_for_what() -> None:
    alarm = Waiting(400.0, 300.0, "pool: a reward\nschedule: 8 groups")
    pairs = Pairs()
    pairs.requests = {each.sample: each for each in (running(7, 0, 95.0), running(8, 0, 99.0))}
    steps = [step(3, 90.0, 100.0)]
    (found,) = advisories([GOOD], Timeline(alarms=[alarm], steps=steps, pairs=pairs))
    assert found == (
        "stalled",
        "At 400 s: no optimizer step for 300 s. What waits for what:\npool: a reward\nschedule: 8 groups\n"
        "The oldest request is sample 7.0/0 on engine-0, begun at 95 s; 2 are open.",
    )
    assert advisories([GOOD], Timeline(alarms=[alarm], steps=[*steps, step(4, 405.0, 410.0)])) == []


def test_a_dead_engine_is_named_until_it_is_open_again() -> None:
    died = EngineStateChanged(12.0, "engine-1", "dead", "signal SIGKILL")
    assert advisories([GOOD], Timeline(states=[died])) == [
        ("engine dead", "engine-1 is dead since 12 s: signal SIGKILL")
    ]
    assert (
        advisories([GOOD], Timeline(states=[died, EngineStateChanged(14.0, "engine-1", "open", "restarted")]))
        == []
    )


@pytest.mark.parametrize(
    ("outcome", "parts", "cause"),
    [
        ("cancelled", {}, "the schedule stopped them: it parks or discards what it launched"),
        (
            "cancelled",
            {"publications": [Published(1.05, 2.0, 1)]},
            "publications of weights stopped 30 of them",
        ),
        (
            "evicted",
            {"states": [EngineStateChanged(0.5, "engine-0", "dead", "out of memory")]},
            "engine-0 gave 30 of them back (out of memory)",
        ),
    ],
)
def test_an_abort_storm_names_who_aborts(outcome: str, parts: dict[str, object], cause: str) -> None:
    """30 of 40 requests are aborted after 5 tokens, of 350 in a response."""
    requests = [request(n, "stop", 250) for n in range(10)] + [request(n, outcome, 5) for n in range(30)]
    found = advisories([GOOD], Timeline(requests=requests, **parts))
    assert (
        "abort storm",
        f"30 of the last 40 requests were aborted, after 5 tokens in the mean of 350 in a response: {cause}",
    ) in found


def test_a_full_kv_cache_is_named_in_an_abort_storm() -> None:
    requests = [request(n, "evicted", 0) for n in range(30)]
    (found,) = advisories([GOOD | {"engines/preempted/engine-0": 12.0}], Timeline(requests=requests))
    assert found.text.endswith("; the KV cache of engine-0 was full for 12 requests in the last step")


def test_truncation_names_the_limit() -> None:
    (found,) = advisories([GOOD | {"completions/clipped_ratio": 0.5}], None)
    assert found == (
        "truncation",
        "50% of the samples of the last step end at the length limit (900 tokens): their rewards are those "
        "of unfinished answers. Raise sampling.max_completion_tokens, or shorten the answers.",
    )
