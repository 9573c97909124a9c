"""What a paper printed, and what our simulation of its set-up gives.

A paper is one file of this folder: its set-up, the functions that compute its tables, and where the paper
contradicts itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["fitted", "predicted", "derived"]
"""Fitted: a parameter of the set-up was chosen so that this figure is met. Predicted: it follows from the
set-up. Derived: it follows from formulas of the paper, without a simulation."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One printed number, and ours.

    Args:
        row: what the number belongs to: "R = 32", "Qwen2.5-14B".
        what: the quantity: "main time, reduction".
        unit: "%", "s", "x" or "" for a plain number.
        printed: as the paper prints it, or the range that it prints; None: the paper does not give it.
        ours: of the simulation.
        tolerance: how far ours may lie from the printed number or range, in the unit; None: no bar.
    """

    row: str
    what: str
    unit: str
    printed: float | tuple[float, float] | None
    ours: float
    kind: Kind
    tolerance: float | None = None

    @property
    def distance(self) -> float | None:
        """How far ours lies outside the printed number or range, in the unit."""
        if self.printed is None:
            return None
        low, high = self.printed if isinstance(self.printed, tuple) else (self.printed, self.printed)
        return max(low - self.ours, self.ours - high, 0.0)

    @property
    def holds(self) -> bool | None:
        """Whether ours is within the tolerance; None where there is no bar."""
        if self.distance is None or self.tolerance is None:
            return None
        return self.distance <= self.tolerance


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


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper whose set-up can be simulated.

    Args:
        name: for the command line.
        citation: authors, year, title.
        set_up: devices, model, workload and how the costs were chosen, one sentence each.
        tables: functions that simulate one table, by the paper's number of it.
        num_fitted: parameters of the set-up that were fitted to printed figures.
        contradictions: where the paper contradicts itself, one sentence each.
    """

    name: str
    citation: str
    set_up: tuple[str, ...]
    tables: Mapping[str, Callable[[], Table]]
    num_fitted: int
    contradictions: tuple[str, ...] = ()
