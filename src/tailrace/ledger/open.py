"""The store that a config names."""

from pathlib import Path

from tailrace.errors import ConfigError
from tailrace.ledger.base import LedgerSettings, Store
from tailrace.ledger.redis import RedisStore
from tailrace.ledger.sqlite import SqliteStore

LEDGER_FILE = "ledger.sqlite"


def create_store(settings: LedgerSettings, folder: Path) -> Store | None:
    """For a run that begins; None: it is to be kept nowhere.

    Raises:
        LedgerError: there is one already, or it cannot be written.
    """
    match settings.kind:
        case "sqlite":
            return SqliteStore.create(folder / LEDGER_FILE)
        case "redis":
            return RedisStore.create(str(settings.url), str(folder.resolve()))
        case "memory":
            return None


def open_store(settings: LedgerSettings, folder: Path, *, only_read: bool = False) -> Store:
    """Of a run that was begun.

    Raises:
        ConfigError: it was kept nowhere.
        LedgerError: it is missing or damaged.
    """
    match settings.kind:
        case "sqlite":
            return SqliteStore.open(folder / LEDGER_FILE, only_read=only_read)
        case "redis":
            return RedisStore.open(str(settings.url), str(folder.resolve()))
        case "memory":
            raise ConfigError(
                "ledger.kind", "memory", "the run's ledger ended with its process", "begin a new run"
            )
