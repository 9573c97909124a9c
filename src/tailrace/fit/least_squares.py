"""Least squares without negative coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

COLLINEAR = 0.999
"""Share of a column's variance that the other columns explain, from which on it is not fitted."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Coefficients by the name of their column.

    Args:
        coefficients: those that were fitted.
        collinear: columns that the others explain. The later one of such columns is left out.
        explained: share of the variance that the fit explains.
    """

    coefficients: dict[str, float]
    collinear: Sequence[str]
    explained: float

    def __getitem__(self, name: str) -> float:
        return self.coefficients.get(name, 0.0)


def non_negative(columns: dict[str, Array], target: Array, variances: Array | None = None) -> Solution:
    """Fit a target by columns. A column whose coefficient would be negative gets the coefficient 0.

    Args:
        columns: [observations] each, in the order of their importance.
        target: [observations].
        variances: relative variance of each observation; None: all are equal. In proportion to a column, the
            sum of the fitted values is that of the target.
    """
    weights = np.ones(len(target)) if variances is None else 1 / np.sqrt(variances)
    weighted = {name: column * weights for name, column in columns.items()}
    names: list[str] = []
    collinear: list[str] = []
    for name, column in columns.items():
        known = [columns[other] for other in names]
        if not np.any(column):
            continue
        if names and _explained(known, column) > COLLINEAR:
            collinear.append(name)
        else:
            names.append(name)
    found: Array = np.zeros(0)
    while names:
        found = _solved([weighted[name] for name in names], target * weights)
        if found.min() >= 0:
            break
        names.pop(int(found.argmin()))
    coefficients = dict.fromkeys(columns, 0.0) | dict(
        zip(names, found.tolist(), strict=True) if names else {}
    )
    for name in collinear:
        del coefficients[name]
    predicted = sum((columns[name] * value for name, value in coefficients.items()), np.zeros(len(target)))
    return Solution(coefficients, collinear, explained(predicted, target))


def explained(predicted: Array, target: Array) -> float:
    """Return the share of the target's variance that a prediction explains; 1 if there is none."""
    total = float(np.sum((target - target.mean()) ** 2))
    rest = float(np.sum((target - predicted) ** 2))
    return 1 - rest / total if total > 1e-18 * float(np.sum(target**2)) else 1.0


def _explained(known: Sequence[Array], column: Array) -> float:
    """The share of a column that others explain, about zero: a constant column is one, too."""
    predicted = np.column_stack(known) @ _solved(known, column)
    centred = float(np.sum((column - column.mean()) ** 2)) or float(np.sum(column**2))
    return 1 - float(np.sum((column - predicted) ** 2)) / centred if centred else 1.0


def _solved(columns: Sequence[Array], target: Array) -> Array:
    """Columns are scaled to one length first, so that the rank does not depend on units."""
    scale = np.array([float(np.linalg.norm(column)) or 1.0 for column in columns])
    solution = np.linalg.lstsq(np.column_stack(columns) / scale, target, rcond=None)[0]
    return np.asarray(solution / scale)
