"""What a paper printed, and what our simulation of its set-up gives.

A paper is one file of this folder: its set-up, the functions that compute its tables, and where the paper
contradicts itself.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Generic, Literal, NamedTuple, TypeVar

from tailrace.record.events import Event

E = TypeVar("E", bound=Event)

Kind = Literal["fitted", "determined", "definition", "predicted"]
"""Fitted: a parameter of the set-up was chosen so that it is met. Determined: it follows from fitted figures
or from other rows by arithmetic. Definition: any run of the schedule has it. Predicted: all others."""
Span = tuple[float, float]


class Parameter(NamedTuple):
    """What the set-up has from the paper ("printed"), fits to its figures ("fitted") or assumes ("assumed").

    Args:
        number: of values.
        source: the section that prints it, or the figures that it was fitted to.
    """

    kind: str
    number: int
    what: str
    source: str

    def __str__(self) -> str:
        source = {"printed": " ({})", "fitted": " to {}", "assumed": ""}[self.kind].format(self.source)
        return f"{self.kind.capitalize()}{source}: {self.what}."


def parameters(text: str) -> tuple[Parameter, ...]:
    """Read lines of "kind number | what | source". What is indented further goes on with the line before."""
    lines = text.strip().replace("\n    ", " ").splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return tuple(Parameter(kind.split()[0], int(kind.split()[1]), *rest) for kind, *rest in cells)


@dataclass(frozen=True, slots=True)
class Figure:
    """One printed number, and ours.

    Args:
        row: what the number belongs to: "R = 32", "Qwen2.5-14B".
        what: the quantity: "main time, reduction".
        unit: "%", "s", "x" or "" for a plain number.
        printed: as the paper prints it, or the range that it prints; None: the paper does not give it.
        ours: of the simulation, the mean over seeds.
        tolerance: how far ours may lie from the printed number or range, in the unit; None: no bar.
        spread: the smallest and the largest over seeds; None: one seed.
        deviation: sample standard deviation over the rounds of a run, which the paper draws as an error bar;
            the mean over seeds. None: the paper draws none.
    """

    row: str
    what: str
    unit: str
    printed: float | Span | None
    ours: float
    kind: Kind = "predicted"
    tolerance: float | None = None
    spread: Span | None = None
    deviation: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether ours is within the tolerance of the printed number or range; None where there is no bar."""
        if self.printed is None or self.tolerance is None:
            return None
        low, high = self.printed if isinstance(self.printed, tuple) else (self.printed, self.printed)
        return low - self.tolerance <= self.ours <= high + self.tolerance


@dataclass(frozen=True, slots=True)
class Table:
    """A table or figure of a paper.

    Args:
        number: as the paper numbers it: "Table 1", "Fig. 5c".
        notes: what a reader must know to judge it, one sentence each.
    """

    number: str
    title: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()


class Collected(Generic[E]):
    """Sink: the events of one type."""

    def __init__(self, kind: type[E]) -> None:
        self._kind, self.events = kind, list[E]()

    def on(self, event: Event) -> None:
        if isinstance(event, self._kind):
            self.events.append(event)

    def close(self) -> None:
        """Nothing is left open."""


def over_seeds(simulated: Callable[[int], Table], seeds: Sequence[int]) -> Table:
    """The table with the means over seeds, and their spread if there are several."""
    first, *others = tables = [simulated(seed) for seed in seeds]
    if not others:
        return first
    figures = []
    for same in zip(*(table.figures for table in tables), strict=True):
        ours = [figure.ours for figure in same]
        deviations = [figure.deviation for figure in same if figure.deviation is not None]
        deviation = fmean(deviations) if deviations else None
        figures.append(replace(same[0], ours=fmean(ours), spread=(min(ours), max(ours)), deviation=deviation))
    return replace(first, figures=tuple(figures))


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper whose set-up can be simulated.

    Args:
        name: for the command line.
        citation: authors, year, title.
        set_up: what its parameters do not say, one sentence each.
        tables: functions that simulate one table with a seed, by the paper's number of it.
        contradictions: where the paper contradicts itself, one sentence each.
        not_attempted: figures of the paper that no table here has.
    """

    name: str
    citation: str
    set_up: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    tables: Mapping[str, Callable[[int], Table]]
    contradictions: tuple[str, ...]
    not_attempted: str

    @property
    def num_parameters(self) -> dict[str, int]:
        """Values of the parameters by their kind."""
        kinds = ("printed", "fitted", "assumed")
        return {kind: sum(each.number for each in self.parameters if each.kind == kind) for kind in kinds}

    @property
    def num_fitted(self) -> int:
        """Values that were fitted to printed figures."""
        return self.num_parameters["fitted"]


def count(figures: Sequence[Figure]) -> dict[str, int]:
    """Figures that are printed, those of them of each kind, and figures that are not printed."""
    printed = [figure for figure in figures if figure.printed is not None]
    kinds = Counter(figure.kind for figure in printed)
    return {
        "printed": len(printed),
        **{kind: kinds[kind] for kind in ("fitted", "determined", "definition", "predicted")},
        "predicted_ranges": sum(f.kind == "predicted" and isinstance(f.printed, tuple) for f in printed),
        "not_printed": len(figures) - len(printed),
    }
