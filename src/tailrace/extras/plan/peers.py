"""The logs of other frameworks. peers.toml has what each calls our figures."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tailrace.extras.plan.fit import Array
from tailrace.extras.plan.logs import LogFiles, LogRow, explained, json_lines, read_files, refused

TOLERANCE = 1.05
"""The parts of a step take at most so many times as long as the step."""
OVERLAPPED = 0.9
"""A trainer that waits for a smaller share of the generation trains while engines generate."""
SHOWN, WAITS = 0.005, 0.05
"""Shares of a step, from which on a part is named, and from which on waiting says that generation sets the
pace."""
Response = tuple[object, int | str]
"""The prompt that a group shares, and the tokens of a response, or its text."""
DumpRow = Mapping[str, Any]


def _of_trl(row: DumpRow) -> Iterator[Response]:
    parts = row["completion"]
    texts = [parts] if isinstance(parts, str) else [str(each["content"]) for each in parts]
    yield str(row["prompt"]), "".join(texts)


def _of_nemo(row: DumpRow) -> Iterator[Response]:
    ids, mask = (np.ravel(row[name]) for name in ("token_ids", "token_loss_mask"))
    yield tuple(ids[: int(np.argmax(mask))]), int(mask.sum())


def _of_prime_rl(row: DumpRow) -> Iterator[Response]:
    for trace in row["traces"]:
        usages = (call["usage"]["completion_tokens"] for call in trace["calls"] if "usage" in call)
        yield (row.get("group") or {}).get("id"), sum(usages)


RESPONSES: Mapping[str, Callable[[DumpRow], Iterator[Response]]] = {
    "TRL": _of_trl,
    "verl": lambda row: iter([(row["input"], row["output"])]),
    "prime-rl": _of_prime_rl,
    "slime": lambda row: iter([(row["group_index"], row["response_length"])]),
    "NeMo-RL": _of_nemo,
}
"""The responses of a row of a dump."""


def _dump_rows(file: Path) -> Iterator[DumpRow]:
    if file.suffix == ".parquet":
        from pyarrow import parquet

        yield from parquet.read_table(file).to_pylist()
    elif file.suffix == ".pt":
        import torch

        yield from torch.load(file, weights_only=True)["samples"]
    else:
        yield from json_lines(file)


@dataclass(frozen=True, slots=True)
class Term:
    """A sum of figures of a framework over a product of others. A summand with "?" may be missing."""

    text: str

    def value(self, row: LogRow) -> float | None:
        """Return the value; None: the row lacks a name."""
        dividend, *divisors = self.text.split(" / ")
        names = dividend.split(" + ")
        summands = [name for each in names if (name := each.removesuffix("?")) == each or name in row]
        if not all(name in row for name in (*summands, *divisors)):
            return None
        divisor = float(np.prod([row[name] for name in divisors]))
        return sum(row[name] for name in summands) / divisor if divisor else None


class PeerFormat:
    """A section of peers.toml."""

    def __init__(self, name: str, section: Mapping[str, Any]) -> None:
        others = ("assumed", "dump", "ends", "prefix", "cumulative", "overlaps")
        self.name, self.assumed = name, section.get("assumed", [])
        self.dump, self.ends = section.get("dump"), section.get("ends")
        self.prefix, self.overlaps = section.get("prefix", ""), section.get("overlaps", "")
        self._cumulative = section.get("cumulative", [])
        given = {key: value for key, value in section.items() if key not in others}
        self.figures = {
            k: [Term(each) for each in ([v] if isinstance(v, str) else v)] for k, v in given.items()
        }

    def words(self, *figures: str) -> str:
        """Return its names of figures."""
        return " or ".join(term.text for figure in figures for term in self.figures.get(figure, []))

    def source(self, figure: str, names: set[str]) -> str:
        """Return the names from which a figure is taken in a log with these names; empty: it has none."""
        row = dict.fromkeys(names, 1.0)
        return next((term.text for term in self.figures[figure] if term.value(row) is not None), "")

    def steps(self, files: LogFiles) -> list[LogRow]:
        """Our figures of each step whose time is logged."""
        found, before = list[LogRow](), dict[str, float]()
        for row in files.steps(self.ends, self.prefix):
            for name in row.keys() & self._cumulative:
                row[name], before[name] = row[name] - before.get(name, 0.0), row[name]
            ours = {name: [term.value(row) for term in terms] for name, terms in self.figures.items()}
            known = {name: next((v for v in values if v is not None), None) for name, values in ours.items()}
            figures = {name: value for name, value in known.items() if value is not None}
            if self.overlaps in row and "generation_s" in figures:
                figures["wait_s"] = figures.pop("generation_s")
            found += [figures] if "step_s" in figures else []
        return found

    @property
    def needed(self) -> list[tuple[str, ...]]:
        """Figures without which a log cannot be fitted; of each tuple it must have one."""
        parts = [("update_s",), ("generation_s", "wait_s")] if "update_s" in self.figures else []
        return [("mean_tokens",), ("max_tokens",), *parts]


_TABLE = tomllib.loads(Path(__file__).with_name("peers.toml").read_text(encoding="utf-8"))
FORMATS = [PeerFormat(name, section) for name, section in _TABLE.items()]


@dataclass(frozen=True)
class PeerLog:
    """Contents of a log.

    Args:
        steps: our figures of each step, without the first one, which compiles and warms up.
        groups: tokens of the dumped responses of each prompt.
        notes: where each figure is from, and what is assumed.
    """

    steps: Sequence[LogRow]
    groups: Sequence[Sequence[int]]
    notes: Sequence[str]

    def has(self, name: str) -> bool:
        return all(name in row for row in self.steps)

    def column(self, name: str) -> Array:
        """A figure of all steps; 0 where a step lacks it."""
        return np.array([row.get(name, 0.0) for row in self.steps])

    def mean(self, name: str) -> float:
        return float(self.column(name).mean())

    @cached_property
    def overlaps(self) -> bool:
        """Whether the engines generate while it trains, or the log does not say that they do not."""
        generation_s = self.mean("generation_s") if self.has("generation_s") else np.inf
        return self.has("wait_s") and self.mean("wait_s") < OVERLAPPED * generation_s

    @cached_property
    def parts(self) -> dict[str, float]:
        """Mean seconds of the parts of a step, one after the other."""
        named = {"waiting for samples": "wait_s"} if self.overlaps else {"generation": "generation_s"}
        named |= {"training": "update_s", "rewards": "reward_s", "new weights": "sync_s"}
        parts = {words: self.mean(name) for words, name in named.items()}
        rest = "other work" if self.has("update_s") else "generation and training"
        return parts | {rest: max(0.0, self.mean("step_s") - sum(parts.values()))}

    @property
    def other_s(self) -> float:
        """Mean seconds of a step that are in no part."""
        return self.parts.get("other work", 0.0)

    @property
    def waits(self) -> str:
        """Describe the parts of a step, and the longest wait."""
        step_s, tail = self.mean("step_s"), self.mean("max_tokens") / self.mean("mean_tokens")
        shares = {words: part / step_s for words, part in self.parts.items() if part > SHOWN * step_s}
        said = ", ".join(f"{words} {share:.0%}" for words, share in shares.items())
        said = f"a step takes {step_s:.3g} s: {said}; the longest response has {tail:.1f}x the mean"
        if not self.overlaps:
            return f"{said}; it waits most for {max(self.parts, key=lambda words: self.parts[words])}"
        lag = f"; its tokens are up to {self.mean('lag'):.2g} steps old" if self.has("lag") else ""
        side = "generation" if self.parts["waiting for samples"] > WAITS * step_s else "training"
        return f"{said}; {side} sets the pace{lag}"


def read_peer(path: Path, samples: int | None = None) -> PeerLog:
    """Read the log of another framework. Raises a ConfigError if it is none, a file is damaged, or a figure
    is missing or impossible.

    Args:
        path: a file, or a folder in which all files are read.
        samples: of a step, where the log does not say.
    """
    files = read_files(path)
    found = [each for each in FORMATS if each.source("step_s", files.names(each.prefix))]
    if len(found) != 1:
        none = "there is no run in it, and no log with the time of steps"
        problem = f"it has logs of {' and '.join(each.name for each in found)}" if found else none
        wanted = "; ".join(f"{each.name}: {each.words('step_s')}" for each in FORMATS)
        raise refused(path, problem, f"name one with figures of {wanted}")
    form = found[0]
    rows = form.steps(files)
    steps = [row for row in rows if all(row.keys() & {*names} for names in form.needed)]
    if not steps:
        missing = (names for names in form.needed if not any(row.keys() & {*names} for row in rows))
        names = next(missing, sum(form.needed, ()))  # no step has all of them
        problem = f"the log of {form.name} has no {form.words(*names)}, which is {' or '.join(names)}"
        raise refused(path, problem, f"name one that has it, as {form.name} logs it")
    steps = steps[1:] or steps
    groups, per_step, dumped = _dumped(form, path, fmean(row["mean_tokens"] for row in steps))
    steps = [_completed(form, path, row, samples or per_step) for row in steps]
    logged, figures = files.names(form.prefix), steps[0].keys() & form.figures
    sources = {name: form.source(name, logged) for name in form.figures if name in figures}
    means = {name: fmean(row[name] for row in steps if name in row) for name in sources}
    notes = [f"{name} is {mean:.4g}, from {sources[name]}" for name, mean in means.items()]
    assumed = ["the first step is left out", "the longest response is as long as they may be"]
    if not figures & {"prompt_tokens", "sequence_tokens"}:
        assumed.append("a prompt has one token: lengths of prompts are not logged")
    assumed += [*form.assumed, *dumped]
    return PeerLog(steps, groups, [*notes, *(f"assumed: {each}" for each in assumed)])


def _completed(form: PeerFormat, path: Path, row: LogRow, samples: float | None) -> LogRow:
    """Add samples, tokens of a prompt and seconds of the training where they follow from the other figures.
    Raises a ConfigError if they do not, or figures contradict each other."""
    mean, sequence = row["mean_tokens"], row.get("sequence_tokens", 0.0)
    remedy = f"name the log of one run, in the units of {form.name}"
    if not 0 < mean <= row["max_tokens"]:
        problem = f"{form.words('mean_tokens')} is {mean:.4g}, and {form.words('max_tokens')}"
        raise refused(path, f"{problem} is {row['max_tokens']:.4g}", remedy)
    if sequence and "prompt_tokens" in row:
        samples = sequence / (row["prompt_tokens"] + mean)
    if not (num := round(row.get("samples") or samples or 0)):
        raise refused(path, "it does not say how many samples a step has", "tailrace fit RUN --samples N")
    row = {"prompt_tokens": max(1.0, sequence / num - mean)} | row | {"samples": float(num)}
    if "update_s" not in form.figures and "generation_s" in row:
        spent = sum(row.get(name, 0.0) for name in ("generation_s", "reward_s", "sync_s"))
        row["update_s"] = row["step_s"] - spent
    parts = row.get("update_s", 0.0) + row.get("wait_s", row.get("generation_s", 0.0))
    if min(row.values()) < 0 or parts > TOLERANCE * row["step_s"]:
        problem = f"generation and training take {parts:.4g} s, and a step ({form.words('step_s')}) takes"
        raise refused(path, f"{problem} {row['step_s']:.4g} s: units or runs are mixed", remedy)
    return row


def _dumped(form: PeerFormat, path: Path, mean: float) -> tuple[list[list[int]], float | None, list[str]]:
    """Return the tokens of dumped responses by group, the responses of a file, and the assumptions."""
    groups: dict[object, list[int | str]] = defaultdict(list)
    ends = re.compile(f"(^|/){form.dump}$")
    files = [file for file in sorted(path.rglob("*")) if form.dump and ends.search(file.as_posix())]
    for file in files:
        with explained(file):
            for row in _dump_rows(file):
                for prompt, response in RESPONSES[form.name](row):
                    groups[file, prompt].append(response)
    given = [each for group in groups.values() for each in group]
    if not given:
        return [], None, ["lengths are lognormal, and as alike in their group as by default"]
    words = [f"lengths are those of {len(given)} responses in {len(files)} files"]
    per_token = fmean(len(each) if isinstance(each, str) else 0 for each in given) / mean
    if per_token:
        words.append(f"a token has {per_token:.3g} characters, as in the mean: the files have text only")

    def tokens(response: int | str) -> int:
        return response if isinstance(response, int) else max(1, round(len(response) / per_token))

    return [[*map(tokens, group)] for group in groups.values()], len(given) / len(files), words
