"""The default store: one SQLite file in the output directory.

It uses a write-ahead log without a sync for each commit. A killed process loses nothing that was committed.
When the machine itself crashes, the last commits may be lost, and the rest is consistent.
"""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from zlib import crc32

import msgspec

from tailrace.errors import ConfigError, LedgerError
from tailrace.ledger.base import (
    ROWS,
    Cut,
    LedgerSettings,
    MarkRow,
    R,
    Row,
    RunRow,
    SampleRow,
    Store,
    TrainingRow,
    explained,
)

_explained = partial(explained, errors=(sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError))
_readable = partial(
    _explained, problem="is damaged", remedy="put a copy back, or begin a new run in another --output-dir"
)


class SqliteStore:
    """A `Store` in a SQLite file. Use `create` or `open` to make one."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.name = str(path)
        self._connection = connection

    @classmethod
    def create(cls, path: Path) -> "SqliteStore":
        """Create the file with empty tables.

        Raises:
            LedgerError: the file exists, or cannot be written.
        """
        if path.exists():
            raise LedgerError(f"{path} exists; add --resume, or choose another --output-dir")
        with _explained(str(path), "cannot be written", "choose a folder that can"):
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN")  # so that a kill leaves all tables or none
            for kind in ROWS:
                connection.execute(
                    f"CREATE TABLE {kind.table} ({_columns(kind)}, PRIMARY KEY ({_key(kind)})) WITHOUT ROWID"
                )
            connection.execute("COMMIT")
        return cls(path, connection)

    @classmethod
    def open(cls, path: Path, *, only_read: bool = False) -> "SqliteStore":
        """Open an existing file.

        Raises:
            LedgerError: the file is missing or damaged. It is not changed.
        """
        if not path.exists():
            raise LedgerError(f"{path} is missing; start without --resume, or put a copy back")
        with _readable(str(path)):
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

    @property
    def has_tables(self) -> bool:
        """Whether the file was initialised; a process killed in `create` may leave a file without tables."""
        with _readable(self.name):
            (number,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return bool(number)

    def commit(self, cut: Cut) -> None:
        with _explained(self.name, "cannot be written", "make room on the disk, then --resume"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._write(cut.rows)
                covered = self._covered(cut.covered_step) if cut.covered_step else []
                self._write([row.without_tokens for row in covered])
                self._connection.executemany(
                    "DELETE FROM tokens WHERE prompt = ? AND attempt = ? AND number = ?",
                    [*cut.pruned, *(row.id for row in covered)],
                )
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, kind: type[R]) -> list[R]:
        query = f"SELECT {_columns(kind)} FROM {kind.table} ORDER BY {_key(kind)}"
        with _readable(self.name):
            return [_checked(values, kind) for values in self._connection.execute(query)]

    def _write(self, rows: Sequence[Row]) -> None:
        for kind in ROWS:
            values = [_with_checksum(row) for row in rows if type(row) is kind]
            places = ", ".join("?" * (len(kind.__struct_fields__) + 1))
            self._connection.executemany(f"REPLACE INTO {kind.table} VALUES ({places})", values)

    def _covered(self, step: int) -> list[SampleRow]:
        """Return the samples that were trained up to a step and still have tokens."""
        key = _key(SampleRow)
        query = (
            f"SELECT {_columns(SampleRow)} FROM samples WHERE NOT pruned AND ({key}) IN "
            f"(SELECT {key} FROM trainings WHERE undone IS NULL AND step <= ?)"
        )
        return [_checked(values, SampleRow) for values in self._connection.execute(query, (step,))]

    def close(self) -> None:
        self._connection.close()


def _columns(kind: type[Row]) -> str:
    return ", ".join((*kind.__struct_fields__, "crc"))


def _key(kind: type[Row]) -> str:
    return ", ".join(kind.__struct_fields__[: kind.num_keys])


def _with_checksum(row: Row) -> tuple[object, ...]:
    """Return the values of a row as SQLite returns them, and their checksum. SQLite's pages have none."""
    values = [_plain(value) for value in msgspec.structs.astuple(row)]
    return (*values, _checksum(values))


def _checked(values: Sequence[object], kind: type[R]) -> R:
    if _checksum(values[:-1]) != values[-1]:
        raise sqlite3.DatabaseError(
            f"the checksum of a row of {kind.table} is wrong: {values[: kind.num_keys]}"
        )
    return msgspec.convert(values[:-1], kind, strict=False)


def _plain(value: object) -> object:
    """Convert a value to one that SQLite returns unchanged: it has no booleans and no negative zero."""
    if isinstance(value, bool):
        return int(value)
    return value + 0.0 if isinstance(value, float) else value


def _checksum(values: Sequence[object]) -> int:
    return crc32(msgspec.msgpack.encode(values))


LEDGER_FILE = "ledger.sqlite"
UNTRAINED = "round_000000"
"""Name of the checkpoint at the start of a run."""


def create_store(settings: LedgerSettings, folder: Path) -> Store | None:
    """Open an empty store for a new run in an output directory; None: the run is not to be stored.

    The store of a run that trained nothing is replaced.

    Raises:
        LedgerError: the store holds a run that trained something, or cannot be written.
    """
    replaced = not _holds(settings, folder, _trained)
    match settings.kind:
        case "sqlite":
            path = folder / LEDGER_FILE
            for suffix in ("", "-wal", "-shm") if replaced else ():
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return SqliteStore.create(path)
        case "memory":
            return None


def open_store(settings: LedgerSettings, folder: Path, *, only_read: bool = False) -> Store:
    """Open the store of an existing run.

    Raises:
        ConfigError: the run was not stored.
        LedgerError: the store is missing, damaged or cannot be reached.
    """
    match settings.kind:
        case "sqlite":
            return SqliteStore.open(folder / LEDGER_FILE, only_read=only_read)
        case "memory":
            problem = "the ledger of the run ended with its process"
            raise ConfigError("ledger.kind", "memory", problem, "begin a new run")


def has_begun(settings: LedgerSettings, folder: Path, checkpoints: Path) -> bool:
    """Return whether a run in the folder drew a prompt or wrote a checkpoint, so that it can be resumed.

    A run whose ledger is kept in memory has begun only when there is a checkpoint.

    Raises:
        LedgerError: the store is damaged, or cannot be reached.
    """
    saved = any(checkpoints.glob("round_*"))
    return saved or _holds(settings, folder, _drew)


def has_trained(settings: LedgerSettings, folder: Path, checkpoints: Path) -> bool:
    """Return whether a run in the folder made an optimizer step, which a new run would lose. Raises as
    `has_begun`."""
    saved = any(path.name != UNTRAINED for path in checkpoints.glob("round_*"))
    return saved or _holds(settings, folder, _trained)


def _holds(settings: LedgerSettings, folder: Path, holds: Callable[[Store], bool]) -> bool:
    if settings.kind == "memory" or not (folder / LEDGER_FILE).exists():
        return False
    with closing(SqliteStore.open(folder / LEDGER_FILE)) as store:
        return store.has_tables and holds(store)


def _drew(store: Store) -> bool:
    return any(row.num_drawn for row in store.rows(RunRow)) or bool(store.rows(MarkRow))


def _trained(store: Store) -> bool:
    return bool(store.rows(TrainingRow)) or any(row.step for row in store.rows(MarkRow))
