"""The run while it runs: a live panel on a terminal, else one line a step.

The panel redraws itself on rich's own thread, ten times a second at most, so that it also shows what the
trainer waits for while nothing happens. Events only change a few numbers.
"""

from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.record.events import (
    Evaluated,
    Event,
    RequestEnded,
    RoundStarted,
    SampleScored,
    Sink,
    Stepped,
    Waiting,
    time_of,
)
from tailrace.record.steps import Row, StepMeter

REFRESH_PER_S = 10
NUM_REWARDS = 40
"""Steps whose rewards the panel draws."""
BLOCKS = "▁▂▃▄▅▆▇█"


def open_display(*, rounds: int, waits: Callable[[], str], console: Console | None = None) -> Sink:
    """The display that fits the console.

    waits: who waits for what at this moment, in one line; also called from the display's own thread.
    """
    console = console or Console()
    return LiveDisplay(console, rounds, waits) if console.is_terminal else PlainDisplay(console, rounds)


class Progress:
    """What a display shows. Updated by events, read at any time."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.round = 0
        self.elapsed_s = 0.0
        self.accuracy: float | None = None
        self.generated_per_s = 0.0
        """In this round so far, by the requests that ended."""
        self.rewards: list[float] = []
        self._steps = StepMeter(lambda row: None)
        self._generated = 0
        self._first_s: float | None = None
        self._round_start_s = 0.0
        self._step_s = self._wait_s = 0.0
        self._measured_round: float = 0

    @property
    def row(self) -> Row:
        """The last step's numbers; empty before the first."""
        return self._steps.row

    @property
    def wait_share(self) -> float:
        """Share of the round that the trainer waited, up to the last step."""
        return self._wait_s / self._step_s if self._step_s else 0.0

    def on(self, event: Event) -> None:
        self._steps.on(event)
        self._tick(time_of(event))
        match event:
            case RequestEnded() if event.sample.prompt >= 0:
                self._generated += event.num_gained
            case RoundStarted():
                self.round, self._round_start_s, self._generated = event.round, event.time_s, 0
            case Stepped():
                self._step()
            case Evaluated():
                self.accuracy = event.accuracy

    def _tick(self, time_s: float) -> None:
        if self._first_s is None:
            self._first_s = time_s
        self.elapsed_s = time_s - self._first_s
        if self._generated and time_s > self._round_start_s:
            self.generated_per_s = self._generated / (time_s - self._round_start_s)

    def _step(self) -> None:
        if self.row["round"] != self._measured_round:
            self._measured_round = self.row["round"]
            self._step_s = self._wait_s = 0.0
        self._step_s += self.row["time/step"]
        self._wait_s += self.row["time/wait"]
        self.rewards = [*self.rewards, self.row["reward"]][-NUM_REWARDS:]


class Failures:
    """Which reasons for an unrewarded sample were seen: the first of each is worth a line at once, since a
    reward function that always fails never comes to a step."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def is_new(self, event: SampleScored) -> bool:
        if event.failure is None or event.failure in self._seen:
            return False
        self._seen.add(event.failure)
        return True


class PlainDisplay:
    """Sink: one line a step, for a log."""

    def __init__(self, console: Console, rounds: int) -> None:
        self._console = console
        self._progress = Progress(rounds)
        self._failures = Failures()

    def on(self, event: Event) -> None:
        self._progress.on(event)
        match event:
            case Stepped():
                self._print(step_line(self._progress))
            case Evaluated():
                self._print(evaluation_line(event))
            case SampleScored() if self._failures.is_new(event):
                self._print(failure_line(event))
            case Waiting():
                self._print(waiting_line(event))

    def close(self) -> None:
        """Every line is out."""

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay:
    """Sink: a panel that stays in place; evaluations and long waits scroll by above it."""

    def __init__(self, console: Console, rounds: int, waits: Callable[[], str]) -> None:
        self._progress = Progress(rounds)
        self._failures = Failures()
        self._waits = waits
        self._live = Live(
            console=console,
            refresh_per_second=REFRESH_PER_S,
            get_renderable=self.panel,
            redirect_stderr=False,
        )

    def on(self, event: Event) -> None:
        if not self._live.is_started:
            self._live.start()
        self._progress.on(event)
        match event:
            case Evaluated():
                self._live.console.print(evaluation_line(event), highlight=False, markup=False)
            case SampleScored() if self._failures.is_new(event):
                line = failure_line(event)
                self._live.console.print(line, style="yellow", highlight=False, markup=False)
            case Waiting():
                self._live.console.print(waiting_line(event), style="yellow", highlight=False, markup=False)

    def close(self) -> None:
        self._live.stop()

    def panel(self) -> RenderableType:
        progress, row = self._progress, self._progress.row
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(style="dim", width=9)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        if row:
            grid.add_row("reward", f"{row['reward']:.3f}  {sparkline(progress.rewards)}")
        if progress.accuracy is not None:
            grid.add_row("held out", f"{progress.accuracy:.3f}")
        staleness = f"staleness {row['staleness/mean']:.1f}" if row else ""
        grid.add_row("rollout", f"{progress.generated_per_s:,.0f} tokens/s  {staleness}")
        if row:
            grid.add_row("trainer", _busy_bar(progress.wait_share))
        grid.add_row("waits for", Text(self._waits()))
        title = f"round {progress.round + 1}/{progress.rounds}  step {row.get('step', 0):.0f}"
        return Panel(grid, title=title, title_align="left", subtitle=f"{progress.elapsed_s:.0f} s", width=78)


def _busy_bar(wait_share: float) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(
        total=1.0, completed=1 - wait_share, width=24, complete_style="green", finished_style="green"
    )
    grid.add_row(bar, f"computes {1 - wait_share:.0%}, waits {wait_share:.0%}")
    return grid


def sparkline(values: list[float]) -> str:
    """Blocks between the lowest and the highest value.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▄█'
    """
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale)] for value in values)


def step_line(progress: Progress) -> str:
    row = progress.row
    return (
        f"Step {row['step']} | Round {row['round']} | {progress.elapsed_s:.1f}s | "
        f"Reward {row['reward']:.4f} | "
        f"Length {row['completions/length/mean']:.0f} (max {row['completions/length/max']}) | "
        f"{progress.generated_per_s:,.0f} tokens/s | Staleness {row['staleness/max']} | "
        f"Wait {row['time/wait']:.2f}s of {row['time/step']:.2f}s"
    )


def evaluation_line(event: Evaluated) -> str:
    return f"Evaluation | Round {event.round} | Accuracy {event.accuracy:.4f} | {event.num_samples} samples"


def failure_line(event: SampleScored) -> str:
    return f"First sample without a reward | {event.failure} | {event.sample} | {event.detail}"


def waiting_line(event: Waiting) -> str:
    return f"No step for {event.quiet_s:.0f} s | {event.what}"
