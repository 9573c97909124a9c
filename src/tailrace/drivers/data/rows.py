"""Prompts from a table of rows, in an endless seeded order.

A row without a usable prompt costs its own index only: it is read when it is asked for.
The tables are JSONL, parquet, and Hugging Face data sets with one split or several, in folders or on the hub.

A mixture has several sources in one endless order: each thousand consecutive prompts have every source in
proportion to its weight, in an order that the seed shuffles anew. The place of a prompt within its source is
found without visiting the earlier prompts.
"""

from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import ceil
from pathlib import Path
from string import Formatter
from typing import Any, Protocol
from zlib import crc32

import msgspec

from tailrace.contracts.data import HELD_OUT_ONE_IN, Epochs, Prompts, Split
from tailrace.contracts.permutation import permutation
from tailrace.drivers.data.encoding import PromptEncoder, Tools, is_prompt
from tailrace.drivers.data.settings import RowsSettings, data_folder
from tailrace.errors import BadRow, ConfigError
from tailrace.importing import install
from tailrace.types import Prompt

EVAL_SPLITS = ("test", "validation")
"""Splits that are the evaluation set when none is named, in this order."""

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec's decoder: also of bytes that are not UTF-8, and of thousands of open brackets."""
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors of msgspec's encoder, for instance of images, and of integers of more than 64 bits."""


class Table(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        """Raises a BadRow if the row cannot be read."""


class JsonLines:
    """A JSONL file in memory. A line is decoded when it is asked for. Raises a ConfigError if the file is
    something else. `key`: of the config, which names it."""

    def __init__(self, path: Path, key: str) -> None:
        text = path.read_bytes().removeprefix(BOM_UTF8)
        self._lines = [line for line in text.splitlines() if line.strip()]
        problem = "" if self._lines else "it is empty"
        if b"\0" in text[:4]:
            problem = "its encoding is UTF-16 or UTF-32"
        with suppress(*NOT_JSON):  # several lines of JSON are no JSON
            whole = msgspec.json.decode(text)
            if not isinstance(whole, dict) or len(self._lines) > 1:
                problem = f"the whole file is one JSON {'array' if isinstance(whole, list) else 'value'}"
        if problem:
            raise ConfigError(key, str(path), problem, "write JSON lines: one object a line, in UTF-8")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, place: int) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self._lines[place], type=dict[str, Any])
        except NOT_JSON as why:
            raise BadRow("not a JSON object", str(why)) from why


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return rows as a JSONL file. Raises a ConfigError if one is no mapping, or has what JSON has not."""
    lines: list[bytes] = []
    for number, row in enumerate(rows):
        try:
            lines.append(msgspec.json.encode(dict(row)) + b"\n")
        except UNSENDABLE as why:
            remedy = "give dicts of texts, numbers, lists and dicts; of several splits, one"
            raise ConfigError("data", f"row {number}", f"it is no JSON object ({why})", remedy) from why
    if not lines:
        raise ConfigError("data", "no rows", "there is nothing to train on", "give rows")
    return b"".join(lines)


def open_table(settings: RowsSettings, split: Split) -> tuple[Table, bool]:
    """Open the table that a split comes from. Return it, and whether training and evaluation share it, so
    that prompts must be held out of it. Raises a ConfigError if there is no such file, folder or split, or it
    cannot be read."""
    if split == "eval" and settings.eval_path is not None:
        return _open_eval_path(settings, settings.eval_path), False
    found = _read(settings, "path", settings.path)
    if not isinstance(found, Mapping):
        return found, settings.eval_path is None
    train = _named("data.split", settings.split, settings.path, found)
    if settings.eval_path is not None:
        return train, False
    evaluation = _eval_split(settings, settings.path, found)
    shared = evaluation is None or evaluation is train
    return train if evaluation is None or split == "train" else evaluation, shared


def _open_eval_path(settings: RowsSettings, path: Path) -> Table:
    found = _read(settings, "eval_path", path)
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


def _read(settings: RowsSettings, of: str, path: Path) -> Table | Mapping[str, Table]:
    """Read the table that the key `of` of [data] names, or its splits."""
    key, named = f"data.{of}", f"data.{of.replace('path', 'config')}"
    config: str | None = getattr(settings, of.replace("path", "config"))
    folder = data_folder(key, path, getattr(settings, of.replace("path", "revision")))
    if not folder.exists():
        raise ConfigError(key, str(path), "there is no such file or folder", "name one that exists")
    if folder.suffix == ".jsonl" and folder.is_file():
        return JsonLines(folder, key)
    try:
        import datasets

        datasets.disable_progress_bars()  # the terminal belongs to the run
        found: Table | Mapping[str, Table]
        if folder.suffix == ".parquet":
            found = datasets.load_dataset("parquet", data_files=str(folder), split="train")
        elif any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(folder))
        else:
            configs = datasets.get_dataset_config_names(str(folder))
            config = config or datasets.get_dataset_default_config_name(str(folder))
            if config not in configs:
                problem = f"{path} has {'no such config' if config else 'several configs'}"
                raise ConfigError(named, config, problem, f"choose from {', '.join(configs)}")
            found = datasets.load_dataset(str(folder), config)
    except ConfigError:
        raise
    except ImportError as why:
        problem = f"reading this needs the package datasets ({why})"
        remedy = f"{install('datasets')}, or give a .jsonl file"
        raise ConfigError(key, str(path), problem, remedy) from why
    except Exception as why:
        # The library datasets raises errors of pyarrow, of the file system and its own.
        problem = f"it is neither a JSONL file, a parquet file nor a dataset folder ({why})"
        raise ConfigError(key, str(path), problem, "check the path and the files in it") from why
    return found


def filled(template: str, row: Mapping[str, object]) -> str:
    """Return a text in which {COLUMN} is the value of the column. Raises a BadRow without that column."""
    try:
        pieces = [
            text if name is None else f"{text}{row[name]}" for text, name, *_ in Formatter().parse(template)
        ]
    except KeyError as why:
        raise BadRow("no column of the prompt's template", f"{why}; columns: {', '.join(row)}") from why
    return "".join(pieces)


class RowPrompts:
    """The endless prompts of one split of a table, shuffled anew in each epoch."""

    def __init__(
        self, settings: RowsSettings, encoder: PromptEncoder, seed: int, split: Split, response: str = ""
    ) -> None:
        """Raises a ConfigError if the rows cannot be read, none of them has a prompt, or there are too few to
        hold any out. `response`: the column of given responses, if any. In a row without one the last message
        of the assistant is the response, and no part of the question that is held out."""
        self._table, shared = open_table(settings, split)
        self._response = response
        self._column, self._tools_column = settings.prompt_column, settings.tools_column
        self._template = settings.prompt_template
        self._encoder, self._columns = encoder, set[str]()
        own_path = split == "eval" and settings.eval_path is not None
        key, path = ("data.eval_path", settings.eval_path) if own_path else ("data.path", settings.path)
        digests = [self._digest(place) for place in range(len(self._table))]
        self._check_prompts(str(path), digests)
        places: Sequence[int] = range(len(digests))
        if shared:
            held_out = hold_out(key, str(path), digests)
            places = [place for place in places if (digests[place] in held_out) == (split == "eval")]
        self.places, self.epochs = places, Epochs(len(places), seed)
        """Places of the split's rows in the table, and their order."""

    def __getitem__(self, index: int) -> Prompt:
        row_number = self.epochs.row_at(index)
        row = self.row(self.places[row_number])
        given = row.get(self._column)
        text, ids = self._encoder.encode(given, tools_of(row.get(self._tools_column)))
        carried, source = _sendable(row), row.get("data_source")
        named, opened = source if isinstance(source, str) else "", self._encoder.opened(given, text)
        return Prompt(index, ids, text, carried, row_number, carried[self._column], named, opened)

    @property
    def num_rows(self) -> int:
        """Rows of the split."""
        return len(self.places)

    def row(self, place: int) -> dict[str, Any]:
        """Return the columns of a row. Messages and tools have no nulls that Arrow added. Raises a BadRow if
        it cannot be read."""
        try:
            row = dict(self._table[place])
        except BadRow:
            raise
        except Exception as why:  # decoders of images and sounds raise errors of their own
            raise BadRow("a row that cannot be read", str(why)) from why
        self._columns |= row.keys()
        if self._template is not None:
            row[self._column] = filled(self._template, row)
        added = set() if isinstance(self._table, JsonLines) else {self._column, self._tools_column}
        return {name: _without_nulls(value) if name in added else value for name, value in row.items()}

    def _digest(self, place: int) -> int | None:
        """Return a number that is equal for equal prompts, or None where the row has no prompt."""
        try:
            row = self.row(place)
            prompt = row.get(self._column)
            match prompt:
                case [*question, {"role": "assistant"}] if self._response and not row.get(self._response):
                    prompt = question
            return crc32(msgspec.json.encode(prompt)) if is_prompt(prompt) else None
        except (BadRow, *UNSENDABLE):
            return None

    def _check_prompts(self, path: str, digests: list[int | None]) -> None:
        """Check what would spoil every row. What spoils a single row is counted when the row is drawn."""
        first = next((place for place, digest in enumerate(digests) if digest is not None), None)
        problem, remedy, key, value = "", "", "data.prompt_column", self._column
        if first is None:
            what, remedy = "a prompt in this column", "name the column that holds the prompt"
            if self._template is not None:
                key, value = "data.prompt_template", self._template
                what, remedy = "every column of it", "name those of a row; {{ and }} are braces of the text"
            problem = f"none of the {len(digests)} rows of {path} has {what} (columns: "
            problem += f"{', '.join(sorted(self._columns)) or 'none'})"
        elif isinstance(self.row(first)[self._column], list) and not self._encoder.has_template:
            problem = "the prompts are chat messages, and the model's tokenizer has no chat template"
            remedy = "give prompts as strings, or add a template"
        if problem:
            raise ConfigError(key, value, problem, remedy)


def tools_of(column: object) -> Tools | None:
    """Return the tools of a row, which may be JSON text, as in tables whose tools differ in their parameters.
    Raises a BadRow if they are not a list of objects."""
    try:
        tools = msgspec.json.decode(column) if isinstance(column, str) and column else column
    except NOT_JSON as why:
        raise BadRow("tools that are not JSON", str(why)) from why
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools that are not a list of objects", f"found {tools!r:.80}")
    return tools


def _without_nulls(value: Any) -> Any:
    """Return a value of Arrow without the keys that are null: each object of a column has the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _sendable(row: Mapping[str, Any]) -> dict[str, object]:
    """Return the columns as plain values. Raises a BadRow that names one that cannot be serialised."""
    plain: dict[str, object] = {}
    for name, value in row.items():
        try:
            plain[name] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        except UNSENDABLE as why:
            raise BadRow(f"the column {name!r} cannot be sent to another process", str(why)) from why
    return plain


def hold_out(key: str, path: str, digests: list[int | None]) -> set[int]:
    """Return the digests of the different prompts that are held out: at least one."""
    different = sorted({digest for digest in digests if digest is not None})
    if len(different) < 2:
        remedy = "give more rows, or an evaluation set in data.eval_path"
        raise ConfigError(key, path, "it needs two different prompts, to hold one out", remedy)
    return set(different[: ceil(len(different) / HELD_OUT_ONE_IN)])


PAGE = 1000
"""Consecutive prompts in which the shares are exact, to one prompt."""


class MixedPrompts:
    """The endless prompts of several sources.

    Args:
        sources: the prompts of each source; each is read from its index 0 on.
        weights: their relative shares. Each source has at least one prompt a page.
    """

    def __init__(
        self, names: Sequence[str], sources: Sequence[Prompts], weights: Sequence[float], seed: int
    ) -> None:
        self._names, self._sources, self._seed = names, sources, seed
        self._shares = shares(weights)
        self._page = lru_cache(maxsize=2)(self._make_page)

    @property
    def num_rows(self) -> int | None:
        """Rows of all sources; None: one of them has no end."""
        numbers: list[int | None] = [getattr(source, "num_rows", None) for source in self._sources]
        return None if None in numbers else sum(number or 0 for number in numbers)

    def __getitem__(self, index: int) -> Prompt:
        page, place = divmod(index, PAGE)
        source, earlier = self._page(page)[place]
        prompt = self._sources[source][page * self._shares[source] + earlier]
        number = prompt.row_number
        if number is not None:  # different for rows of different sources
            number = number * len(self._sources) + source
        return replace(prompt, index=index, row_number=number, source=self._names[source])

    def _make_page(self, page: int) -> list[tuple[int, int]]:
        """Return the source of each place, and how many places before it in the page have that source."""
        ordered = [source for source, share in enumerate(self._shares) for _ in range(share)]
        found: list[tuple[int, int]] = []
        seen = [0] * len(self._shares)
        for place in permutation((self._seed, page), PAGE):
            source = ordered[place]
            found.append((source, seen[source]))
            seen[source] += 1
        return found


def shares(weights: Sequence[float]) -> list[int]:
    """Return how many prompts of a page each source has, by largest remainders; at least one each."""
    total = sum(map(Fraction, weights))
    exact = [max(Fraction(weight) / total * PAGE, Fraction(1)) for weight in weights]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, PAGE - sum(counts))]:
        counts[i] += 1
    counts[counts.index(max(counts))] -= sum(counts) - PAGE  # what rare sources got beyond their share
    return counts
