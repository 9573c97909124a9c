"""Tables of rows: JSONL, parquet, and Hugging Face dataset folders with one split or several."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tailrace.data.base import RowsSettings, Split
from tailrace.errors import BadRow, ConfigError

EVAL_SPLITS = ("test", "validation")
"""Splits that are the evaluation set when none is named, in this order."""

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec's decoder: also of bytes that are not UTF-8, and of thousands of open brackets."""


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
        except NOT_JSON as why:
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
    train = _named("data.split", settings.split, settings.path, found)
    if settings.eval_path is not None:
        return train, False
    evaluation = _eval_split(settings, settings.path, found)
    shared = evaluation is None or evaluation is train
    return train if evaluation is None or split == "train" else evaluation, shared


def _open_eval_path(settings: RowsSettings, path: Path) -> Table:
    found = _read("data.eval_path", path)
    if not isinstance(found, Mapping):
        return found
    if len(found) == 1 and settings.eval_split is None:
        return next(iter(found.values()))
    if (table := _eval_split(settings, path, found)) is not None:
        return table
    problem = f"it has the splits {', '.join(found)}, and none of {' and '.join(EVAL_SPLITS)}"
    raise ConfigError("data.eval_path", str(path), problem, "name one of them in data.eval_split")


def _eval_split(settings: RowsSettings, path: Path, splits: Mapping[str, Table]) -> Table | None:
    """Return the evaluation split of a folder with several, or None when it has none."""
    if settings.eval_split is not None:
        return _named("data.eval_split", settings.eval_split, path, splits)
    return next((splits[name] for name in EVAL_SPLITS if name in splits), None)


def _named(key: str, name: str, path: Path, splits: Mapping[str, Table]) -> Table:
    if name not in splits:
        raise ConfigError(key, name, f"{path} has no such split", f"choose from {', '.join(splits)}")
    return splits[name]


def _read(key: str, path: Path) -> Table | Mapping[str, Table]:
    """Read one table, or the splits of a folder that has them."""
    if not path.exists():
        raise ConfigError(key, str(path), "there is no such file or folder", "name one that exists")
    try:
        if path.suffix == ".jsonl" and path.is_file():
            return JsonLines(path)
        import datasets

        found: Table | Mapping[str, Table]
        if path.suffix == ".parquet":
            found = datasets.load_dataset("parquet", data_files=str(path), split="train")
        elif any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path))
    except ImportError as why:
        problem = f"reading this needs the package datasets ({why})"
        remedy = "pip install 'tailrace[datasets]', or give a .jsonl file"
        raise ConfigError(key, str(path), problem, remedy) from why
    except Exception as why:
        # The library datasets raises errors of pyarrow, of the file system and its own.
        problem = f"it is neither a JSONL file, a parquet file nor a dataset folder ({why})"
        raise ConfigError(key, str(path), problem, "check the path and the files in it") from why
    return found
