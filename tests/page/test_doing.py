"""What a run does, and what of it is late, on small records."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.page.advisories import advisories
from tailrace.page.doing import Doing, Pace, doing
from tailrace.page.life import Life, Request, Work
from tailrace.page.state import State

WRITTEN = State("written", "is being written")


def life_at(end_s: float, **parts: Any) -> Life:
    """A life in its third round, with two optimizer steps of 3 s and 25 requests of 1 s."""
    life = Life(Path("trace.json"), 0.0)
    life.end_s, life.worked_s = end_s, 20.0
    life.rounds = [Work("round 0", 0.0, 10.0), Work("round 1", 10.0, 20.0)]
    life.trainer = [Work(f"step {n}", 10.0 * n - 3, 10.0 * n) for n in (1, 2)]
    for n in range(25):
        life.take_request(Request("engine-0", 1, n, n + 1.0, "stop", f"{n}.0/0", 9, 0))
        life.scoring.append(Work("group", n + 1.0, n + 1.1))
    life.open_waits = [Work("the schedule", 20.0, end_s)]
    for name, value in parts.items():
        setattr(life, name, value)
    return life


def running(sample: str, start_s: float, *, engine: str = "engine-0", outcome: str = "unfinished") -> Request:
    return Request(engine, 1, start_s, 0.0, outcome, sample, 0, 0)


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        (
            {"open_waits": [Work("trainer: Step", 15.0, 36.0)]},
            Doing("trainer: optimizer step, for 21 s; the median is 3.0 s", is_late=True),
        ),
        (
            {"open_waits": [Work("trainer: Step", 17.0, 36.0)]},
            Doing("trainer: optimizer step, for 19 s; the median is 3.0 s"),
        ),
        (  # 21 s is long, but not against steps of 6 s
            {
                "open_waits": [Work("trainer: Step", 15.0, 36.0)],
                "trainer": [Work("step 1", 0.0, 6.0), Work("step 2", 20.0, 26.0)],
            },
            Doing("trainer: optimizer step, for 21 s; the median is 6.0 s"),
        ),
        (
            {"open_waits": [Work("trainer-1: Accumulate", 6.0, 36.0)]},
            Doing("trainer-1: gradients, for 30 s; none has ended before"),
        ),
        (
            {"open_waits": [Work("engine-0: Load", 6.0, 36.0)]},
            Doing("engine-0: Load, for 30 s"),
        ),
        (
            {"unfinished": [running("7.0/1", 14.0), running("8.0/1", 30.0)]},
            Doing(
                "open requests: 2, the oldest of sample 7.0/1 on engine-0, for 22 s; "
                "the longest before took 1.0 s",
                is_late=True,
            ),
        ),
        (  # the tail of the first rounds is not known yet
            {"unfinished": [running("7.0/1", 14.0)], "rounds": []},
            Doing(
                "open requests: 1, the oldest of sample 7.0/1 on engine-0, for 22 s; "
                "the longest before took 1.0 s"
            ),
        ),
        (
            {"open_scoring": [Work("9.0/0", 35.0, 36.0), Work("5.0/2", 15.0, 36.0)]},
            Doing(
                "samples that wait for their rewards: 2, the oldest 5.0/2, for 21 s; "
                "the median is 0.1 s, the longest 0.1 s",
                is_late=True,
            ),
        ),
    ],
)
def test_what_is_open_is_compared_with_what_ended(parts: dict[str, Any], found: Doing) -> None:
    assert found in doing(life_at(36.0, **parts))


@pytest.mark.parametrize(
    ("end_s", "parts", "is_late"),
    [
        (41.0, {}, True),
        (39.0, {}, False),
        (41.0, {"unfinished": [running("1.0/0", 40.0)]}, False),
        (41.0, {"open_waits": [Work("trainer: Save", 21.0, 41.0)]}, False),
    ],
)
def test_devices_that_are_all_idle_for_long_are_named(
    end_s: float, parts: dict[str, Any], is_late: bool
) -> None:
    said = Doing("nothing is generated, rewarded or trained, for 21 s", is_late=True)
    assert (said in doing(life_at(end_s, **parts))) is is_late


def test_an_engine_that_generates_no_token_is_named(tmp_path: Path) -> None:
    """It pauses for 15 s while it has a request, goes on, and then hangs."""
    count, pace = tmp_path / "engine-0-2.count", Pace(tmp_path)
    life = life_at(10.0, path=Path("trace-2.json"), slots={"engine-0": 2}, rounds=[])
    life.unfinished = [running("7.0/1", 9.0), running("8.0/0", 12.0)]
    late = []
    for end_s, tokens in ((10.0, b"1"), (25.0, b"1"), (26.0, b"2"), (50.0, b"2"), (60.0, b"2")):
        count.write_bytes(tokens)
        life.end_s = end_s
        pace.update(life)
        late.append([each.what for each in doing(life, pace.pauses(life)) if each.is_late])
    said = "open requests: 2, the oldest of sample 7.0/1 on engine-0"
    assert late == [[], [], [], [], [f"engine-0 has generated no token for 34 s; {said}"]]
    life.unfinished = []
    assert list(pace.pauses(life)) == []


def test_a_simulation_is_never_late() -> None:
    assert not any(each.is_late for each in doing(life_at(99.0, open_waits=[])))


def test_what_is_late_is_an_advisory_of_a_run_that_is_written() -> None:
    waits = [Work("the pool: 4 groups", 30.0, 36.0), Work("trainer: Step", 15.0, 36.0)]
    life = life_at(36.0, open_waits=waits)
    assert advisories([], life, WRITTEN, doing(life)) == [
        (
            "longer than usual",
            "trainer: optimizer step, for 21 s; the median is 3.0 s\n"
            "What else is open:\nthe pool: 4 groups, for 6.0 s",
        )
    ]
    life = life_at(36.0, open_waits=[waits[0]])
    assert advisories([], life, WRITTEN, doing(life)) == []


def test_a_run_that_was_killed_or_hangs_says_what_it_did_last() -> None:
    life = life_at(22.0, open_rounds=[Work("round 2", 20.0, 22.0)])
    then = (
        "The last record is of 22 s, in round 2; step 2 had ended at 20 s. What was open then:\n"
        "the schedule, for 2.0 s"
    )
    (killed,) = advisories([], life, State("ended", "ended without closing"), doing(life))
    assert killed.kind == "ended without closing" and killed.text.endswith(f"it was killed. {then}")
    (hangs,) = advisories([], life, State("blocked", "process 7 lives"), doing(life))
    assert hangs.kind == "stalled" and hangs.text.endswith(f"blocks its event loop. {then}")
