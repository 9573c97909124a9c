"""Prompts from a table of rows, in an endless seeded order.

A row without a usable prompt costs its own index only: it is read when it is asked for.
"""

from math import ceil
from pathlib import Path
from zlib import crc32

import msgspec

from tailrace.data.base import RowsSettings, Split
from tailrace.data.encoding import PromptEncoder, is_prompt
from tailrace.data.epochs import Epochs
from tailrace.data.tables import Table, open_table
from tailrace.data.tokenizer import Tokenizer
from tailrace.errors import BadRow, ConfigError
from tailrace.types import Prompt

HELD_OUT_ONE_IN = 16
"""Share of a table's different prompts that is held out for evaluation when there is no evaluation set."""


class RowPrompts:
    """The endless prompts of some rows of a table, shuffled anew in each epoch."""

    def __init__(
        self, table: Table, places: list[int], column: str, encoder: PromptEncoder, seed: int
    ) -> None:
        """
        Args:
            places: numbers of the rows of `table` that belong to the split.
            column: column of the prompt.
        """
        self._table, self._places, self._column, self._encoder = table, places, column, encoder
        self._epochs = Epochs(len(places), seed)

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index)
        row = self._table[self._places[row_number]]
        text, ids = self._encoder.encode(row.get(self._column))
        try:
            carried: dict[str, object] = msgspec.to_builtins(dict(row))
        except TypeError as why:
            raise BadRow("a column cannot be sent to another process", str(why)) from why
        return Prompt(index, ids, text, carried, row_number=row_number)


def open_rows(
    settings: RowsSettings,
    tokenizer: Tokenizer,
    *,
    seed: int,
    split: Split,
    max_context_tokens: int | None = None,
) -> RowPrompts:
    """Open the prompts of one split.

    Args:
        max_context_tokens: positions of the model; None: unlimited.

    Raises:
        ConfigError: the rows cannot be read, none of them has a prompt that fits, or there are too few to
            hold any out.
    """
    encoder = PromptEncoder(settings, tokenizer, max_context_tokens)
    table, shared = open_table(settings, split)
    own_path = split == "eval" and settings.eval_path is not None
    key, path = ("data.eval_path", settings.eval_path) if own_path else ("data.path", settings.path)
    assert path is not None
    column = settings.prompt_column
    digests = [_digest(table, place, column) for place in range(len(table))]
    _check_prompts(path, table, digests, column, tokenizer)
    places = list(range(len(table)))
    if shared:
        held_out = _held_out(key, path, digests)
        places = [place for place in places if (digests[place] in held_out) == (split == "eval")]
    usable = (table[place][column] for place in places if digests[place] is not None)
    encoder.check_that_one_fits(key, str(path), usable)
    return RowPrompts(table, places, column, encoder, seed)


def _digest(table: Table, place: int, column: str) -> int | None:
    """Return a number that is equal for equal prompts, or None where the row has no prompt."""
    try:
        prompt = table[place].get(column)
    except BadRow:
        return None
    return crc32(msgspec.json.encode(prompt)) if is_prompt(prompt) else None


def _held_out(key: str, path: Path, digests: list[int | None]) -> set[int]:
    """Return the digests of one different prompt in sixteen, and at least of one."""
    different = sorted({digest for digest in digests if digest is not None})
    if len(different) < 2:
        remedy = "give more rows, or an evaluation set in data.eval_path"
        raise ConfigError(key, str(path), "it needs two different prompts, to hold one out", remedy)
    return set(different[: ceil(len(different) / HELD_OUT_ONE_IN)])


def _check_prompts(
    path: Path, table: Table, digests: list[int | None], column: str, tokenizer: Tokenizer
) -> None:
    """Check what would spoil every row. What spoils a single row is counted when the row is drawn."""
    first = next((place for place, digest in enumerate(digests) if digest is not None), None)
    if first is None:
        problem = f"none of the {len(table)} rows of {path} has a prompt in this column"
        raise ConfigError("data.prompt_column", column, problem, "name the column that holds the prompt")
    if isinstance(table[first][column], list) and tokenizer.chat_template is None:
        problem = "the prompts are chat messages, and the model's tokenizer has no chat template"
        raise ConfigError("data.prompt_column", column, problem, "give prompts as strings, or add a template")
