"""The terminal: a live panel, or one line a step where the output is a log.

The panel redraws itself in a thread of rich's, ten times a second, so it also shows what the trainer waits
for while nothing happens. Events only change a few numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.record.base import RecordSettings
from tailrace.record.events import EngineStateChanged, Evaluated, Event, SampleScored, Waiting
from tailrace.record.progress import Progress, duration, lengths, number, sparkline, step_line
from tailrace.record.rows import CALLS, StepRow

REFRESH_PER_S = 10
BAR_WIDTH = 24


@dataclass(slots=True)
class Notices:
    """Turns evaluations, failures, alarms and long waits into lines that are shown at once.

    A reason for a failed reward is named once: a reward function that always fails leads to no step whose
    line would say so.
    """

    settings: RecordSettings = field(default_factory=RecordSettings)
    _failures: set[str] = field(default_factory=set)
    _alarms: set[str] = field(default_factory=set)
    """The alarms that hold now."""

    def of(self, event: Event) -> list[str]:
        """The lines that an event is worth."""
        match event:
            case Evaluated():
                accuracy = f"Accuracy {number(event.accuracy)}"
                return [f"Evaluation | Round {event.round} | {accuracy} | {event.num_samples} samples"]
            case EngineStateChanged():
                return [f"{event.engine} is {event.state}: {event.why}"]
            case Waiting():
                return [f"No step for {event.quiet_s:.0f} s | {event.what}"]
            case SampleScored(failure=str(reason)) if reason not in self._failures:
                self._failures.add(reason)
                return [f"First failed reward | {reason} | {event.sample} | {event.detail}"]
            case StepRow():
                return [*self._mismatch(event), *_no_call(event)]
        return []

    def _mismatch(self, row: StepRow) -> list[str]:
        """Alarms where engine and trainer should agree on the log-prob of each token, and do not: on tokens
        of the very weights that are trained. A figure that is not a number is an alarm, too."""
        kl, ess, limits = row.engine_mismatch_kl, row.ess, self.settings
        lines = []
        if kl is not None:
            figures = f"KL {number(kl)} nats a token, limit {limits.alarm_kl}"
            lines += self._alarm("kl", kl <= limits.alarm_kl, row.step, figures)
        if row.lag_max == 0:
            figures = f"effective sample size {number(ess)}, limit {limits.alarm_ess}"
            lines += self._alarm("ess", ess >= limits.alarm_ess, row.step, figures)
        return lines

    def _alarm(self, kind: str, is_well: bool, step: int, figures: str) -> list[str]:
        """One line when an alarm begins; the next one only after it has ended."""
        began = not is_well and kind not in self._alarms
        self._alarms = self._alarms - {kind} if is_well else self._alarms | {kind}
        what = "engine and trainer disagree on tokens of the same weights"
        remedy = "compare their dtype, temperature and weights"
        return [f"ALARM | Step {step} | {what}: {figures} | {remedy}"] if began else []


def _no_call(row: StepRow) -> list[str]:
    if row.step > 1 or row.rewards.get(CALLS) != 0.0:
        return []
    return [
        "No sample of step 1 calls a tool | look at prompts and answers in samples/; the format of calls "
        "is environment.parser"
    ]


class Display:
    """Sink behind a `StepMeter`: a panel that stays in place on a terminal, with notices scrolling above it;
    on other outputs one line a step."""

    def __init__(
        self,
        rounds: int,
        waits: Callable[[], str],
        settings: RecordSettings | None = None,
        console: Console | None = None,
    ) -> None:
        """
        Args:
            waits: says in one line what each task waits for now; called from the thread of the panel.
            settings: the limits of the alarms.
            console: where to show it; the standard output if None.
        """
        self._progress, self._waits = Progress(rounds), waits
        self._notices = Notices(settings or RecordSettings())
        self._console = console or Console()
        self._live = Live(
            console=self._console,
            refresh_per_second=REFRESH_PER_S,
            get_renderable=self.panel,
            redirect_stderr=False,
        )

    def on(self, event: Event) -> None:
        if self._console.is_terminal and not self._live.is_started:
            self._live.start()
        self._progress.on(event)
        if isinstance(event, StepRow) and not self._console.is_terminal:
            self.say(step_line(self._progress, event))
        for line in self._notices.of(event):
            self.say(line)

    def close(self) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """Show a line at once."""
        self._console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def panel(self) -> RenderableType:
        progress, row = self._progress, self._progress.row
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(style="dim", width=9)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_row("progress", _bar(progress.round / progress.rounds, _expected_end(progress)))
        if row:
            grid.add_row("reward", f"{number(row.reward)}  {sparkline(progress.rewards)}")
        if progress.accuracy is not None:
            grid.add_row("held out", number(progress.accuracy))
        if row:
            kl = f"KL {number(row.kl)}  mismatch KL {number(row.mismatch_kl)}"
            grid.add_row("loss", f"{number(row.loss)}  {kl}  entropy {number(row.entropy)}")
            grid.add_row("length", lengths(row))
        staleness = f"staleness {row.staleness_mean:.1f}  lag {row.lag_mean:.1f}" if row else ""
        grid.add_row("rollout", f"{progress.generated_per_s:,.0f} tokens/s  {staleness}")
        if row:
            shares = f"computes {1 - progress.wait_share:.0%}, waits {progress.wait_share:.0%}"
            grid.add_row("trainer", _bar(1 - progress.wait_share, shares))
        grid.add_row("waits for", Text(self._waits()))
        title = f"round {progress.round + 1}/{progress.rounds}  step {row.step if row else 0}"
        return Panel(grid, title=title, title_align="left", subtitle=duration(progress.elapsed_s), width=78)


def _expected_end(progress: Progress) -> str:
    remaining_s = progress.remaining_s
    return "" if remaining_s is None else f"ends in about {duration(remaining_s)}"


def _bar(share: float, text: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(
        total=1.0,
        completed=min(1.0, share),
        width=BAR_WIDTH,
        complete_style="green",
        finished_style="green",
    )
    grid.add_row(bar, text)
    return grid
