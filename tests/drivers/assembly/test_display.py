"""The terminal: progress, one line a step, notices and alarms."""

import io
import math
import os
import sys

import pytest
from rich.console import Console

from helpers.record_story import Story, pipelined_round, play, rows_of
from tailrace.drivers.assembly.display import Display, Notices, Progress, number, sample_line, sparkline
from tailrace.drivers.assembly.running import STOPPING
from tailrace.record.base import RecordSettings
from tailrace.record.events import (
    EngineStateChanged,
    Evaluated,
    Event,
    GroupEnded,
    RoundEnded,
    RoundStarted,
    Row,
    RowSkipped,
    SampleScored,
    Waiting,
)
from tailrace.types import SampleId


def told() -> Story:
    story = pipelined_round()
    story.tell(
        Evaluated(9.0, 0, 8, reward=0.5, mean_tokens=3.0),
        Waiting(19.0, 300.0, "2 complete groups (1 ready)"),
    )
    return story


def test_without_a_terminal_there_is_a_line_a_step() -> None:
    out = io.StringIO()
    display = Display(rounds=1, waits=lambda: "", console=Console(file=out, width=200))
    play(told().events, display)
    assert out.getvalue().splitlines() == [
        "Evaluation | After round 0 | Held-out reward 0.5000 | 8 samples",
        "Sample | Reward 1.0000 | Prompt 'question 0' | Answer 'answer 0'",
        "Step 1 | Round 1/1 | Reward 0.5000 | Length 5 | Wait 67% | Tokens/s 2",
        "No step for 300 s | 2 complete groups (1 ready)",
        "Step 2 | Round 1/1 | Reward 1.0000 | Length 15 | Wait 50% | Tokens/s 3",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_line_of_a_step_fits_the_output_and_has_every_figure_where_that_is_asked_for(width: int) -> None:
    lines = {}
    for verbose in (False, True):
        out = io.StringIO()
        settings = RecordSettings(verbose=verbose, print_samples_every=0)
        play(told().events, Display(1, lambda: "", settings, Console(file=out, width=width)))
        lines[verbose] = [line for line in out.getvalue().splitlines() if line.startswith("Step")]
    assert all(len(line) <= min(width, 80) for line in lines[False])
    assert all(line.split(" | ")[2].startswith("Reward ") for line in lines[False])
    assert lines[True][0] == (
        "Step 1 | Round 1/1 | Reward 0.5000 | Length 5 | Wait 67% | Tokens/s 2 | Loss 0.2500 | Longest 6 | "
        "Truncated 0% | KL 0.0000 | Mismatch KL 0.0100 | Entropy 1.5000 | Staleness 0 | Lag 0 | Took 6.00s | "
        "Elapsed 7.0s"
    )


def test_on_a_terminal_there_is_a_panel() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    display = Display(rounds=3, waits=lambda: "2 complete groups (1 ready)", console=console)
    play(told().events, display)
    shown = out.getvalue()
    assert "Evaluation | After round 0 | Held-out reward 0.5000" in shown
    assert "No step for 300 s" in shown
    plain = Console(file=io.StringIO(), width=80, record=True)
    plain.print(display.panel())
    panel = plain.export_text()
    assert "round 1/3  step 2" in panel
    assert "1.0000  ▁█" in panel
    assert "ends in about 0:00:30" in panel  # two more rounds of 15 s
    assert "0.2500  KL 0.0000  mismatch KL 0.0100  entropy 1.5000" in panel
    assert "15 (max 20, 50% truncated)" in panel
    assert "computes 43%, waits 57%" in panel
    assert "2 complete groups (1 ready)" in panel


def test_steps_on_given_responses_show_their_rows_and_no_reward() -> None:
    out = io.StringIO()
    settings, console = RecordSettings(verbose=True), Console(file=out, width=40)
    display = Display(4, lambda: "the trainer", settings, console, start_s=0.0)
    row = {"step": 1.0, "round": 0.0, "time": 10.0, "time/step": 9.0, "loss": 2.5, "entropy": 1.5}
    for event in (RoundStarted(1.0, 0, 0), RoundEnded(10.0, 0)):
        display.on(event)
    display.on(row | {"rows/drawn": 40.0, "rows/skipped": 8.0})
    line = "Step 1 | Round 1/4 | Loss 2.5000 | ETA 0:00:27 | Rows 40 (8 skipped) | Entropy 1.5000"
    assert out.getvalue() == f"{line} | Elapsed 10.0s\n"
    plain = Console(file=io.StringIO(), width=80, record=True)
    plain.print(display.panel())
    panel = plain.export_text()
    assert "2.5000  entropy 1.5000  rows 40 (8 skipped)" in panel and "ends in about 0:00:27" in panel
    assert "reward" not in panel and "rollout" not in panel


class Watched:
    """Sink: the progress of a run."""

    def __init__(self, rounds: int) -> None:
        self.progress = Progress(rounds)

    def on(self, event: Event) -> None:
        self.progress.on(event)

    def close(self) -> None: ...


def watch(events: list[Event], rounds: int) -> Progress:
    play(events, watched := Watched(rounds), close=False)
    return watched.progress


def test_the_wait_share_is_of_the_round() -> None:
    story = pipelined_round()
    assert watch(story.events, 2).wait_share == 8 / 14
    num_events = len(story.events)
    pipelined_round(story, round=1, start_s=110.0)
    progress = watch(story.events[: num_events + 10], 2)
    assert (progress.round, progress.row and progress.row["step"]) == (1, 2)
    assert progress.wait_share == 8 / 14  # until the new round's first step


def test_the_expected_end_follows_from_the_rounds_done() -> None:
    """Rounds of 15 s, 35 s of evaluation between them."""
    story = pipelined_round()
    assert watch(story.events[:-1], 4).remaining_s is None
    assert watch(story.events, 4).remaining_s == 3 * 15
    pipelined_round(story, round=1, start_s=60.0)
    assert watch(story.events, 4).remaining_s == 2 * (75 - 10) / 2
    story.tell(Evaluated(85.0, 2, 8, reward=0.5, mean_tokens=3.0))
    assert watch(story.events, 4).remaining_s == 65 - 10
    assert watch(story.events, 1).remaining_s == 0.0  # rounds beyond the last


def test_a_resumed_run_counts_its_own_rounds_only() -> None:
    story = pipelined_round(Story(num_steps=2), round=7, start_s=10.0)
    assert watch(story.events, 10).remaining_s == 2 * 15


def test_rewards_are_drawn_between_their_extremes() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([0.3, 0.3]) == "▁▁"


def test_huge_and_missing_rewards_can_be_drawn() -> None:
    assert sparkline([-1.7e308, 1.7e308, math.nan]) == "▁█"
    assert sparkline([math.nan]) == ""
    assert number(1e308) == "1e+308"


def step_row(**changes: float) -> Row:
    return rows_of(pipelined_round().events)[0] | changes


def test_the_first_drop_of_each_reason_is_shown_with_its_example() -> None:
    dropped = [
        RowSkipped(1.0, 4, "no prompt", "found None"),
        RowSkipped(2.0, 9, "no prompt", "found 3"),
        RowSkipped(2.0, -2, "prompt too long", "900 tokens, and at most 512 fit"),
        GroupEnded(3.0, 7, "dropped", "no prompt"),
        GroupEnded(3.0, 8, "dropped", "no prompt"),
        GroupEnded(3.0, 8, "filtered", "zero variance"),
    ]
    notices = Notices()
    assert [line for event in dropped for line in notices.of(event)] == [
        "First skipped row | no prompt | prompt 4 | found None",
        "First skipped row | prompt too long | prompt -2 | 900 tokens, and at most 512 fit",
        "First dropped group | no prompt | prompt 7",
    ]


def test_the_first_failure_of_each_kind_is_shown_at_once() -> None:
    notices, lines = Notices(), []
    failures = [("reward raised", "no"), ("reward raised", "?"), ("reward nan", "")]
    for index, (failure, detail) in enumerate(failures):
        lines += notices.of(SampleScored(1.0, SampleId(0, 0, index), None, failure, 5, detail))
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


def masked_row(step: int, num_masked: int) -> Row:
    return step_row(step=step) | {"tokens/trained": 50, "tokens/masked": num_masked}


def test_the_first_step_of_which_too_much_is_masked_is_named_once_with_the_remedy() -> None:
    notices = Notices(RecordSettings(alarm_masked=0.5))
    assert notices.of(masked_row(1, 50)) == []
    assert notices.of(masked_row(2, 75)) == [
        "First step with too many masked tokens | too old | Step 2 | 60% of its tokens are masked, "
        "limit 50%: they are older than the bound | raise schedule.staleness, or keep fewer groups or "
        "requests in flight"
    ]
    assert notices.of(masked_row(3, 450)) == []


def test_a_first_step_without_a_call_of_a_tool_is_said_once() -> None:
    (line,) = Notices().of(step_row(step=1) | {"rewards/environment/calls": 0.0})
    assert line.startswith("Advice | no calls | No sample of the last step calls a tool.")
    assert Notices().of(step_row(step=1) | {"rewards/environment/calls": 0.1}) == []
    notices = Notices()
    silent = {"rewards/environment/calls": 0.0}
    assert [len(notices.of(step_row(step=n) | silent)) for n in (1, 2, 3)] == [1, 0, 0]


def test_a_dead_engine_is_named_at_once_with_the_cause() -> None:
    event = EngineStateChanged(1.0, "engine-0", "dead", "engine-0 (process 7) ended: signal SIGKILL")
    assert Notices().of(event) == ["engine-0 is dead: engine-0 (process 7) ended: signal SIGKILL"]


def test_an_output_of_few_letters_or_that_is_closed_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    few = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    read_end, write_end = os.pipe()
    os.close(read_end)
    closed = os.fdopen(write_end, "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", closed)  # rich leads it to nowhere
    for file in (few, closed):
        display = Display(rounds=1, waits=lambda: "", console=Console(file=file))
        display.say("Evaluation → 1")
        display.say("Evaluation 2")
        display.close()
    few.flush()
    closed.close()
    assert few.buffer.getvalue() == b"Evaluation \\u2192 1\nEvaluation 2\n"  # type: ignore[attr-defined]


def test_the_clock_of_a_step_s_line_is_the_run_s() -> None:
    out = io.StringIO()
    display = Display(1, lambda: "", RecordSettings(verbose=True), Console(file=out, width=40), start_s=-50.0)
    play(told().events, display)
    assert " | Elapsed 66.0s\n" in out.getvalue()


def test_a_run_that_ends_in_order_says_so_until_it_has_ended() -> None:
    out, plain = io.StringIO(), Console(file=io.StringIO(), width=80, record=True)
    display = Display(3, lambda: "", console=Console(file=out, width=40))
    play(told().events, display)
    display.stopping(why := STOPPING.format("SIGTERM"))
    assert out.getvalue().splitlines()[-1] == f"stopping: {why}"
    plain.print(display.panel())
    panel = plain.export_text()
    assert f"stopping   {why} " in panel and "ends in about" not in panel


def test_the_text_of_a_sample_is_shown_every_few_steps_and_cut_in_its_middle() -> None:
    out = io.StringIO()
    settings = RecordSettings(print_samples_every=2)
    display = Display(1, lambda: "", settings, Console(file=out, width=40))
    play(told().events, display)
    shown = [line for line in out.getvalue().splitlines() if line.startswith("Sample")]
    assert shown == ["Sample | Reward 1.0000 | Prompt 'question 0' | Answer 'answer 0'"]
    line = sample_line("1 + 1", "a" * 400 + "b" * 400, None)
    assert line == f"Sample | Reward none | Prompt '1 + 1' | Answer '{'a' * 300} ... {'b' * 300}'"


def test_the_panel_fits_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, record=True)
    display = Display(rounds=3, waits=lambda: "2 complete groups (1 ready)", console=console)
    play(told().events, display)
    console.print(display.panel())
    assert max(len(line) for line in console.export_text().splitlines() if "│" in line) <= 40
