"""Output of commands: tables with one row a line in any width, and what a long search does."""

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from tailrace import clock
from tailrace.errors import ConfigError

WIDE = 10_000
"""Columns of an output that is no terminal."""


def open_console() -> Console:
    """The console of a command. What goes to a file or to another program is not wrapped."""
    width = None if sys.stdout.isatty() else WIDE
    return Console(width=width, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(every_s: float = 5.0) -> Iterator[Callable[[str], None]]:
    """Show on standard error what a long command does: in one line of a terminal, or else a line each so many
    seconds."""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    last_s = -math.inf

    def say(words: str) -> None:
        nonlocal last_s
        if clock.wall_time() - last_s >= every_s:
            last_s = clock.wall_time()
            console.print(words)

    yield say


def check_output(option: str, path: Path | None, sign: str) -> None:
    """Raises a ConfigError if the file that an option names cannot be there, or is there and is not what the
    command writes, before anything starts. `sign`: a pattern that the first 64 KiB of its files match."""
    if path and (path.is_dir() or not path.parent.is_dir()):
        problem = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(option, str(path), problem, "choose a file in an existing folder")
    if path and path.is_file():
        with writing(option, path), path.open("rb") as file:
            if (head := file.read(2**16)) and not re.search(sign, head.decode(errors="replace")):
                problem = "tailrace did not write the file that is there"
                raise ConfigError(option, str(path), problem, "choose another, or move it away")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Raise a ConfigError if the file that an option names cannot be written inside the block."""
    try:
        yield
    except OSError as why:
        problem = f"it cannot be written ({why.strerror})"
        raise ConfigError(option, str(path), problem, "choose another file") from why


def print_table(console: Console, table: Table, *, keep: int = 1) -> None:
    """Print a table in blocks of as many columns as there is room for.

    Args:
        keep: columns with which each block begins, because they say what a row is.
    """
    for block in _blocks(console, table, keep):
        console.print(block, soft_wrap=False)


def _blocks(console: Console, table: Table, keep: int) -> Iterator[Table]:
    labels, rest = table.columns[:keep], table.columns[keep:]
    title: object = table.title
    unbounded = console.options.update(max_width=WIDE)
    while rest:
        num = 1
        while num < len(rest):
            wider = _block(table, [*labels, *rest[: num + 1]])
            if console.measure(wider, options=unbounded).maximum > console.width:
                break
            num += 1
        block, rest = _block(table, [*labels, *rest[:num]]), rest[num:]
        block.title, title = title, None  # type: ignore[assignment]
        block.caption = None if rest else table.caption
        yield block


def _block(table: Table, columns: Sequence[Column]) -> Table:
    """A table of some columns of another."""
    block = Table(
        box=table.box, padding=table.padding, title_justify=table.title_justify, caption_justify="left"
    )
    for column in columns:
        block.add_column(column.header, justify=column.justify, no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        block.add_row(*cells)
    return block
