"""What a race comes to: medians of the laps, as a table and as numbers for scripts.

The bound is that of serial's rounds (`record/bounds.py`): a lower bound on the main time of a round for all
schedules that generate all of its samples in it, on the same devices. Schedules that carry samples may fall
below it. A row of its own has the bound of each schedule's own rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from rich.table import Table

from tailrace.record.laps import FIGURES, Lap

BASELINE = "serial"
NESTED = ("staleness", "lag", "ess")
"""Prefixes of figures that are grouped in the numbers: staleness_mean is staleness.mean."""

Row = tuple[str, Callable[[str], str]]
"""The label of a row of the table, and its cell for a schedule."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The laps of a race by the name of the schedule."""

    laps: Mapping[str, Sequence[Lap]]

    def values(self, name: str, figure: str) -> list[float]:
        """A figure of all laps of a schedule that have it."""
        values = (getattr(lap, figure) for lap in self.laps[name])
        return [value for value in values if value is not None]

    def typical(self, name: str) -> int:
        """The number of the lap whose main time is nearest to the median."""
        times = self.values(name, "main_time_s")
        return min(range(len(times)), key=lambda repeat: abs(times[repeat] - median(times)))

    @property
    def bound_s(self) -> float | None:
        """The bound on the main time of a round; None if serial did not run."""
        return self._median(BASELINE, "bound_s") if BASELINE in self.laps else None

    def numbers(self) -> dict[str, object]:
        """Medians of all figures, the range of the main time, and every lap."""
        schedules = {name: self._numbers(name) for name in self.laps}
        return {"schedules": schedules, "bound_s": self.bound_s}

    def table(self, title: str) -> Table:
        """A column for each schedule, a row for each figure."""
        table = Table("medians \\[lowest - highest]", title=title, title_justify="left")
        for name in self.laps:
            table.add_column(name, justify="right")
        for label, cell in self._rows():
            table.add_row(label, *(cell(name) for name in self.laps))
        if self.bound_s:
            table.caption = (
                f"bound {self.bound_s:.2f} s: the least main time for serial's samples;\n"
                "gap closed = (serial - x) / (serial - bound)"
            )
        return table

    def _numbers(self, name: str) -> dict[str, object]:
        figures: dict[str, Any] = {}
        for figure in (field.name for field in fields(Lap)):
            values = self.values(name, figure)
            middle = float(median(values)) if values else None
            group, _, kind = figure.rpartition("_")
            if group in NESTED:
                figures.setdefault(group, {})[kind] = middle
            else:
                figures[figure] = middle
        times = self.values(name, "main_time_s")
        return figures | {
            "main_time_s_spread": [min(times), max(times)],
            "laps": [asdict(lap) for lap in self.laps[name]],
        }

    def _rows(self) -> list[Row]:
        return [
            ("main time a round", lambda name: self._spread(name, "main_time_s", "{:.2f}", " s")),
            self._row("per 1,000 samples", "main_s_per_1000_samples", "{:.2f} s"),
            *self._against_serial(),
            self._row("bound of its own rounds", "bound_s", "{:.2f} s"),
            self._row("waiting ratio", "waiting_ratio", "{:.3f}"),
            self._row("first dispatch", "first_dispatch_s", "{:.2f} s"),
            self._row("trainer compute", "trainer_compute_s", "{:.2f} s"),
            self._row("rollout", "rollout_time_s", "{:.2f} s"),
            self._row("reward", "reward", "{:.3f}"),
            ("samples/s", lambda name: self._spread(name, "samples_per_s", "{:.1f}")),
            self._row("tokens/s", "tokens_per_s", "{:,.0f}"),
            self._row("rollout tokens/s", "rollout_tokens_per_s", "{:,.0f}"),
            *(self._row(*figure) for figure in FIGURES),
        ]

    def _row(self, label: str, figure: str, form: str) -> Row:
        return label, lambda name: form.format(self._median(name, figure))

    def _against_serial(self) -> list[Row]:
        """Times are compared for the same number of samples, because rounds may differ in size."""
        if BASELINE not in self.laps:
            return []

        def time_s(name: str) -> float:
            return self._median(name, "main_s_per_1000_samples")

        serial_s = time_s(BASELINE)
        rate = self._median(BASELINE, "samples_per_s")
        rows: list[Row] = [
            ("against serial", lambda name: f"{time_s(name) / serial_s - 1:+.1%}"),
            ("samples/s of serial's", lambda name: f"{self._median(name, 'samples_per_s') / rate:.2f}x"),
        ]
        if self.bound_s:
            bound_s = self.bound_s * serial_s / self._median(BASELINE, "main_time_s")
            rows.append(("over the bound", lambda name: f"{time_s(name) / bound_s - 1:+.1%}"))
            if closable_s := max(0.0, serial_s - bound_s):
                rows.append(("gap closed", lambda name: f"{(serial_s - time_s(name)) / closable_s:.0%}"))
        return rows

    def _median(self, name: str, figure: str) -> float:
        return float(median(self.values(name, figure)))

    def _spread(self, name: str, figure: str, form: str, unit: str = "") -> str:
        values = self.values(name, figure)
        middle, low, high = (form.format(value) for value in (median(values), min(values), max(values)))
        return f"{middle}{unit} [{low} - {high}]" if len(values) > 1 else f"{middle}{unit}"
