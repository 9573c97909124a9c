"""The display of a run in a notebook: one table that is updated in place, and below it the newest notices."""

from collections.abc import Callable
from html import escape
from typing import Any

from rich.console import Console
from typing_extensions import override

from tailrace.drivers.assembly.display import Display, step_words
from tailrace.record.base import RecordSettings
from tailrace.record.events import Event

NUM_STEPS, NUM_LINES = 20, 8
"""The newest steps and lines that are shown."""
COLUMNS = ("Step", "Round", "Reward", "Loss", "Length", "Wait", "Tokens/s", "Entropy", "KL", "Elapsed", "ETA")
"""The figures of a step; `record.verbose`: all."""


def open_display(
    rounds: int, waits: Callable[[], str], settings: RecordSettings, *, start_s: float | None = None
) -> Display:
    """The display for where this process prints: a notebook, a terminal or a log. Arguments as `Display`."""
    console = Console()
    kind = NotebookDisplay if console.is_jupyter else Display
    return kind(rounds, waits, settings, console, start_s=start_s)


class NotebookDisplay(Display):
    """Sink behind a `StepMeter`: one output of a cell."""

    _handle: Any = None
    """IPython's handle of the output; None: nothing was shown."""

    def __init__(self, *run: Any, **options: Any) -> None:
        super().__init__(*run, **options)
        self._steps: list[dict[str, str]] = []
        self._lines: list[str] = []

    @override
    def on(self, event: Event) -> None:
        self._progress.on(event)
        if is_step := isinstance(event, dict) and "loss" in event:
            self._steps = [*self._steps, step_words(self._progress, event)][-NUM_STEPS:]
        self._lines += (lines := self._notices.of(event))
        if is_step or lines:
            self._show()

    @override
    def say(self, line: str) -> None:
        self._lines.append(line)
        self._show()

    def html(self) -> str:
        """The table of the newest steps, and the newest lines."""
        named = list(dict.fromkeys(name for step in self._steps for name in step))
        names = [name for name in named if self._settings.verbose or name in COLUMNS]
        heads = "".join(f"<th>{escape(name)}</th>" for name in names)
        rows = ("".join(f"<td>{escape(step.get(name, ''))}</td>" for name in names) for step in self._steps)
        lines = "".join(f"<div>{escape(line)}</div>" for line in self._lines[-NUM_LINES:])
        body = "".join(f"<tr>{cells}</tr>" for cells in rows)
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{lines}"

    def _show(self) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(self.html()), display_id=True)
        else:
            self._handle.update(HTML(self.html()))
