"""The terminal: a live panel, or one line a step where the output is a log.

The panel redraws itself in a thread of rich's, ten times a second, so it also shows what the trainer waits
for while nothing happens. Events only change a few numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from io import TextIOWrapper

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.record import events
from tailrace.record.advisories import Advisor
from tailrace.record.base import RecordSettings
from tailrace.record.events import Event, Row, time_of
from tailrace.record.figures import of_batch

REFRESH_PER_S = 10
BAR_WIDTH = 24
LINE_WIDTH = 80
"""Columns of the line of a step, at most."""
SAMPLE_LETTERS = 600
"""Letters of a response that are shown."""
NUM_REWARDS = 40
"""Steps whose rewards are drawn."""
UNHEARD = suppress(OSError, ValueError, SystemExit)
"""An output that is closed or full ends no run; rich would end the process."""
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Progress:
    """Updated by events, read at any time."""

    rounds: int
    """Rounds of the run."""
    round: int = 0
    elapsed_s: float = 0.0
    held_out: float | None = None
    """Mean reward on held-out prompts."""
    generated_per_s: float = 0.0
    """Tokens a second in this round, counted when a request ends."""
    rewards: list[float] = field(default_factory=list)
    row: Row | None = None
    """The last step."""
    _generated: int = 0
    _now_s: float = 0.0
    _start_s: float | None = None
    _round_start_s: float = 0.0
    _first_round: tuple[int, float] | None = None
    """The first round of this life of the run, and its start."""
    _expected_end_s: float | None = None
    _step_s: float = 0.0
    _wait_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """Share of the round in which the trainer waited, up to the last step."""
        return self._wait_s / self._step_s if self._step_s else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Expected time to the end of the last round, by the mean duration of a round so far, evaluations and
        checkpoints included; None before the first round has ended."""
        return None if self._expected_end_s is None else max(0.0, self._expected_end_s - self._now_s)

    def on(self, event: Event) -> None:
        self._tick(time_of(event))
        match event:
            case events.RequestEnded() if event.sample.prompt >= 0:
                self._generated += event.num_gained
            case events.RoundStarted():
                self.round, self._round_start_s, self._generated = event.round, event.time_s, 0
                self._first_round = self._first_round or (event.round, event.time_s)
            case events.RoundEnded() if self._first_round:
                first, start_s = self._first_round
                round_s = (event.time_s - start_s) / (event.round + 1 - first)
                self._expected_end_s = event.time_s + round_s * max(0, self.rounds - event.round - 1)
            case dict() if "loss" in event:
                self._step(event)
            case events.Evaluated():
                self.held_out = event.reward

    def _tick(self, time_s: float) -> None:
        if self._start_s is None:
            self._start_s = time_s
        self._now_s = max(self._now_s, time_s)
        self.elapsed_s = self._now_s - self._start_s
        if self._generated and time_s > self._round_start_s:
            self.generated_per_s = self._generated / (time_s - self._round_start_s)

    def _step(self, row: Row) -> None:
        if self.row is None or row["round"] != self.row["round"]:
            self._step_s = self._wait_s = 0.0
        self.row = row
        self._step_s += row["time/step"]
        self._wait_s += row.get("time/wait", 0.0)
        self.rewards = [*self.rewards, row.get("reward", 0.0)][-NUM_REWARDS:]


def step_words(progress: Progress, row: Row) -> dict[str, str]:
    """The figures of a step for a person, by their names, the most telling first. A step on given responses
    has no reward, and what follows from it."""
    remaining_s = progress.remaining_s
    ends = {"ETA": duration(remaining_s)} if remaining_s is not None else {}
    first = {"Step": f"{row['step']:.0f}", "Round": f"{row['round'] + 1:.0f}/{progress.rounds}"}
    loss, elapsed = {"Loss": number(row["loss"])}, {"Elapsed": f"{progress.elapsed_s:.1f}s"}
    if "reward" not in row:
        return {**first, **loss, **ends, "Rows": _rows(row), "Entropy": number(row["entropy"]), **elapsed}
    return {
        **first,
        "Reward": number(row["reward"]),
        **ends,
        "Length": f"{row['completions/mean_length']:.0f}",
        "Wait": f"{row['time/wait'] / row['time/step'] if row['time/step'] else 0.0:.0%}",
        "Tokens/s": f"{progress.generated_per_s:,.0f}",
        **loss,
        "Longest": f"{row['completions/max_length']:.0f}",
        "Truncated": f"{row['completions/clipped_ratio']:.0%}",
        "KL": number(row["kl"]),
        "Mismatch KL": number(row["mismatch_kl"]),
        "Entropy": number(row["entropy"]),
        "Staleness": f"{row['staleness/max']:.0f}",
        "Lag": f"{row['lag/max']:.0f}",
        **({"Cost": f"{row['cost/total']:,.4f}"} if "cost/total" in row else {}),
        "Took": f"{row['time/step']:.2f}s",
        **elapsed,
    }


def step_line(words: Mapping[str, str], width: int | None) -> str:
    """One line for a step, for a log: as many of its figures as fit; all of them without a width."""
    parts = [f"{name} {text}" for name, text in words.items()]
    num = 1
    while num < len(parts) and (width is None or len(" | ".join(parts[: num + 1])) <= width):
        num += 1
    return " | ".join(parts[:num])


def _rows(row: Row) -> str:
    return f"{row['rows/drawn']:,.0f} ({row['rows/skipped']:,.0f} skipped)"


def lengths(row: Row) -> str:
    mean, longest = row["completions/mean_length"], row["completions/max_length"]
    return f"{mean:.0f} (max {longest:.0f}, {row['completions/clipped_ratio']:.0%} truncated)"


def sample_line(prompt: str, text: str, reward: float | None) -> str:
    """A sample for a person, on one line: the end of its prompt, its text, cut in the middle, its reward."""
    half = SAMPLE_LETTERS // 2
    cut = text if len(text) <= SAMPLE_LETTERS else f"{text[:half]} ... {text[-half:]}"
    value = "none" if reward is None else number(reward)
    return f"Sample | Reward {value} | Prompt {prompt[-half:]!r} | Answer {cut!r}"


def number(value: float) -> str:
    """Four decimals, or three digits where a number is huge."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: '1:02:05'."""
    return str(timedelta(seconds=round(seconds)))


def sparkline(values: Sequence[float]) -> str:
    """Blocks between the lowest and the highest finite value: '▁▄█'."""
    halves = [value / 2 for value in values if math.isfinite(value)]  # the range of halves cannot overflow
    low, high = min(halves, default=0.0), max(halves, default=0.0)
    share = [(value - low) / (high - low) if high > low else 0.0 for value in halves]
    return "".join(BLOCKS[int(value * (len(BLOCKS) - 1))] for value in share)


@dataclass(slots=True)
class Notices:
    """Turns evaluations, failures, alarms, advisories and long waits into lines that are shown at once.

    A reason for a failed reward, a skipped row or a dropped group is named once: a reward function that
    always fails leads to no step whose line would say so.
    """

    settings: RecordSettings = field(default_factory=RecordSettings)
    _advisor: Advisor = field(default_factory=Advisor)
    _seen: set[tuple[str, str]] = field(default_factory=set)
    _alarms: set[str] = field(default_factory=set)
    """The alarms that hold now."""

    def of(self, event: Event) -> list[str]:
        """The lines that an event is worth."""
        match event:
            case events.Evaluated():
                figures = f"Held-out reward {number(event.reward)}"
                if event.solved is not None:
                    figures += f" | Solved {event.solved:.1%}"
                return [f"Evaluation | After round {event.round} | {figures} | {event.num_samples} samples"]
            case events.EngineStateChanged():
                return [f"{event.engine} is {event.state}: {event.why}"]
            case events.Waiting():
                return [f"No step for {event.quiet_s:.0f} s | {event.what}"]
            case events.SampleScored(failure=str(reason)):
                return self._first("failed reward", reason, f"{event.sample} | {event.detail}")
            case events.RowSkipped():
                return self._first("skipped row", event.reason, f"prompt {event.prompt} | {event.detail}")
            case events.GroupEnded(fate="dropped"):
                return self._first("dropped group", event.reason, f"prompt {event.prompt}")
            case events.Stepped(stats=stats, samples=(sample, *_)):
                every = self.settings.print_samples_every
                if every and (stats.num_steps - 1) % every == 0:
                    return [sample_line(sample.prompt.asked, sample.text, sample.reward)]
            case dict() if "reward" in event:
                advice = (f"Advice | {each.kind} | {each.text}" for each in self._advisor.add(event))
                return [*self._mismatch(event), *self._masked(event), *advice]
        return []

    def _first(self, what: str, reason: str, example: str) -> list[str]:
        """One line for the first example of a reason; the summary has the counts."""
        is_new = (what, reason) not in self._seen
        self._seen.add((what, reason))
        return [f"First {what} | {reason} | {example}"] if is_new else []

    def _mismatch(self, row: Row) -> list[str]:
        """Alarms where engine and trainer should agree on the log-prob of each token, and do not: on tokens
        of the very weights that are trained. A figure that is not a number is an alarm, too."""
        kl, ess, limits = row.get("engine_mismatch_kl"), row["ess"], self.settings
        lines = []
        if kl is not None:
            figures = f"KL {number(kl)} nats a token, limit {limits.alarm_kl}"
            lines += self._alarm("kl", kl <= limits.alarm_kl, row["step"], figures)
        if row["lag/max"] == 0:
            figures = f"effective sample size {number(ess)}, limit {limits.alarm_ess}"
            lines += self._alarm("ess", ess >= limits.alarm_ess, row["step"], figures)
        return lines

    def _masked(self, row: Row) -> list[str]:
        """One line for the first step of which too much is masked."""
        share, limit = of_batch([row], "tokens/masked"), self.settings.alarm_masked
        if share <= limit:
            return []
        what = f"{share:.0%} of its tokens are masked, limit {limit:.0%}: they are older than the bound"
        remedy = "raise schedule.staleness, or keep fewer groups or requests in flight"
        return self._first(
            "step with too many masked tokens", "too old", f"Step {row['step']:.0f} | {what} | {remedy}"
        )

    def _alarm(self, kind: str, is_well: bool, step: float, figures: str) -> list[str]:
        """One line when an alarm begins; the next one only after it has ended."""
        began = not is_well and kind not in self._alarms
        self._alarms = self._alarms - {kind} if is_well else self._alarms | {kind}
        what = "engine and trainer disagree on tokens of the same weights"
        remedy = "compare their dtype, temperature and weights"
        return [f"ALARM | Step {step:.0f} | {what}: {figures} | {remedy}"] if began else []


class Display:
    """Sink behind a `StepMeter`: a panel that stays in place on a terminal, with notices scrolling above it;
    on other outputs one line a step."""

    def __init__(
        self,
        rounds: int,
        waits: Callable[[], str],
        settings: RecordSettings | None = None,
        console: Console | None = None,
        *,
        start_s: float | None = None,
    ) -> None:
        """`waits` says in one line what each task waits for now; the thread of the panel calls it. `start_s`:
        when the run began; None: with its first event."""
        self._progress, self._waits = Progress(rounds, _start_s=start_s), waits
        self._stopping = ""
        self._settings = settings or RecordSettings()
        self._notices = Notices(self._settings)
        self._console = console or Console()
        self._width = None if self._settings.verbose else min(self._console.width, LINE_WIDTH)
        if isinstance(self._console.file, TextIOWrapper):
            self._console.file.reconfigure(errors="backslashreplace")
        self._live = Live(
            console=self._console,
            refresh_per_second=REFRESH_PER_S,
            get_renderable=self.panel,
            redirect_stderr=False,
        )

    def on(self, event: Event) -> None:
        if self._console.is_terminal and not self._live.is_started:
            with UNHEARD:
                self._live.start()
        self._progress.on(event)
        if isinstance(event, dict) and "loss" in event and not self._console.is_terminal:
            self.say(step_line(step_words(self._progress, event), self._width))
        for line in self._notices.of(event):
            self.say(line)

    def close(self) -> None:
        with UNHEARD:
            self._live.stop()

    def stopping(self, why: str) -> None:
        """Show from now on that the run ends in order."""
        self._stopping = why
        self.say(f"stopping: {why}")

    def say(self, line: str) -> None:
        """Show a line at once."""
        with UNHEARD:
            self._console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def panel(self) -> RenderableType:
        progress, row = self._progress, self._progress.row
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(style="dim", width=9)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        remaining_s = None if self._stopping else progress.remaining_s
        end = "" if remaining_s is None else f"ends in about {duration(remaining_s)}"
        grid.add_row("progress", _bar(progress.round / progress.rounds, end))
        if self._stopping:
            grid.add_row("stopping", self._stopping)
        if row and "reward" in row:
            grid.add_row("reward", f"{number(row['reward'])}  {sparkline(progress.rewards)}")
        if progress.held_out is not None:
            grid.add_row("held out", number(progress.held_out))
        if row and "reward" not in row:
            grid.add_row(
                "loss", f"{number(row['loss'])}  entropy {number(row['entropy'])}  rows {_rows(row)}"
            )
        elif row:
            kl = f"KL {number(row['kl'])}  mismatch KL {number(row['mismatch_kl'])}"
            grid.add_row("loss", f"{number(row['loss'])}  {kl}  entropy {number(row['entropy'])}")
            grid.add_row("length", lengths(row))
        if progress.generated_per_s:
            staleness = f"staleness {row['staleness/mean']:.1f}  lag {row['lag/mean']:.1f}" if row else ""
            grid.add_row("rollout", f"{progress.generated_per_s:,.0f} tokens/s  {staleness}")
        if row and "reward" in row:
            shares = f"computes {1 - progress.wait_share:.0%}, waits {progress.wait_share:.0%}"
            grid.add_row("trainer", _bar(1 - progress.wait_share, shares))
        grid.add_row("waits for", Text(self._waits()))
        title = f"round {progress.round + 1}/{progress.rounds}  step {row['step'] if row else 0:.0f}"
        return Panel(grid, title=title, title_align="left", subtitle=duration(progress.elapsed_s), width=78)


def _bar(share: float, text: str) -> RenderableType:
    done = min(1.0, share)
    bar = ProgressBar(1.0, done, BAR_WIDTH, complete_style="green", finished_style="green")
    grid = Table.grid(padding=(0, 1))
    grid.add_row(bar, text)
    return grid
