import io

from record_story import Story, pipelined_round, play
from rich.console import Console

from tailrace.record.display import LiveDisplay, PlainDisplay, Progress, open_display, sparkline
from tailrace.record.events import Evaluated, SampleScored, Waiting
from tailrace.types import SampleId


def told() -> Story:
    story = pipelined_round()
    story.tell(
        Evaluated(9.0, 0, 8, accuracy=0.5, mean_tokens=3.0),
        Waiting(19.0, 300.0, "2 complete groups (1 ready)"),
    )
    return story


def test_without_a_terminal_there_is_a_line_a_step() -> None:
    out = io.StringIO()
    display = open_display(rounds=1, waits=lambda: "", console=Console(file=out, width=40))
    assert isinstance(display, PlainDisplay)
    play(told().events, display)
    assert out.getvalue().splitlines() == [
        "Evaluation | Round 0 | Accuracy 0.5000 | 8 samples",
        "Step 1 | Round 0 | 7.0s | Reward 0.5000 | Length 5 (max 6) | 2 tokens/s | Staleness 0 | "
        "Wait 4.00s of 6.00s",
        "No step for 300 s | 2 complete groups (1 ready)",
        "Step 2 | Round 0 | 15.0s | Reward 1.0000 | Length 15 (max 20) | 3 tokens/s | Staleness 0 | "
        "Wait 4.00s of 8.00s",
    ]


def test_on_a_terminal_there_is_a_panel() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    display = open_display(rounds=3, waits=lambda: "2 complete groups (1 ready)", console=console)
    assert isinstance(display, LiveDisplay)
    play(told().events, display)
    shown = out.getvalue()
    assert "Evaluation | Round 0 | Accuracy 0.5000" in shown
    assert "No step for 300 s" in shown
    plain = Console(file=io.StringIO(), width=80, record=True)
    plain.print(display.panel())
    panel = plain.export_text()
    assert "round 1/3  step 2" in panel
    assert "1.000  ▁█" in panel
    assert "computes 43%, waits 57%" in panel
    assert "2 complete groups (1 ready)" in panel


def test_the_wait_share_is_of_the_round() -> None:
    progress = Progress(rounds=2)
    for event in pipelined_round().events:
        progress.on(event)
    assert progress.wait_share == 8 / 14
    second = pipelined_round(Story(num_steps=2), round=1, start_s=110.0)
    for event in second.events[:10]:
        progress.on(event)
    assert progress.row["step"] == 2
    assert progress.wait_share == 8 / 14  # until the new round's first step
    assert progress.round == 1


def test_rewards_are_drawn_between_their_extremes() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([0.3, 0.3]) == "▁▁"


def test_the_first_failure_of_each_kind_is_shown_at_once() -> None:
    console = Console(file=io.StringIO(), width=120)
    display = open_display(rounds=1, waits=str, console=console)
    for number, (failure, detail) in enumerate(
        [("reward raised", "no"), ("reward raised", "?"), ("reward nan", "")]
    ):
        display.on(SampleScored(1.0, SampleId(0, 0, number), None, failure, 5, detail))
    display.on(SampleScored(1.0, SampleId(0, 0, 4), 1.0, None, 5))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "First sample without a reward | reward raised | 0.0/0 | no",
        "First sample without a reward | reward nan | 0.0/2 | ",
    ]
