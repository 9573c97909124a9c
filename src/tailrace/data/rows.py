"""Rows: JSONL, parquet or a Hugging Face dataset folder, in an endless seeded order.

A row that has no usable prompt costs that index alone: it is read when it is asked for.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, Protocol, cast
from zlib import crc32

import msgspec

from tailrace.data.base import RowsSettings, Split
from tailrace.data.epochs import Epochs
from tailrace.data.tokenizer import Tokenizer
from tailrace.errors import BadRow, ConfigError
from tailrace.types import Prompt

HELD_OUT_ONE_IN = 16
"""The share of a table's different prompts that is only evaluated on, where no table is given for that."""


class Table(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        """
        Raises:
            BadRow: it cannot be read.
        """


class JsonLines:
    """A JSONL file in memory, each line decoded when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._lines = [line for line in path.read_bytes().splitlines() if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, place: int) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self._lines[place], type=dict[str, Any])
        except msgspec.DecodeError as why:
            raise BadRow("not a JSON object", str(why)) from why


class RowPrompts:
    """The endless prompts of the rows of a table, shuffled anew for every epoch."""

    def __init__(
        self, table: Table, places: list[int], settings: RowsSettings, tokenizer: Tokenizer, seed: int
    ) -> None:
        self._table = table
        self._places = places
        self._column = settings.prompt_column
        self._tokenizer = tokenizer
        self._epochs = Epochs(len(places), seed)

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index)
        row = self._table[self._places[row_number]]
        text, ids = tokenize(row.get(self._column), self._tokenizer)
        try:
            carried: dict[str, object] = msgspec.to_builtins(dict(row))
        except TypeError as why:
            raise BadRow("a column cannot be sent to another process", str(why)) from why
        return Prompt(index, ids, text, carried, row_number=row_number)


def tokenize(prompt: object, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """The text and the tokens of a prompt: a string as it stands, chat messages through the chat template.

    Raises:
        BadRow: it is neither, or empty.
    """
    if not _is_prompt(prompt):
        raise BadRow("no prompt", f"found {prompt!r:.80}")
    if isinstance(prompt, str):
        text, ids = prompt, tokenizer.encode(prompt)
    else:
        messages = cast(list[dict[str, object]], prompt)
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as why:
            # Templates are programs: they raise errors of their own on messages they do not know.
            raise BadRow("messages that the chat template refuses", str(why)) from why
        # The template has written the special tokens.
        ids = tokenizer.encode(text, add_special_tokens=False)
    return text, ids


def _is_prompt(prompt: object) -> bool:
    """A text, or chat messages; not empty."""
    if isinstance(prompt, str):
        return prompt != ""
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(each, dict) for each in prompt)


def open_rows(settings: RowsSettings, tokenizer: Tokenizer, *, seed: int, split: Split) -> RowPrompts:
    """The prompts of one split.

    Raises:
        ConfigError: there are no such rows, none of them has a prompt, or too few to hold any out.
    """
    if settings.eval_path is not None and split == "eval":
        key, path, part = "data.eval_path", settings.eval_path, settings.eval_split
    else:
        key, path, part = "data.path", settings.path, settings.split
    table = _open_table(key, path, part)
    digests = [_digest(table, place, settings.prompt_column) for place in range(len(table))]
    _check_prompts(key, path, table, digests, settings.prompt_column, tokenizer)
    if settings.eval_path is not None:
        return RowPrompts(table, list(range(len(table))), settings, tokenizer, seed)
    held_out = _held_out(digests)
    places = [place for place, digest in enumerate(digests) if (digest in held_out) == (split == "eval")]
    return RowPrompts(table, places, settings, tokenizer, seed)


def _held_out(digests: list[int | None]) -> set[int]:
    """One different prompt in sixteen, and at least one."""
    different = sorted({digest for digest in digests if digest is not None})
    return set(different[: ceil(len(different) / HELD_OUT_ONE_IN)])


def _digest(table: Table, place: int, column: str) -> int | None:
    """Equal for equal prompts; None where the row has none."""
    try:
        prompt = table[place].get(column)
    except BadRow:
        return None
    return crc32(msgspec.json.encode(prompt)) if _is_prompt(prompt) else None


def _check_prompts(
    key: str, path: Path, table: Table, digests: list[int | None], column: str, tokenizer: Tokenizer
) -> None:
    """What would spoil every row is an error now; what spoils one is counted when it is met."""
    first = next((place for place, digest in enumerate(digests) if digest is not None), None)
    if first is None:
        problem = f"none of the {len(table)} rows of {path} has this column"
        raise ConfigError("data.prompt_column", column, problem, "name the column that holds the prompt")
    if isinstance(table[first][column], list) and tokenizer.chat_template is None:
        problem = "the prompts are chat messages, and the model's tokenizer has no chat template"
        raise ConfigError("data.prompt_column", column, problem, "give prompts as strings, or add a template")
    if len({digest for digest in digests if digest is not None}) < 2:
        remedy = "give more rows, or held-out ones in data.eval_path"
        raise ConfigError(key, str(path), "it needs two different prompts, to hold one out", remedy)


def _open_table(key: str, path: Path, split: str) -> Table:
    if not path.exists():
        raise ConfigError(key, str(path), "there is no such file or folder", "name one that is there")
    if path.suffix == ".jsonl":
        return JsonLines(path)
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError as why:
        problem = "reading this needs the package datasets, which is not installed"
        raise ConfigError(key, str(path), problem, "pip install datasets, or give a .jsonl file") from why
    try:
        if path.suffix == ".parquet":
            table = datasets.load_dataset("parquet", data_files=str(path), split="train")
        elif (path / "dataset_dict.json").is_file():
            table = datasets.load_from_disk(str(path))[split]
        elif (path / "state.json").is_file():
            table = datasets.load_from_disk(str(path))
        else:
            table = datasets.load_dataset(str(path), split=split)
    except (ValueError, KeyError, OSError) as why:
        raise ConfigError(
            key, str(path), f"it is no dataset with the split {split!r} ({why})", "check both"
        ) from why
    found: Table = table
    return found
