import math

from record_story import pipelined_round, rows_of

from tailrace.record.base import RecordSettings
from tailrace.record.display import Notices
from tailrace.record.events import EngineStateChanged, SampleScored
from tailrace.record.figures import Row
from tailrace.types import SampleId


def step_row(**changes: float) -> Row:
    return rows_of(pipelined_round().events)[0] | changes


def test_the_first_failure_of_each_kind_is_shown_at_once() -> None:
    notices, lines = Notices(), []
    failures = [("reward raised", "no"), ("reward raised", "?"), ("reward nan", "")]
    for number, (failure, detail) in enumerate(failures):
        lines += notices.of(SampleScored(1.0, SampleId(0, 0, number), None, failure, 5, detail))
    lines += notices.of(SampleScored(1.0, SampleId(0, 0, 4), 1.0, None, 5))
    assert lines == [
        "First failed reward | reward raised | 0.0/0 | no",
        "First failed reward | reward nan | 0.0/2 | ",
    ]


def test_a_mismatch_alarms_once_until_it_recovers() -> None:
    notices = Notices(RecordSettings(alarm_kl=0.1, alarm_ess=0.3))
    assert notices.of(step_row(engine_mismatch_kl=0.1, ess=0.3)) == []
    first = notices.of(step_row(step=2, engine_mismatch_kl=0.25))
    assert first == [
        "ALARM | Step 2 | engine and trainer disagree on tokens of the same weights: "
        "KL 0.2500 nats a token, limit 0.1 | compare their dtype, temperature and weights"
    ]
    (second,) = notices.of(step_row(step=3, engine_mismatch_kl=0.3, ess=0.2))
    assert "effective sample size 0.2000, limit 0.3" in second
    assert notices.of(step_row(engine_mismatch_kl=0.3, ess=0.2)) == []
    assert notices.of(step_row()) == []
    assert len(notices.of(step_row(engine_mismatch_kl=0.3, ess=0.2))) == 2


def test_a_mismatch_that_is_not_a_number_alarms() -> None:
    assert len(Notices().of(step_row(engine_mismatch_kl=math.nan, ess=math.nan))) == 2


def test_a_step_on_tokens_of_older_weights_is_no_mismatch() -> None:
    old = step_row(mismatch_kl=5.0, ess=0.01) | {"lag/max": 1}
    del old["engine_mismatch_kl"]
    assert Notices().of(old) == []


def test_the_tokens_of_a_step_that_are_not_old_are_compared() -> None:
    mixed = step_row(engine_mismatch_kl=0.5, ess=0.01) | {"lag/max": 1}
    assert len(Notices().of(mixed)) == 1


def test_a_first_step_without_a_call_of_a_tool_is_said_once() -> None:
    (line,) = Notices().of(step_row(step=1) | {"rewards/environment/calls": 0.0})
    assert line.startswith("No sample of step 1 calls a tool | ")
    for quiet in (
        {"rewards/environment/calls": 0.1},
        {"step": 2, "rewards/environment/calls": 0.0},
    ):
        assert Notices().of(step_row(step=1) | quiet) == []


def test_a_dead_engine_is_named_at_once_with_the_cause() -> None:
    event = EngineStateChanged(1.0, "engine-0", "dead", "engine-0 (process 7) ended: signal SIGKILL")
    assert Notices().of(event) == ["engine-0 is dead: engine-0 (process 7) ended: signal SIGKILL"]
