"""Simulated data: seeded prompts and response lengths.

A response's length is the quantile of a standard normal number. Numbers that are correlated (`Lengths`) so
give correlated lengths of any distribution (a Gaussian copula; Nelsen, An Introduction to Copulas, 2006,
section 2.3).

Random numbers are a function of whole numbers, such as a seed and a row. SplitMix64 (Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) costs less than seeding a generator of the
standard library for each sample.
"""

import math
import re
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist

import msgspec

from tailrace.contracts.data import Epochs
from tailrace.errors import ConfigError
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, DEFAULT_MEDIAN_TOKENS, SimLengthSettings
from tailrace.types import Prompt, Sample

_MASK, _GAMMA = 2**64 - 1, 0x9E3779B97F4A7C15
_STANDARD = NormalDist()


class Chance:
    """A stream of random numbers, a function of whole numbers in their order."""

    def __init__(self, *numbers: int) -> None:
        state = 0
        for number in numbers:
            state = _mixed(state ^ (number & _MASK))
        self._state = state

    def bits(self) -> int:
        bits = _mixed(self._state)
        self._state = (self._state + _GAMMA) & _MASK
        return bits

    def uniform(self) -> float:
        """Above 0 and below 1."""
        return ((self.bits() >> 12) + 0.5) * 2.0**-52

    def normal(self) -> float:
        return _STANDARD.inv_cdf(self.uniform())

    def below(self, limit: int) -> int:
        """Draw a number from 0 to limit - 1."""
        return self.bits() * limit >> 64


def _mixed(number: int) -> int:
    """The output of SplitMix64 in this state."""
    number = (number + _GAMMA) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31


_ID = re.compile(r"(-?\d+)\.\d+/(\d+)")

Law = Callable[[float], float]
"""The length at a quantile, which is given as a standard normal number."""


class _RecordedLength(msgspec.Struct):
    """A line of a run's samples."""

    num_tokens: int
    step: int = 0
    id: str = ""


def law_of(settings: SimLengthSettings, recorded: Mapping[tuple[int, int], int] | None = None) -> Law:
    """Return the distribution of lengths, without the limit. Raises a ConfigError if the file of an empirical
    distribution cannot be read. `recorded`: lengths of `read_recorded`; None: they are read."""
    if (found := settings.distribution) is None:
        median, sigma = settings.median_tokens or DEFAULT_MEDIAN_TOKENS, settings.sigma
        return lambda z: median * math.exp(sigma * z)
    if found.kind == "uniform":
        low, width = found.min_tokens, found.max_tokens + 1 - found.min_tokens
        return lambda z: low + _STANDARD.cdf(z) * width
    if found.kind == "table":
        tokens, total = found.tokens, math.fsum(found.shares)
        below = [*accumulate(share / total for share in found.shares)][:-1]
        return lambda z: tokens[bisect(below, _STANDARD.cdf(z))]
    if found.kind == "empirical":
        return _law_of_lengths(read_lengths(found.path))
    return _law_of_lengths((recorded or read_recorded(found.path)).values())


def read_lengths(path: Path) -> list[int]:
    """Read lengths: a run's folder of samples, or a file with a sample or a whole number in each line. Raises
    a ConfigError if a line is torn, is no length, or has an earlier step than the line before."""
    return [line.num_tokens for line in _lines(path)]


def read_recorded(path: Path) -> dict[tuple[int, int], int]:
    """Read the lengths in a run's folder of samples, by prompt and number in the group. Raises a ConfigError
    as `read_lengths`, or if a line has no id of a sample."""
    recorded = {}
    for line in _lines(path):
        found = _ID.fullmatch(line.id)
        if not found:
            raise _refused(path, f"a line has the id {line.id!r}, and not one such as '12.0/3'")
        recorded[int(found[1]), int(found[2])] = line.num_tokens
    return recorded


def _lines(path: Path) -> list[_RecordedLength]:
    files = sorted(path.glob("round_*.jsonl")) if path.is_dir() else [path]
    try:
        lines = [line for file in files for line in _lines_in(file)]
    except OSError as why:
        raise _refused(path, f"it cannot be read ({why.strerror})") from None
    if not lines:
        raise _refused(path, "it has no lengths")
    return lines


def _lines_in(file: Path) -> Iterator[_RecordedLength]:
    decoder = msgspec.json.Decoder(int | _RecordedLength)
    last_step = 0
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), 1):
        where = f"line {number} of {file.name}"
        try:
            found = decoder.decode(line)
        except (ValueError, RecursionError) as why:
            raise _refused(file, f"{where} is torn or no length ({why})") from None
        sample = _RecordedLength(found, last_step) if isinstance(found, int) else found
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


PROMPT, SAMPLE = 1, 2
"""Keys of random streams; reward.py has the others."""
MANY_PROMPTS = 2**16
"""Prompts whose chance is remembered, because their samples come one after another."""


def row_of(prompt: Prompt) -> int:
    """Return the row of the data, which is the same in every epoch."""
    return prompt.index if prompt.row_number is None else prompt.row_number


class SimPrompts:
    """Prompts of one length without text."""

    def __init__(self, num_tokens: int, epochs: Epochs | None = None) -> None:
        self._ids = range(num_tokens)
        self._epochs = epochs

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index) if self._epochs else None
        return Prompt(index, self._ids, row_number=row_number)


class Lengths:
    """The length of each response, a function of its id and the seed.

    The part that a group shares, the prompt's difficulty, is a function of the row of the data. It is the
    same in every epoch and attempt, so a prompt that is deferred stays long.
    """

    def __init__(self, settings: SimLengthSettings, seed: int) -> None:
        found = settings.distribution
        self._recorded = read_recorded(found.path) if found and found.kind == "recorded" else {}
        self._seed, self._law = seed, law_of(settings, self._recorded)
        self._shared, self._own = math.sqrt(settings.correlation), math.sqrt(1 - settings.correlation)
        self._drift = math.log(settings.drift) / 100
        self._difficulty = lru_cache(MANY_PROMPTS)(self._difficulty_of)
        self._max_tokens = settings.max_tokens or DEFAULT_MAX_TOKENS

    def __call__(self, sample: Sample, version: int = 0) -> int:
        """Return the tokens that a sample will have. If it has none, it begins with this version."""
        prompt = sample.prompt
        if recorded := self._recorded.get((prompt.index, sample.id.number)):
            return min(self._max_tokens, recorded)
        shared = self._difficulty(row_of(prompt))
        own = Chance(SAMPLE, self._seed, prompt.index, sample.id.number).normal()
        tokens = self._law(self._shared * shared + self._own * own)
        if self._drift:
            begun = sample.spans[0].version if sample.spans else version
            tokens *= math.exp(self._drift * begun)
        return max(1, min(self._max_tokens, int(tokens)))

    def _difficulty_of(self, row: int) -> float:
        return Chance(PROMPT, self._seed, row).normal()

    @property
    def median_tokens(self) -> float:
        """The median of version 0, without the limit."""
        return self._law(0.0)
