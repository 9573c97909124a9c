"""The default store: one SQLite file in the output directory.

A write-ahead log: a commit waits for no disk, and a process that is killed loses nothing that was committed.
When the machine itself goes down, the last commits may be lost, in order, and what is left is whole.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import msgspec

from tailrace.errors import LedgerError
from tailrace.ledger.base import ROWS, Cut, Row

REPLACE = "put a copy back, or begin a new run in another --output-dir"


class SqliteStore:
    """Keeps the contract of `ledger.base.Store`. Made by `create` and `open`."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.name = str(path)
        self._connection = connection

    @classmethod
    def create(cls, path: Path) -> "SqliteStore":
        """
        Raises:
            LedgerError: there is one already, or it cannot be written.
        """
        if path.exists():
            raise LedgerError(f"{path} exists; add --resume, or choose another --output-dir")
        with _explained(path, "cannot be written", "choose a folder that can"):
            store = cls(path, sqlite3.connect(path, isolation_level=None, check_same_thread=False))
            store._connection.execute("PRAGMA journal_mode = WAL")
            store._connection.execute("PRAGMA synchronous = NORMAL")
            for kind in ROWS:
                names = kind.__struct_fields__
                columns, key = ", ".join((*names, "crc")), ", ".join(names[: kind.num_keys])
                store._connection.execute(
                    f"CREATE TABLE {kind.table} ({columns}, PRIMARY KEY ({key})) WITHOUT ROWID"
                )
            return store

    @classmethod
    def open(cls, path: Path, *, only_read: bool = False) -> "SqliteStore":
        """
        Raises:
            LedgerError: it is missing or damaged; nothing was changed.
        """
        if not path.exists():
            raise LedgerError(f"{path} is missing; start without --resume, or put a copy back")
        with _explained(path, "is damaged", REPLACE):
            uri = f"{path.resolve().as_uri()}?mode={'ro' if only_read else 'rw'}"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA synchronous = NORMAL")
                (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                if verdict != "ok":
                    raise sqlite3.DatabaseError(verdict)
            except sqlite3.Error:
                connection.close()
                raise
        return cls(path, connection)

    def commit(self, cut: Cut) -> None:
        with _explained(self.name, "cannot be written", "make room on the disk, then --resume"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for kind in ROWS:
                    rows = [_sealed(row) for row in cut.rows if type(row) is kind]
                    places = ", ".join("?" * (len(kind.__struct_fields__) + 1))
                    self._connection.executemany(f"REPLACE INTO {kind.table} VALUES ({places})", rows)
                self._connection.executemany(
                    "DELETE FROM tokens WHERE prompt = ? AND attempt = ? AND number = ?", cut.pruned
                )
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, kind: type[Row]) -> list[Row]:
        names = kind.__struct_fields__
        key = ", ".join(names[: kind.num_keys])
        with _explained(self.name, "is damaged", REPLACE):
            columns = ", ".join((*names, "crc"))
            found = self._connection.execute(f"SELECT {columns} FROM {kind.table} ORDER BY {key}")
            return [_opened(values, kind) for values in found]

    def close(self) -> None:
        self._connection.close()


def _sealed(row: Row) -> tuple[object, ...]:
    """The values of a row as SQLite gives them back, and a checksum: its pages have none."""
    values = [_plain(value) for value in msgspec.structs.astuple(row)]
    return (*values, _checksum(values))


def _opened(values: Sequence[object], kind: type[Row]) -> Row:
    if _checksum(values[:-1]) != values[-1]:
        raise sqlite3.DatabaseError(
            f"a row of {kind.table} is not as it was written: {values[: kind.num_keys]}"
        )
    return msgspec.convert(values[:-1], kind, strict=False)


def _plain(value: object) -> object:
    """SQLite has no truth values, and no negative zero."""
    if isinstance(value, bool):
        return int(value)
    return value + 0.0 if isinstance(value, float) else value


def _checksum(values: Sequence[object]) -> int:
    return crc32(msgspec.msgpack.encode(values))


@contextmanager
def _explained(path: Path | str, problem: str, remedy: str) -> Iterator[None]:
    """
    Raises:
        LedgerError: for whatever SQLite says, and for values that no row has.
    """
    try:
        yield
    except (sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError) as why:
        raise LedgerError(f"{path} {problem} ({why}); {remedy}") from why
