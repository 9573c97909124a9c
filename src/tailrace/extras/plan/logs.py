"""Logs of other frameworks: figures by name for each step, and the lengths of dumped responses.

Read are JSONL, CSV as W&B exports it, the Trainer's trainer_state.json, TensorBoard's event files, W&B's
offline files and its runs by address, and what frameworks print.
"""

import ast
import csv
import json
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from sys import intern
from typing import Any

import httpx

from tailrace.errors import ConfigError
from tailrace.importing import TRAINING, install

STEP_NAMES = ("step", "rollout/step", "global_step", "training/global_step", "train/global_step", "_step")
"""Figures that number the step of a row, the first that it has."""
SUMMED = "profiling/"
"""Figures with this beginning come several times a step, and are summed. Of others the last one counts."""
_WANDB_HEADER, _WANDB_BLOCK, _WANDB_LAST = 7, 32_768, (1, 4)
"""Bytes of the header and of a block; kinds of a record's last part. The rest is LevelDB's log format."""
EXTRAS = install("tensorboard,wandb,datasets")
WANDB = "wandb:"
_KEY = "log in with `wandb login`, or set WANDB_API_KEY"
_EXPORTED = "export the run as CSV from its page"
_VERL_STEP = re.compile(r"\bstep:\d+ - ")
_NUMPY = re.compile(r"np\.\w+\((.*)\)")
_PRINTED_STEP = re.compile(r"(?:(?P<step>\d+): )?(?P<row>\{')")
LogRow = dict[str, float]


@dataclass
class LogFiles:
    """The rows of each file of a log, in their order."""

    files: Mapping[Path, Sequence[LogRow]]

    @cached_property
    def _names(self) -> set[str]:
        return {name for rows in self.files.values() for row in rows for name in row}

    def names(self, prefix: str) -> set[str]:
        """The names of all figures, without a prefix."""
        return {name.removeprefix(prefix) for name in self._names}

    def steps(self, last: str | None, prefix: str, once: Collection[str] = ()) -> list[LogRow]:
        """Join the rows of each step. A later file does not replace what an earlier one says. Raises a
        ConfigError if there are two runs: they begin with the same step.

        Args:
            last: the figure that ends a step: rows without it belong to the next one with it. None: each row
                has its step, or that of the next row that has one.
            prefix: left out of the names.
            once: names that a step of one run has once, or with the same value.
        """
        steps: dict[int, LogRow] = defaultdict(dict)
        again: dict[int, Path] = {}

        def differs(step: int, known: LogRow, row: LogRow, file: Path) -> None:
            if any(known.get(name, row[name]) != row[name] for name in row.keys() & once):
                again[step] = file

        for file, rows in self.files.items():
            found: dict[int, LogRow] = defaultdict(dict)
            waiting: LogRow = {}
            keys = [key for key in STEP_NAMES if any(key in row for row in rows)]
            keys = [key for key in keys if key != "_step"] or keys
            for row in rows:
                for key, value in row.items():
                    name = key.removeprefix(prefix)
                    waiting[name] = value + (waiting.get(name, 0.0) if name.startswith(SUMMED) else 0.0)
                key = next((key for key in keys if key in row), "")
                if key and (last is None or last in waiting):
                    differs(step := int(row[key]), found[step], waiting, file)
                    found[step] |= waiting
                    waiting = {}
            for step, row in found.items():
                differs(step, row, steps[step], file)
                steps[step] = row | steps[step]
        timed = [step for step, row in steps.items() if row.keys() & once]
        if timed and min(timed) in again:
            problem = f"it has two runs: a second one begins with step {min(timed)}"
            raise refused(again[min(timed)], problem, "name the log of one run")
        return [steps[number] for number in sorted(steps)]


def read_files(path: Path, is_read: Callable[[str], bool]) -> LogFiles:
    """Read a file, all files of a folder, or a run of W&B by its address, wandb:ENTITY/PROJECT/RUN. Raises a
    ConfigError that names a file which is damaged or needs a package that is not installed, or says that
    W&B does not show the run. `is_read`: the names of the figures that are kept."""
    if str(path).startswith(WANDB):
        with explained(path):
            return LogFiles({path: [_numbers(row, is_read) for row in _online(path)]})
    if not path.exists():
        raise refused(path, "there is no such file or folder", "name a run, or another framework's log")
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    found: dict[Path, list[LogRow]] = {}
    for file in files:
        reader = next((reader for end, reader in READERS.items() if end in file.name), None)
        reader = reader or (_printed if file == path else None)
        with explained(file):
            found[file] = [_numbers(row, is_read) for row in reader(file)] if reader else []
    return LogFiles(found)


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Turn the errors of reading a file inside the block into a ConfigError that names it."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as why:
        remedy = install("train") if why.name in TRAINING else EXTRAS
        raise refused(file, f"reading it needs the package {why.name}", remedy) from None
    except Exception as why:  # the readers' packages have errors of their own
        problem = f"it is damaged or of another version ({type(why).__name__}: {why})"
        raise refused(file, problem, "remove it, or name another one") from None


def refused(path: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError("RUN", str(path), problem, remedy)


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, without a last line that is cut off. Raises a ValueError that names the
    first bad line."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)  # with NaN and Infinity, which Python's loggers write
            except ValueError as why:
                if number > 1 and not line.endswith(b"\n"):  # it is being written, or was killed
                    return
                raise ValueError(f"line {number}: {why}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number}: it is no object")
            yield row


def _numbers(row: Mapping[str, object], is_read: Callable[[str], bool]) -> LogRow:
    """The figures of a row that are read and finite."""
    inner = row.get("data")  # verl: {"step": 1, "data": {...}}
    flat = {**row, **inner} if isinstance(inner, dict) else row
    numbers = (int, float)
    known = {k: v for k, v in flat.items() if isinstance(v, numbers) and not isinstance(v, bool)}
    return {
        intern(k): float(v) for k, v in known.items() if is_read(k) and isfinite(v)
    }  # one text for all rows


def _table(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a table, or of the data of a chart, where a column is called "RUN - NAME"."""
    with file.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        columns = {each: each.rpartition(" - ")[2] for each in rows.fieldnames or ()}
        runs = {each.rpartition(" - ")[0] for each in columns} - {""}
        if len(runs) > 1:
            raise refused(file, f"it has {len(runs)} runs", "export one run")
        columns = {each: "_step" if name == "Step" else name for each, name in columns.items()}
        for row in rows:
            yield {columns[each]: _number(cell) for each, cell in row.items() if each and cell}


def _number(cell: object) -> object:
    """The number that a text is, or the text."""
    try:
        return float(cell) if isinstance(cell, str) else cell
    except ValueError:
        return cell


def _printed(file: Path) -> Iterator[dict[str, Any]]:
    """Lines of verl's console, and dictionaries that TRL, slime, miles and OpenRLHF print."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            if at := _VERL_STEP.search(line):
                pairs = (each.partition(":") for each in line[at.start() :].split(" - "))
                yield {name: _number(_NUMPY.sub(r"\1", value.strip())) for name, _, value in pairs}
            elif at := _PRINTED_STEP.search(line):
                with suppress(ValueError, SyntaxError):  # a text of another kind, or one that is cut off
                    row = ast.literal_eval(line[at.start("row") : line.rindex("}") + 1])
                    step = {"_step": int(at["step"] or number)}
                    yield step | {name: _number(value) for name, value in row.items()}


def _online(address: Path) -> Iterator[dict[str, Any]]:
    """The history of a run on W&B. Raises a ConfigError if the address is none, W&B is not reached, it takes
    no key, or it does not show the run."""
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    name, host = str(address).removeprefix(WANDB), wandb.setup().settings.base_url
    if [bool(part) for part in name.split("/")] != [True] * 3:
        remedy = f"name {WANDB}ENTITY/PROJECT/RUN; RUN is the last part of the address of its page"
        raise refused(address, "it is no address of a run", remedy)
    try:
        yield from wandb.Api().run(name).scan_history()
    except UsageError:
        raise refused(address, f"there is no key for {host}", f"{_KEY}, or {_EXPORTED}") from None
    except Exception as why:  # some of the client's errors have no class of their own
        reason = str(why).splitlines()[0]
        if unreached := _unreached(host):
            problem, remedy = f"{host} is not reached: {unreached}", "check the network and WANDB_BASE_URL"
        elif isinstance(why, AuthenticationError):
            problem, remedy = f"{host} does not take the key", _KEY
        else:
            problem = f"{host} does not show this run, which is private or gone: {reason}"
            remedy = "check the address, log in as somebody who may see it"
        raise refused(address, problem, f"{remedy}, or {_EXPORTED}") from None


def _unreached(host: str) -> str:
    """Why a server cannot be reached; empty: it can."""
    try:
        httpx.head(host)
    except httpx.TransportError as why:
        return str(why)
    return ""


def _trainer_state(file: Path) -> Iterator[dict[str, Any]]:
    yield from json.loads(file.read_text(encoding="utf-8"))["log_history"]


def _events(file: Path) -> Iterator[dict[str, Any]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                yield {"_step": event.step, value.tag: make_ndarray(value.tensor).item()}


def _offline(file: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, held = file.read_bytes(), _WANDB_HEADER, b""
    while at + 7 <= len(data):
        if (left := _WANDB_BLOCK - at % _WANDB_BLOCK) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # the run was killed
            return
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in _WANDB_LAST:
            items = Record.FromString(held).history.item
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            held = b""


READERS = {
    "trainer_state.json": _trainer_state,
    ".jsonl": json_lines,
    ".csv": _table,
    "tfevents": _events,
    ".wandb": _offline,
}
"""The reader of a file by a part of its name."""
