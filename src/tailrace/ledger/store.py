"""The store of a ledger: one SQLite file in the output directory.

It uses a write-ahead log without a sync for each commit. A killed process loses nothing that was committed.
When the machine itself crashes, the last commits may be lost, and the rest is consistent.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TypeVar, get_origin
from zlib import crc32

import msgspec

from tailrace.errors import ConfigError, LedgerError
from tailrace.ledger.base import (
    FORMAT,
    ROWS,
    CheckpointRow,
    GroupRow,
    LedgerRow,
    LedgerSettings,
    LedgerTables,
    LifeRow,
    ProbeRow,
    RunRow,
    SampleRow,
    TokensRow,
    TrainingRow,
    Transaction,
)

R = TypeVar("R", bound=LedgerRow)


@contextmanager
def _explained(name: str, problem: str, remedy: str) -> Iterator[None]:
    """Turn an error of SQLite or of a row into a LedgerError."""
    try:
        yield
    except (sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError) as why:
        raise LedgerError(f"{name} {problem} ({why}); {remedy}") from why


_readable = partial(
    _explained, problem="is damaged", remedy="put a copy back, or begin a new run in another --output-dir"
)


class Store:
    """Keeps rows. Use `create` or `open` to make one. Its methods block. They may run on another thread, one
    call at a time."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.name = str(path)
        """Path, for messages."""
        self._connection = connection

    @classmethod
    def create(cls, path: Path) -> "Store":
        """Create the file with empty tables. Raises a LedgerError if it exists, or cannot be written."""
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
    def open(cls, path: Path, *, only_read: bool = False) -> "Store":
        """Open an existing file. Raises a LedgerError if it is missing or damaged. It is not changed."""
        if not path.exists():
            raise LedgerError(f"{path} is missing; put a copy back, or begin a new run in another folder")
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

    def commit(self, transaction: Transaction) -> None:
        """Commit the whole transaction, or nothing of it. Raises a LedgerError if it cannot be written. The
        store holds what it held before."""
        with _explained(self.name, "cannot be written", "make room on the disk, then --resume"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                delete = "DELETE FROM tokens WHERE prompt = ? AND attempt = ? AND number = ?"
                self._connection.executemany(delete, transaction.rewritten)
                self._write(transaction.rows)
                covered = self._covered(transaction.covered_step) if transaction.covered_step else []
                self._write([row.without_tokens for row in covered])
                if pruned := [*transaction.pruned, *(row.id for row in covered)]:
                    self._connection.executemany(delete, pruned)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, kind: type[R]) -> list[R]:
        """Return all rows of a table, sorted by key. Raises a LedgerError if the store is damaged."""
        query = f"SELECT {_columns(kind)} FROM {kind.table} ORDER BY {_key(kind)}"
        with _readable(self.name):
            return [_checked(values, kind) for values in self._connection.execute(query)]

    def _write(self, rows: Sequence[LedgerRow]) -> None:
        by_kind: dict[type[LedgerRow], list[tuple[object, ...]]] = {}
        for row in rows:
            by_kind.setdefault(type(row), []).append(_with_checksum(row))
        for kind, values in by_kind.items():
            places = ", ".join("?" * len(values[0]))
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


def _columns(kind: type[LedgerRow]) -> str:
    return ", ".join(f'"{name}"' for name in (*kind.__struct_fields__, "crc"))  # limit is a word of SQL


def _key(kind: type[LedgerRow]) -> str:
    return ", ".join(kind.__struct_fields__[: kind.num_keys])


@cache
def _json_fields(kind: type[LedgerRow]) -> list[bool]:
    """Return for each field of a row whether it is stored as JSON."""
    return [get_origin(field.type) in (list, dict, tuple) for field in msgspec.structs.fields(kind)]


def _with_checksum(row: LedgerRow) -> tuple[object, ...]:
    """Return the values of a row as SQLite returns them, and their checksum. SQLite's pages have none."""
    values = [_plain(value) for value in msgspec.structs.astuple(row)]
    return (*values, _checksum(values))


def _checked(values: Sequence[object], kind: type[R]) -> R:
    if _checksum(values[:-1]) != values[-1]:
        raise sqlite3.DatabaseError(
            f"the checksum of a row of {kind.table} is wrong: {values[: kind.num_keys]}"
        )
    fields = [
        msgspec.json.decode(str(value)) if is_json else value
        for value, is_json in zip(values[:-1], _json_fields(kind), strict=True)
    ]
    return msgspec.convert(fields, kind, strict=False)


def _plain(value: object) -> object:
    """Convert a value to one that SQLite returns unchanged: it has no booleans, lists and negative zeros."""
    match value:
        case bool():
            return int(value)
        case float():
            return value + 0.0
        case list() | tuple() | dict():
            return msgspec.json.encode(value).decode()
    return value


def _checksum(values: Sequence[object]) -> int:
    return crc32(msgspec.msgpack.encode(values))


LEDGER_FILE = "ledger.sqlite"
UNTRAINED = "round_000000"
"""Name of the checkpoint at the start of a run."""


def create_store(settings: LedgerSettings, folder: Path) -> Store | None:
    """Open an empty store for a new run in an output directory; None: the run is not to be stored.

    The store of a run that trained nothing is replaced. Raises a LedgerError if the store holds a run that
    trained something, or cannot be written."""
    if not settings.is_stored:
        return None
    path = folder / LEDGER_FILE
    if not _holds(settings, folder, _trained):
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    return Store.create(path)


def open_store(settings: LedgerSettings, folder: Path, *, only_read: bool = False) -> Store:
    """Open the store of an existing run.

    Raises:
        ConfigError: the run was not stored.
        LedgerError: the store is missing or damaged.
    """
    if not settings.is_stored:
        problem = "the ledger of the run ended with its process"
        raise ConfigError("ledger.kind", "memory", problem, "begin a new run")
    return Store.open(folder / LEDGER_FILE, only_read=only_read)


def has_begun(settings: LedgerSettings, folder: Path, checkpoints: Path) -> bool:
    """Return whether a run in the folder drew a prompt or wrote a checkpoint, so that it can be resumed.

    A run whose ledger is kept in memory has begun only when there is a checkpoint. A damaged store raises a
    LedgerError.
    """
    return any(checkpoints.glob("round_*")) or _holds(settings, folder, _drew)


def has_trained(settings: LedgerSettings, folder: Path, checkpoints: Path) -> bool:
    """Return whether a run in the folder has made an optimizer step. Raises as `has_begun`."""
    saved = any(path.name != UNTRAINED for path in checkpoints.glob("round_*"))
    return saved or _holds(settings, folder, _trained)


def _holds(settings: LedgerSettings, folder: Path, holds: Callable[[Store], bool]) -> bool:
    if not settings.is_stored or not (folder / LEDGER_FILE).exists():
        return False
    with closing(Store.open(folder / LEDGER_FILE)) as store:
        return store.has_tables and holds(store)


def _drew(store: Store) -> bool:
    return any(row.num_drawn for row in store.rows(RunRow)) or bool(store.rows(CheckpointRow))


def _trained(store: Store) -> bool:
    return bool(store.rows(TrainingRow)) or any(row.step for row in store.rows(CheckpointRow))


_TOKEN_BYTES = 4


def read_ledger(store: Store, *, tokens: bool = True) -> LedgerTables:
    """Read the tables of a run. Raises a LedgerError if the store is damaged, or of another format. `tokens`:
    whether to read the tokens of the samples, which are most of the data."""
    runs = store.rows(RunRow)
    if len(runs) != 1 or runs[0].format != FORMAT:
        raise LedgerError(
            f"{store.name} holds no ledger that this version of tailrace reads (format {FORMAT}); resume "
            "with the version that wrote it, or begin a new run in another --output-dir"
        )
    tables = LedgerTables(
        store=store.name,
        run=runs[0],
        lives={row.life: row for row in store.rows(LifeRow)},
        checkpoints=store.rows(CheckpointRow),
        groups={row.prompt: row for row in store.rows(GroupRow)},
        samples={row.id: row for row in store.rows(SampleRow)},
        trainings={(row.life, row.id): row for row in store.rows(TrainingRow)},
        probes=store.rows(ProbeRow),
    )
    for row in store.rows(TokensRow) if tokens else ():
        tables.tokens.setdefault(row.id, []).append(row)
    if problem := next(_contradictions(tables), None):
        raise LedgerError(
            f"{store.name} is damaged ({problem}); put a copy back, or begin a new run in another "
            "--output-dir"
        )
    return tables


def _contradictions(tables: LedgerTables) -> Iterator[str]:
    """Yield what is wrong where the rows contradict one another."""
    if set(tables.lives) != set(range(1, len(tables.lives) + 1)):
        yield f"its lives are {sorted(tables.lives)}"
    if len(tables.groups) > tables.run.num_drawn:
        yield f"{len(tables.groups)} groups of {tables.run.num_drawn} prompts"
    for id, sample in tables.samples.items():
        if id.prompt not in tables.groups:
            yield f"sample {id} has no group"
        if any(origin.life not in tables.lives for origin in sample.spans):
            yield f"sample {id} belongs to a life that is not recorded"
        ends = [turn.num_tokens for turn in sample.turns]
        if ends != sorted(ends) or max(ends, default=0) > sample.num_tokens:
            yield f"the turns of sample {id} end at {ends} of {sample.num_tokens} tokens"
    for training in tables.trainings.values():
        if training.id not in tables.samples:
            yield f"sample {training.id} was trained and is missing"
    for id, rows in tables.tokens.items():
        num_stored = 0
        for row in rows:
            if row.start != num_stored or len(row.ids) != len(row.logprobs) or len(row.ids) % _TOKEN_BYTES:
                yield f"the tokens of sample {id} do not follow one another"
            num_stored += len(row.ids) // _TOKEN_BYTES
        num_tokens = tables.samples[id].num_tokens if id in tables.samples else 0
        if num_stored != num_tokens:
            yield f"sample {id} has {num_stored} tokens stored, and produced {num_tokens}"
