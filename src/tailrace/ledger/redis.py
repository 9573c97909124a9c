"""A Redis server as the store: for runs whose output directory does not outlive the host.

A hash a table, a hash of tokens a sample. A cut is one MULTI/EXEC. What outlives the server is the server's
settings' business: appendonly yes, and appendfsync as careful as it must be.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tailrace.errors import ConfigError, LedgerError
from tailrace.ledger.base import ROWS, Cut, Row, RunRow, TokensRow
from tailrace.ledger.memory import key_of
from tailrace.types import SampleId

_encoder = msgspec.msgpack.Encoder()


class RedisStore:
    """Keeps the contract of `ledger.base.Store`. Made by `create` and `open`."""

    def __init__(self, url: str, run: str) -> None:
        """run: sets its keys apart from those of other runs.

        Raises:
            ConfigError: the client is not installed, or the URL is none.
        """
        try:
            import redis
        except ImportError:
            raise ConfigError(
                "ledger.kind", "redis", "the client is not installed", "pip install 'tailrace[redis]'"
            ) from None
        self.name = f"{url} {run}"
        self._prefix = f"tailrace:{run}:"
        self._error = redis.RedisError
        try:
            self._redis: Any = redis.Redis.from_url(url)
        except ValueError as why:
            raise ConfigError("ledger.url", url, str(why), "write redis://host:6379/0") from None

    @classmethod
    def create(cls, url: str, run: str) -> "RedisStore":
        """
        Raises:
            LedgerError: there is one already, or the server cannot be reached.
        """
        store = cls(url, run)
        if store.rows(RunRow):
            raise LedgerError(f"{store.name} exists; add --resume, or choose another --output-dir")
        return store

    @classmethod
    def open(cls, url: str, run: str) -> "RedisStore":
        """
        Raises:
            LedgerError: there is none, or the server cannot be reached.
        """
        store = cls(url, run)
        if not store.rows(RunRow):
            raise LedgerError(f"{store.name} is missing; name the run's own server and --output-dir")
        return store

    def commit(self, cut: Cut) -> None:
        with self._explained("cannot be written", "see to the server, then --resume"):
            transaction = self._redis.pipeline(transaction=True)
            for row in cut.rows:
                if isinstance(row, TokensRow):
                    id = SampleId(row.prompt, row.attempt, row.number)
                    transaction.hset(self._tokens(id), row.start, _encoder.encode(row))
                    transaction.sadd(self._prefix + "with_tokens", str(id))
                else:
                    transaction.hset(
                        self._prefix + row.table, _encoder.encode(key_of(row)), _encoder.encode(row)
                    )
            for id in cut.pruned:
                transaction.unlink(self._tokens(id))
                transaction.srem(self._prefix + "with_tokens", str(id))
            transaction.execute()

    def rows(self, kind: type[Row]) -> list[Row]:
        with self._explained("cannot be read", "see to the server, then --resume"):
            found = [
                msgspec.msgpack.decode(blob, type=kind)
                for table in self._hashes(kind)
                for blob in self._redis.hvals(table)
            ]
        return sorted(found, key=lambda row: msgspec.structs.astuple(row)[: kind.num_keys])

    def close(self) -> None:
        self._redis.close()

    def forget(self) -> None:
        """Remove the run's keys."""
        with self._explained("cannot be written", "see to the server"):
            tables = [table for kind in ROWS for table in self._hashes(kind)]
            self._redis.unlink(*tables, self._prefix + "with_tokens")

    def _hashes(self, kind: type[Row]) -> list[str]:
        if kind is not TokensRow:
            return [self._prefix + kind.table]
        ids = self._redis.smembers(self._prefix + "with_tokens")
        return [f"{self._prefix}tokens:{id.decode()}" for id in ids]

    def _tokens(self, id: SampleId) -> str:
        return f"{self._prefix}tokens:{id}"

    @contextmanager
    def _explained(self, problem: str, remedy: str) -> Iterator[None]:
        """
        Raises:
            LedgerError: for whatever the client or the server says, and for what is no row.
        """
        try:
            yield
        except (self._error, msgspec.DecodeError) as why:
            raise LedgerError(f"{self.name} {problem} ({why}); {remedy}") from why
