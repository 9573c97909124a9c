"""Opens the store that the [ledger] section names."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tailrace.errors import ConfigError
from tailrace.ledger.base import LedgerSettings, MarkRow, RunRow, Store, TrainingRow
from tailrace.ledger.sqlite import SqliteStore

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
