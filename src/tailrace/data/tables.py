"""Tables of rows: JSONL, parquet, and Hugging Face dataset folders with one split or several."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tailrace.data.base import RowsSettings, Split
from tailrace.errors import BadRow, ConfigError

EVAL_SPLITS = ("test", "validation")
"""Splits that are the evaluation set when none is named, in this order."""


class Table(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        """
        Raises:
            BadRow: the row cannot be read.
        """


class JsonLines:
    """A JSONL file in memory. A line is decoded when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._lines = [line for line in path.read_bytes().splitlines() if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, place: int) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self._lines[place], type=dict[str, Any])
        except msgspec.DecodeError as why:
            raise BadRow("not a JSON object", str(why)) from why


def open_table(settings: RowsSettings, split: Split) -> tuple[Table, bool]:
    """Open the table that a split comes from.

    Returns:
        The table, and whether training and evaluation share it, so that prompts must be held out of it.

    Raises:
        ConfigError: there is no such file, folder or split, or it cannot be read.
    """
    if split == "eval" and settings.eval_path is not None:
        return _open_eval_path(settings, settings.eval_path), False
    found = _read("data.path", settings.path)
    if not isinstance(found, Mapping):
        return found, settings.eval_path is None
    if settings.split not in found:
        raise _no_split("data.split", settings.split, settings.path, found)
    if settings.eval_path is not None:
        return found[settings.split], False
    eval_split = _eval_split(settings, settings.path, found) or settings.split
    if eval_split == settings.split:
        return found[settings.split], True
    return found[eval_split if split == "eval" else settings.split], False


def _open_eval_path(settings: RowsSettings, path: Path) -> Table:
    found = _read("data.eval_path", path)
    if not isinstance(found, Mapping):
        return found
    name = next(iter(found)) if len(found) == 1 and settings.eval_split is None else None
    name = name or _eval_split(settings, path, found)
    if name is None:
        problem = f"it has the splits {', '.join(found)}, and none of {' and '.join(EVAL_SPLITS)}"
        raise ConfigError("data.eval_path", str(path), problem, "name one of them in data.eval_split")
    return found[name]


def _eval_split(settings: RowsSettings, path: Path, names: Mapping[str, Table]) -> str | None:
    """Return the evaluation split of a folder with several, or None when it has none."""
    if settings.eval_split is None:
        return next((name for name in EVAL_SPLITS if name in names), None)
    if settings.eval_split not in names:
        raise _no_split("data.eval_split", settings.eval_split, path, names)
    return settings.eval_split


def _no_split(key: str, name: str, path: Path, names: Mapping[str, Table]) -> ConfigError:
    return ConfigError(key, name, f"{path} has no such split", f"choose from {', '.join(names)}")


def _read(key: str, path: Path) -> Table | Mapping[str, Table]:
    """Read one table, or the splits of a folder that has them."""
    if not path.exists():
        raise ConfigError(key, str(path), "there is no such file or folder", "name one that exists")
    if path.suffix == ".jsonl" and path.is_file():
        try:
            return JsonLines(path)
        except OSError as why:
            raise ConfigError(key, str(path), f"it cannot be read ({why})", "check the file") from why
    try:
        import datasets
    except ImportError as why:
        problem = "reading this needs the package datasets, which is not installed"
        remedy = "pip install 'tailrace[datasets]', or give a .jsonl file"
        raise ConfigError(key, str(path), problem, remedy) from why
    try:
        found: Table | Mapping[str, Table]
        if path.suffix == ".parquet":
            found = datasets.load_dataset("parquet", data_files=str(path), split="train")
        elif any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path))
    except Exception as why:
        # The library raises errors of pyarrow, of the file system and its own.
        problem = f"it is neither a JSONL file, a parquet file nor a dataset folder ({why})"
        raise ConfigError(key, str(path), problem, "check the path and the files in it") from why
    return found
