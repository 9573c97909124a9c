"""The logs of other frameworks. peers.toml has what each calls our figures."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tailrace.errors import ConfigError
from tailrace.extras.plan.fit import Array
from tailrace.extras.plan.logs import STEP_NAMES, LogFiles, LogRow, explained, json_lines, read_files, refused

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


def _of_tinker(row: DumpRow) -> Iterator[Response]:
    yield row["group_idx"], sum(step["ac_len"] for step in row["steps"])


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
    "tinker-cookbook": _of_tinker,
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


@dataclass(frozen=True)
class Term:
    """A sum of figures of a framework over a product of others. A summand with "?" may be missing, one after
    a minus is subtracted."""

    text: str

    @property
    def names(self) -> list[str]:
        return [each.removesuffix("?") for each in re.split(" [-+/] ", self.text)]

    @cached_property
    def _parts(self) -> tuple[Mapping[str, int], set[str], Sequence[str]]:
        """The signs of the summands by their names, the names that a row must have, and the divisors."""
        dividend, *divisors = self.text.split(" / ")
        summands = dividend.replace(" - ", " + -").split(" + ")
        signs = {each.strip("-?"): -1 if each.startswith("-") else 1 for each in summands}
        optional = {each.strip("-?") for each in summands if each.endswith("?")}
        return signs, {*signs, *divisors} - optional, divisors

    def value(self, row: LogRow) -> float | None:
        """Return the value; None: the row lacks a name."""
        signs, needed, divisors = self._parts
        if not needed <= row.keys():
            return None
        divisor = prod(row[name] for name in divisors)
        total = sum(sign * row[name] for name, sign in signs.items() if name in row)
        return total / divisor if divisor else None


class PeerFormat:
    """A section of peers.toml."""

    def __init__(self, name: str, section: Mapping[str, Any]) -> None:
        others = ("source", "assumed", "dump", "ends", "prefix", "cumulative", "overlaps")
        self.name, self.assumed = name, section.get("assumed", [])
        self.dump, self.ends = section.get("dump"), section.get("ends")
        self.prefix, self.overlaps = section.get("prefix", ""), section.get("overlaps", [])
        self._cumulative = section.get("cumulative", [])
        given = {key: value for key, value in section.items() if key not in others}
        self.figures = {
            k: [Term(each) for each in ([v] if isinstance(v, str) else v)] for k, v in given.items()
        }

        self.names = {name for terms in self.figures.values() for term in terms for name in term.names}

    def has(self, name: str) -> bool:
        """Whether it is a name, with or without the prefix, that is read."""
        name = name.removeprefix(self.prefix)
        return name in self.names or any(fnmatch(name, each) for each in self.overlaps)

    def words(self, *figures: str) -> str:
        """Return its names of figures."""
        return " or ".join(term.text for figure in figures for term in self.figures.get(figure, []))

    def source(self, figure: str, names: set[str]) -> str:
        """Return the names from which a figure is taken in a log with these names; empty: it has none."""
        row = dict.fromkeys(names, 1.0)
        return next((term.text for term in self.figures[figure] if term.value(row) is not None), "")

    def steps(self, files: LogFiles) -> list[LogRow]:
        """Our figures of each step whose time is logged. Where the trainer waits while engines generate,
        generation_s is its wait; where no token is older than its step, its wait is the generation."""
        found, before = list[LogRow](), dict[str, float]()
        of_step = {name for term in self.figures["step_s"] for name in term.names}
        rows = files.steps(self.ends, self.prefix, of_step)
        names = {
            name for name in files.names(self.prefix) if any(fnmatch(name, each) for each in self.overlaps)
        }
        overlaps = any(row.get(name, 0.0) > 0 for row in rows for name in names)
        for row in rows:
            for name in row.keys() & self._cumulative:
                row[name], before[name] = row[name] - before.get(name, 0.0), row[name]
            ours = {name: [term.value(row) for term in terms] for name, terms in self.figures.items()}
            known = {name: next((v for v in values if v is not None), None) for name, values in ours.items()}
            figures = {name: value for name, value in known.items() if value is not None}
            if overlaps and "generation_s" in figures:
                figures["wait_s"] = figures.pop("generation_s")
            found += [figures] if "step_s" in figures else []
        if not overlaps and not any(row.get("lag_max", 1.0) for row in found):
            for row in found:
                if "wait_s" in row:
                    row.setdefault("generation_s", row["wait_s"])
        return found

    @property
    def needed(self) -> list[tuple[str, ...]]:
        """Figures without which a log cannot be fitted; of each tuple it must have one."""
        parts = [("update_s",), ("generation_s", "wait_s")] if "update_s" in self.figures else []
        return [("mean_tokens",), ("max_tokens",), *parts]


_TABLE = tomllib.loads(Path(__file__).with_name("peers.toml").read_text(encoding="utf-8"))
FORMATS = [PeerFormat(name, section) for name, section in _TABLE.items()]


@cache
def _is_read(name: str) -> bool:
    """Whether a figure of a log is of any framework, or numbers a step."""
    return name in STEP_NAMES or any(form.has(name) for form in FORMATS)


@dataclass(frozen=True)
class PeerLog:
    """Contents of a log.

    Args:
        steps: our figures of each step, without the first one, which compiles and warms up.
        groups: tokens of the dumped responses of each prompt.
        notes: where each figure is from, and what is assumed.
        framework: the section of peers.toml.
        in_turn: engines generate only while the trainer waits, on the same devices.
    """

    steps: Sequence[LogRow]
    groups: Sequence[Sequence[int]]
    notes: Sequence[str]
    framework: str = ""
    in_turn: bool = False

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
        side = "generation" if self.parts["waiting for samples"] > WAITS * step_s else "training"
        return f"{said}; {side} sets the pace{self.ages}"

    @property
    def ages(self) -> str:
        """Describe how old trained tokens are, how long engines are held back, and what was discarded."""
        words = {
            "lag_max": "; its tokens are up to {:.2g} steps old",
            "lag_mean": "; they are {:.2g} steps old on average",
            "held_s": "; its engines are held back for {:.3g} s of a step",
            "discarded": "; {:.3g} samples or groups a step were too old and are discarded",
        }
        return "".join(
            form.format(self.mean(name)) for name, form in words.items() if self.column(name).any()
        )


def check_counts(**counts: float | None) -> None:
    """Raise a ConfigError if a flag is given that is not above 0."""
    for name, count in counts.items():
        if count is not None and count <= 0:
            remedy = "give a number above 0, or leave it out"
            raise ConfigError(f"--{name.replace('_', '-')}", count, "it is not above 0", remedy)


def read_peer(path: Path, samples: int | None = None, **given: float | None) -> PeerLog:
    """Read the log of another framework. Raises a ConfigError if it is none, a file is damaged, or a figure
    is missing or impossible.

    Args:
        path: a file, a folder in which all files are read, or the address of a run of W&B.
        samples: of a step, where the log does not say.
        given: max_tokens and prompt_tokens, where neither the log nor a dump of responses says them.
    """
    check_counts(samples=samples, **given)
    files = read_files(path, _is_read)
    found = [each for each in FORMATS if each.source("step_s", files.names(each.prefix))]
    if len(found) != 1:
        none = "there is no run in it, and no log with the time of steps"
        problem = f"it has logs of {' and '.join(each.name for each in found)}" if found else none
        wanted = "; ".join(f"{each.name}: {each.figures['step_s'][0].names[0]}" for each in FORMATS)
        raise refused(path, problem, f"name one with figures of {wanted}")
    form = found[0]
    rows = form.steps(files)
    lengths = [row["mean_tokens"] for row in rows if "mean_tokens" in row]
    groups, per_step, dumped = _dumped(form, path, fmean(lengths[1:] or lengths or [1.0]))
    known = {name: float(value) for name, value in given.items() if value}
    if groups:
        known.setdefault("max_tokens", float(max(map(max, groups))))
    rows = [known | row for row in rows]
    steps = [row for row in rows if all(row.keys() & {*names} for names in form.needed)]
    if not steps:
        missing = (names for names in form.needed if not any(row.keys() & {*names} for row in rows))
        names = next(missing, sum(form.needed, ()))  # no step has all of them
        if words := form.words(*names):
            problem = f"the log of {form.name} has no {words}, which is {' or '.join(names)}"
            raise refused(path, problem, f"name one that has it, as {form.name} logs it")
        problem = f"{form.name} does not log {' or '.join(names)}, and there is no dump of responses"
        raise refused(path, problem, f"give it: --{names[0].replace('_', '-')} N")
    steps = steps[1:] or steps
    steps = [_completed(form, path, row, samples or per_step) for row in steps]
    logged, figures = files.names(form.prefix), steps[0].keys() & form.figures
    sources = {name: form.source(name, logged) for name in form.figures if name in figures}
    means = {name: fmean(row[name] for row in steps if name in row) for name in sources}
    notes = [f"{name} is {mean:.4g}, from {sources[name]}" for name, mean in means.items()]
    first = "the first step is left out" if len(rows) > 1 else "the only step is like others, although first"
    assumed = [first, "the longest response is as long as they may be"]
    if not (figures | known.keys()) & {"prompt_tokens", "sequence_tokens"}:
        assumed.append("a prompt has one token: lengths of prompts are not logged")
    assumed += [f"{name} is {value:g}" for name, value in known.items() if name not in sources]
    assumed += [*form.assumed, *dumped]
    return PeerLog(steps, groups, [*notes, *(f"assumed: {each}" for each in assumed)], form.name)


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
        raise refused(path, "it does not say how many samples a step has", "give them: --samples N")
    row = {"prompt_tokens": max(1.0, sequence / num - mean)} | row | {"samples": float(num)}
    if "update_s" not in form.figures and "generation_s" in row:
        spent = sum(row.get(name, 0.0) for name in ("generation_s", "reward_s", "sync_s"))
        row["update_s"] = row["step_s"] - spent
    parts = row.get("update_s", 0.0) + row.get("wait_s", row.get("generation_s", 0.0))
    if min(row.values()) < 0 or row["step_s"] <= 0 or parts > TOLERANCE * row["step_s"]:
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
