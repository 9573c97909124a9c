"""Distributions of response lengths: from a standard normal number to a length.

A length is the quantile of a standard normal number. Numbers that are correlated (world.py: Lengths) so give
correlated lengths of any distribution (a Gaussian copula; Nelsen, An Introduction to Copulas, 2006, section
2.3).
"""

import math
import re
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist

import msgspec

from tailrace.errors import ConfigError
from tailrace.sim.settings import (
    DEFAULT_MEDIAN_TOKENS,
    EmpiricalSettings,
    RecordedSettings,
    SimLengthSettings,
    TableSettings,
    UniformSettings,
)

_STANDARD = NormalDist()
_ID = re.compile(r"(-?\d+)\.\d+/(\d+)")

Law = Callable[[float], float]
"""The length at a quantile, which is given as a standard normal number."""


class _Line(msgspec.Struct):
    """What counts in a line of a run's samples."""

    num_tokens: int
    step: int = 0
    id: str = ""


def law_of(settings: SimLengthSettings, recorded: Mapping[tuple[int, int], int] | None = None) -> Law:
    """Return the distribution of lengths, without the limit.

    Args:
        recorded: what `read_recorded` returns for the distribution of this kind; None: the file is read.

    Raises:
        ConfigError: the file of an empirical distribution cannot be read.
    """
    match settings.distribution:
        case None:
            median, sigma = settings.median_tokens or DEFAULT_MEDIAN_TOKENS, settings.sigma
            return lambda z: median * math.exp(sigma * z)
        case UniformSettings(min_tokens=low, max_tokens=high):
            return lambda z: low + _STANDARD.cdf(z) * (high + 1 - low)
        case TableSettings(tokens=tokens, shares=shares):
            total = math.fsum(shares)
            below = [*accumulate(share / total for share in shares)][:-1]
            return lambda z: tokens[bisect(below, _STANDARD.cdf(z))]
        case EmpiricalSettings(path=path):
            return _law_of_lengths(read_lengths(path))
        case RecordedSettings(path=path):
            return _law_of_lengths((recorded or read_recorded(path)).values())


def read_lengths(path: Path) -> list[int]:
    """Read the lengths of responses.

    Args:
        path: a file with a whole number or a sample of a run in each line, or a run's folder of samples.

    Raises:
        ConfigError: a line is torn, is no length, or has an earlier step than the line before.
    """
    return [line.num_tokens for line in _lines(path)]


def read_recorded(path: Path) -> dict[tuple[int, int], int]:
    """Read the lengths of a run's samples by prompt and number in the group.

    Args:
        path: the run's folder of samples.

    Raises:
        ConfigError: as in `read_lengths`, or a line has no id of a sample.
    """
    recorded = {}
    for line in _lines(path):
        found = _ID.fullmatch(line.id)
        if not found:
            raise _refused(path, f"a line has the id {line.id!r}, and not one such as '12.0/3'")
        recorded[int(found[1]), int(found[2])] = line.num_tokens
    return recorded


def _lines(path: Path) -> list[_Line]:
    files = sorted(path.glob("round_*.jsonl")) if path.is_dir() else [path]
    try:
        lines = [line for file in files for line in _lines_in(file)]
    except OSError as why:
        raise _refused(path, f"it cannot be read ({why.strerror})") from None
    if not lines:
        raise _refused(path, "it has no lengths")
    return lines


def _lines_in(file: Path) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(int | _Line)
    last_step = 0
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), 1):
        where = f"line {number} of {file.name}"
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as why:
            raise _refused(file, f"{where} is torn or no length ({why})") from None
        sample = _Line(found, last_step) if isinstance(found, int) else found
        if sample.num_tokens < 1:
            raise _refused(file, f"{where} has the length {sample.num_tokens}")
        if sample.step < last_step:
            raise _refused(file, f"{where} has step {sample.step} after step {last_step}")
        last_step = sample.step
        yield sample


def _refused(path: Path, problem: str) -> ConfigError:
    remedy = "name a run's samples, or a file with one length in each line"
    return ConfigError("sim.lengths.distribution.path", str(path), problem, remedy)


def _law_of_lengths(lengths: Collection[int]) -> Law:
    ordered = sorted(lengths)
    return lambda z: ordered[min(int(_STANDARD.cdf(z) * len(ordered)), len(ordered) - 1)]
