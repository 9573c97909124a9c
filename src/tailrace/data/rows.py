"""Prompts from a table of rows, in an endless seeded order.

A row without a usable prompt costs its own index only: it is read when it is asked for.
"""

from collections.abc import Sequence
from math import ceil
from zlib import crc32

import msgspec

from tailrace.data.base import HELD_OUT_ONE_IN, RowsSettings, Split
from tailrace.data.encoding import PromptEncoder, Tools, is_prompt
from tailrace.data.epochs import Epochs
from tailrace.data.tables import NOT_JSON, Table, open_table
from tailrace.errors import BadRow, ConfigError
from tailrace.types import Prompt


class RowPrompts:
    """The endless prompts of one split of a table, shuffled anew in each epoch."""

    def __init__(self, settings: RowsSettings, encoder: PromptEncoder, seed: int, split: Split) -> None:
        """
        Raises:
            ConfigError: the rows cannot be read, none of them has a prompt that fits, or there are too few
                to hold any out.
        """
        self._table, shared = open_table(settings, split)
        self._column, self._tools_column = settings.prompt_column, settings.tools_column
        self._encoder = encoder
        own_path = split == "eval" and settings.eval_path is not None
        key, path = ("data.eval_path", settings.eval_path) if own_path else ("data.path", settings.path)
        digests = [_digest(self._table, place, self._column) for place in range(len(self._table))]
        self._check_prompts(str(path), digests)
        places: Sequence[int] = range(len(digests))
        if shared:
            held_out = hold_out(key, str(path), digests)
            places = [place for place in places if (digests[place] in held_out) == (split == "eval")]
        self._places, self._epochs = places, Epochs(len(places), seed)
        usable = (self._table[place][self._column] for place in places if digests[place] is not None)
        encoder.check_that_one_fits(key, str(path), usable)

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index)
        row = self._table[self._places[row_number]]
        text, ids = self._encoder.encode(row.get(self._column), _tools(row.get(self._tools_column)))
        try:
            carried: dict[str, object] = msgspec.to_builtins(dict(row))
        except (TypeError, RecursionError) as why:
            raise BadRow("a column cannot be sent to another process", str(why)) from why
        source = row.get("data_source")
        named = source if isinstance(source, str) else ""
        return Prompt(index, ids, text, carried, row_number, carried[self._column], named)

    def _check_prompts(self, path: str, digests: list[int | None]) -> None:
        """Check what would spoil every row. What spoils a single row is counted when the row is drawn."""
        first = next((place for place, digest in enumerate(digests) if digest is not None), None)
        problem, remedy = "", ""
        if first is None:
            problem = f"none of the {len(digests)} rows of {path} has a prompt in this column"
            remedy = "name the column that holds the prompt"
        elif isinstance(self._table[first][self._column], list) and not self._encoder.has_template:
            problem = "the prompts are chat messages, and the model's tokenizer has no chat template"
            remedy = "give prompts as strings, or add a template"
        if problem:
            raise ConfigError("data.prompt_column", self._column, problem, remedy)


def _tools(column: object) -> Tools | None:
    """Return the tools of a row, which may be JSON text, as in tables whose tools differ in their parameters.

    Raises:
        BadRow: they are not a list of objects.
    """
    try:
        tools = msgspec.json.decode(column) if isinstance(column, str) and column else column
    except NOT_JSON as why:
        raise BadRow("tools that are not JSON", str(why)) from why
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools that are not a list of objects", f"found {tools!r:.80}")
    return tools


def _digest(table: Table, place: int, column: str) -> int | None:
    """Return a number that is equal for equal prompts, or None where the row has no prompt."""
    try:
        prompt = table[place].get(column)
        return crc32(msgspec.json.encode(prompt)) if is_prompt(prompt) else None
    except (BadRow, RecursionError):
        return None


def hold_out(key: str, path: str, digests: list[int | None]) -> set[int]:
    """Return the digests of the different prompts that are held out: at least one."""
    different = sorted({digest for digest in digests if digest is not None})
    if len(different) < 2:
        remedy = "give more rows, or an evaluation set in data.eval_path"
        raise ConfigError(key, path, "it needs two different prompts, to hold one out", remedy)
    return set(different[: ceil(len(different) / HELD_OUT_ONE_IN)])
