"""Logs of other frameworks: figures by name for each step, and the lengths of dumped responses.

Read are JSONL, the Trainer's trainer_state.json, TensorBoard's event files and W&B's offline files.
"""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tailrace.errors import ConfigError
from tailrace.importing import install

STEP_NAMES = ("step", "rollout/step", "global_step", "training/global_step", "train/global_step", "_step")
"""Figures that number the step of a row, the first that it has."""
SUMMED = "profiling/"
"""Figures with this beginning come several times a step, and are summed. Of others the last one counts."""
_WANDB_HEADER, _WANDB_BLOCK, _WANDB_LAST = 7, 32_768, (1, 4)
"""Bytes of the header and of a block; kinds of a record's last part. The rest is LevelDB's log format."""
EXTRAS = install("tensorboard,wandb,datasets")
LogRow = dict[str, float]


@dataclass(slots=True)
class LogFiles:
    """The rows of each file of a log, in their order."""

    files: dict[Path, list[LogRow]] = field(default_factory=dict)

    def names(self, prefix: str) -> set[str]:
        return {name.removeprefix(prefix) for rows in self.files.values() for row in rows for name in row}

    def steps(self, last: str | None, prefix: str) -> list[LogRow]:
        """Join the rows of each step. A later file does not replace what an earlier one says.

        Args:
            last: the figure that ends a step: rows without it belong to the next one with it. None: each row
                has its step, or that of the next row that has one.
            prefix: left out of the names.
        """
        steps: dict[int, LogRow] = defaultdict(dict)
        for rows in self.files.values():
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
                    found[int(row[key])] |= waiting
                    waiting = {}
            for step, row in found.items():
                steps[step] = row | steps[step]
        return [steps[number] for number in sorted(steps)]


def read_files(path: Path) -> LogFiles:
    """Read a file, or all files of a folder. Raises a ConfigError that names a file which is damaged or needs
    a package that is not installed."""
    if not path.exists():
        raise refused(path, "there is no such file or folder", "name a run, or another framework's log")
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    log = LogFiles()
    for file in files:
        reader = next((reader for end, reader in READERS.items() if end in file.name), None)
        with explained(file):
            log.files[file] = [_numbers(row) for row in reader(file)] if reader else []
    return log


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Turn the errors of reading a file inside the block into a ConfigError that names it."""
    try:
        yield
    except ImportError as why:
        raise refused(file, f"reading it needs the package {why.name}", EXTRAS) from None
    except Exception as why:  # the readers' packages have errors of their own
        problem = f"it is damaged or of another version ({type(why).__name__}: {why})"
        raise refused(file, problem, "remove it, or name another one") from None


def refused(path: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError("RUN", str(path), problem, remedy)


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. Raises a ValueError that names the first bad line."""
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as why:
            raise ValueError(f"line {number}: {why}") from None


def _numbers(row: Mapping[str, object]) -> LogRow:
    inner = row.get("data")  # verl: {"step": 1, "data": {...}}
    flat = {**row, **inner} if isinstance(inner, dict) else row
    numbers = (int, float)
    return {k: float(v) for k, v in flat.items() if isinstance(v, numbers) and not isinstance(v, bool)}


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
    "tfevents": _events,
    ".wandb": _offline,
}
"""The reader of a file by a part of its name."""
