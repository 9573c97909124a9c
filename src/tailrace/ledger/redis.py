"""A Redis server as the store, for runs whose output directory does not outlive the host.

Each table is a hash, and the tokens of each sample are a hash. A cut is one MULTI/EXEC. The settings of the
server decide what survives its crash: set `appendonly yes` and a suitable `appendfsync`.
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
    """A `Store` on a Redis server. Use `create` or `open` to make one."""

    def __init__(self, url: str, run: str) -> None:
        """
        Args:
            run: name of the run, which separates its keys from those of other runs.

        Raises:
            ConfigError: the Redis client is not installed, or the URL is malformed.
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
        """Open the store of a new run.

        Raises:
            LedgerError: the server holds a ledger of this run, or cannot be reached.
        """
        store = cls(url, run)
        if store.rows(RunRow):
            raise LedgerError(f"{store.name} exists; add --resume, or choose another --output-dir")
        return store

    @classmethod
    def open(cls, url: str, run: str) -> "RedisStore":
        """Open the store of an existing run.

        Raises:
            LedgerError: the server holds no ledger of this run, or cannot be reached.
        """
        store = cls(url, run)
        if not store.rows(RunRow):
            raise LedgerError(f"{store.name} is missing; name the run's own server and --output-dir")
        return store

    def commit(self, cut: Cut) -> None:
        with self._explained("cannot be written", "check the server, then --resume"):
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
        with self._explained("cannot be read", "check the server, then --resume"):
            found = [
                msgspec.msgpack.decode(blob, type=kind)
                for table in self._hashes(kind)
                for blob in self._redis.hvals(table)
            ]
        return sorted(found, key=lambda row: msgspec.structs.astuple(row)[: kind.num_keys])

    def close(self) -> None:
        self._redis.close()

    def forget(self) -> None:
        """Remove all keys of the run."""
        with self._explained("cannot be written", "check the server"):
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
        """Turn errors of the client, of the server and of decoding into a LedgerError.

        Raises:
            LedgerError: with the problem and the remedy.
        """
        try:
            yield
        except (self._error, msgspec.DecodeError) as why:
            raise LedgerError(f"{self.name} {problem} ({why}); {remedy}") from why
