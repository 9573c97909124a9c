"""A Redis server as the store, for runs whose output directory does not outlive the host.

Each table is a hash, and the tokens of each sample are a hash. A cut is one MULTI/EXEC. The settings of the
server decide what survives its crash: set `appendonly yes` and a suitable `appendfsync`.
"""

from functools import partial
from typing import Any

import msgspec

from tailrace.errors import ConfigError
from tailrace.ledger.base import ROWS, Cut, R, Row, RunRow, SampleRow, TokensRow, TrainingRow, explained
from tailrace.types import SampleId

_encode = msgspec.msgpack.encode


class RedisStore:
    """A `Store` on a Redis server."""

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
        try:
            self._redis: Any = redis.Redis.from_url(url)
        except ValueError as why:
            raise ConfigError("ledger.url", url, str(why), "write redis://host:6379/0") from None
        self.name = f"{url} {run}"
        self._prefix = f"tailrace:{run}:"
        self._with_tokens = f"{self._prefix}with_tokens"
        """Key of the set of the samples that have tokens."""
        self._explained = partial(explained, self.name, errors=(redis.RedisError, msgspec.DecodeError))

    @property
    def has_tables(self) -> bool:
        """Whether a run has written to it."""
        return bool(self.rows(RunRow))

    def commit(self, cut: Cut) -> None:
        with self._explained("cannot be written", "check the server, then --resume"):
            transaction = self._redis.pipeline(transaction=True)
            for row in cut.rows:
                if isinstance(row, TokensRow):
                    id = SampleId(row.prompt, row.attempt, row.number)
                    transaction.hset(self._tokens(id), row.start, _encode(row))
                    transaction.sadd(self._with_tokens, str(id))
                else:
                    transaction.hset(self._prefix + row.table, _encode(row.key), _encode(row))
            covered = self._covered(cut.covered_step) if cut.covered_step else []
            for row in covered:
                transaction.hset(self._prefix + row.table, _encode(row.key), _encode(row.without_tokens))
            for id in (*cut.pruned, *(row.id for row in covered)):
                transaction.unlink(self._tokens(id))
                transaction.srem(self._with_tokens, str(id))
            transaction.execute()

    def rows(self, kind: type[R]) -> list[R]:
        with self._explained("cannot be read", "check the server, then --resume"):
            blobs = [blob for table in self._hashes(kind) for blob in self._redis.hvals(table)]
            return sorted(
                (msgspec.msgpack.decode(blob, type=kind) for blob in blobs), key=lambda row: row.key
            )

    def _covered(self, step: int) -> list[SampleRow]:
        """Return the samples that were trained up to a step and still have tokens."""
        with_tokens = self._redis.smembers(self._with_tokens)
        trained = [row.id for row in self.rows(TrainingRow) if row.undone is None and row.step <= step]
        keys = [_encode(tuple(id)) for id in trained if str(id).encode() in with_tokens]
        blobs = self._redis.hmget(self._prefix + SampleRow.table, keys) if keys else []
        return [msgspec.msgpack.decode(blob, type=SampleRow) for blob in blobs]

    def close(self) -> None:
        self._redis.close()

    def forget(self) -> None:
        """Remove all keys of the run."""
        with self._explained("cannot be written", "check the server"):
            tables = [table for kind in ROWS for table in self._hashes(kind)]
            self._redis.unlink(*tables, self._with_tokens)

    def _hashes(self, kind: type[Row]) -> list[str]:
        """Return the keys of the hashes that hold the rows of a table."""
        if kind is not TokensRow:
            return [self._prefix + kind.table]
        return [self._tokens(id.decode()) for id in self._redis.smembers(self._with_tokens)]

    def _tokens(self, id: SampleId | str) -> str:
        return f"{self._prefix}tokens:{id}"
