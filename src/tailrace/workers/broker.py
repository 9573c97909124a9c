"""Workers of other hosts, joined through Redis streams: PipelineRL's broker between its stages (section 4).

    controller  --- tailrace:RUN:NAME:LIFE:to ---->  worker
                <-- tailrace:RUN:NAME:LIFE:from ---

The records are the typed messages of messages.py, as msgpack, never pickles. A stream is bounded: the writer
waits while `max_records` records are unread. A record is deleted once it is read. Each side keeps a key alive
that expires, so that the other side notices its end. A controller that starts again opens new streams, of the
next LIFE; workers of earlier lives end.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, Self, TypeVar

import msgspec

from tailrace.errors import ConfigError, WorkerDied
from tailrace.workers.base import BrokerSettings
from tailrace.workers.conversation import Conversation
from tailrace.workers.messages import Job

In = TypeVar("In")

ALIVE_S = 15
"""Seconds after its last sign at which a side counts as gone."""
SIGN_EVERY_S = ALIVE_S / 3
_BLOCK_MS = 200
_FULL_PAUSE_S = 0.01
_encode = msgspec.msgpack.encode


def connect(url: str, *, is_async: bool) -> Any:
    """Return a client of the Redis server, of its asyncio kind or of its blocking kind.

    Raises:
        ConfigError: the client is not installed, or the URL is malformed.
    """
    try:
        import redis
        import redis.asyncio
    except ImportError:
        remedy = "pip install 'tailrace[redis]'"
        raise ConfigError("broker.url", url, "the Redis client is not installed", remedy) from None
    kind = redis.asyncio.Redis if is_async else redis.Redis
    try:
        return kind.from_url(url)
    except ValueError as why:
        raise ConfigError("broker.url", url, str(why), "write redis://host:6379/0") from None


@contextmanager
def reachable(url: str) -> Iterator[None]:
    """Turn an error of the client into a ConfigError."""
    import redis

    try:
        yield
    except redis.RedisError as why:
        remedy = "start the server, or correct the URL"
        raise ConfigError("broker.url", url, str(why), remedy) from None


class Invitation(msgspec.Struct):
    """Asks a worker to join.

    Args:
        life: number of the controller's life; it is part of the names of the streams.
        job: as JSON.
    """

    life: int
    job: str
    max_records: int


class BrokeredWorker(Conversation):
    """The controller's side of a worker that joins through the broker. Made by `invite`."""

    def __init__(
        self, name: str, redis: Any, prefix: str, decoder: msgspec.msgpack.Decoder[Any], max_records: int
    ) -> None:
        super().__init__(name)
        self._redis, self._prefix, self._decoder, self._max_records = redis, prefix, decoder, max_records
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks = [
            asyncio.create_task(self._run(work())) for work in (self._read, self._send, self._watch)
        ]

    @classmethod
    async def invite(
        cls, name: str, job: Job, decoder: msgspec.msgpack.Decoder[Any], settings: BrokerSettings, run: str
    ) -> Self:
        """Leave a job for the worker that joins as `name`.

        Args:
            decoder: decodes the messages of the worker.
            run: name of the run, which separates its keys from those of other runs.

        Raises:
            ConfigError: the server cannot be reached.
        """
        assert settings.url
        client, base = connect(settings.url, is_async=True), f"tailrace:{run}:{name}"
        with reachable(settings.url):
            life = await client.incr(f"{base}:life")
            await client.set(f"{base}:{life}:controller", 1, ex=ALIVE_S)
            await client.delete(f"{base}:invitations")
            invitation = Invitation(life, job.model_dump_json(), settings.max_records)
            await client.rpush(f"{base}:invitations", _encode(invitation))
        return cls(name, client, f"{base}:{life}", decoder, settings.max_records)

    def kill(self) -> None:
        """Let the worker end: it notices that the controller's key is gone."""
        self._ended(f"{self.name} was ended by its controller")
        self._unsent.put_nowait(b"")

    def log_end(self) -> str:
        """Its output stays on its host."""
        return "its host has its log"

    async def close(self) -> None:
        """Let the worker end, and delete the streams."""
        self.kill()
        await asyncio.gather(*self._tasks)
        with suppress(Exception):  # without the server the keys expire, and the streams stay
            await self._redis.delete(*(f"{self._prefix}:{part}" for part in ("controller", "to", "from")))
        await self._redis.aclose()

    def _write(self, message: msgspec.Struct) -> None:
        self._unsent.put_nowait(_encode(message))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Any error of the broker, or of a message, is the end of the worker."""
        try:
            await work
        except WorkerDied as died:
            self._ended(str(died))
        except Exception as error:
            self._cause = error
            self._ended(f"{self.name}: the broker failed: {error!r}")

    async def _read(self) -> None:
        last, stream = b"0", f"{self._prefix}:from"
        while not self._words.done():  # not cancelled: the client would swallow the cancellation
            for _, records in await self._redis.xread({stream: last}, block=_BLOCK_MS):
                for _, fields in records:
                    self.on_message(self._decoder.decode(fields[b"message"]))
                last = records[-1][0]
                await self._redis.xdel(stream, *(id for id, _ in records))

    async def _send(self) -> None:
        stream = f"{self._prefix}:to"
        while frame := await self._unsent.get():
            while await self._redis.xlen(stream) >= self._max_records and not self._words.done():
                await asyncio.wait([self._words], timeout=_FULL_PAUSE_S)
            await self._redis.xadd(stream, {"message": frame})

    async def _watch(self) -> None:
        joined = False
        while not self._words.done():
            await self._redis.set(f"{self._prefix}:controller", 1, ex=ALIVE_S)
            alive = await self._redis.exists(f"{self._prefix}:worker")
            if joined and not alive:
                words = await self._redis.get(f"{self._prefix}:last_words")
                said = f": {words.decode(errors='replace')}" if words else ""
                raise WorkerDied(f"{self.name} gave no sign of life through the broker for {ALIVE_S} s{said}")
            joined = joined or bool(alive)
            await asyncio.wait([self._words], timeout=SIGN_EVERY_S)


class BrokerChannel(Generic[In]):
    """The worker's end, as WorkerChannel (channel.py)."""

    def __init__(
        self, redis: Any, prefix: str, decoder: msgspec.msgpack.Decoder[In], max_records: int
    ) -> None:
        self._redis, self._prefix, self._decoder, self._max_records = redis, prefix, decoder, max_records
        self._last = b"0"
        self._sending = threading.Lock()
        self._gone = threading.Event()
        self._sign()
        threading.Thread(target=self._keep_signing, name="signs of life", daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, from any thread; blocks while the stream is full."""
        stream = f"{self._prefix}:from"
        with self._sending:
            while self._redis.xlen(stream) >= self._max_records and not self._gone.is_set():
                time.sleep(_FULL_PAUSE_S)
            self._redis.xadd(stream, {"message": _encode(message)})

    def receive(self, *, wait: bool) -> list[In] | None:
        """As WorkerChannel.receive."""
        stream = f"{self._prefix}:to"
        while not self._gone.is_set():
            found = self._redis.xread({stream: self._last}, block=_BLOCK_MS if wait else None)
            if found:
                records = found[0][1]
                self._last = records[-1][0]
                self._redis.xdel(stream, *(id for id, _ in records))
                return [self._decoder.decode(fields[b"message"]) for _, fields in records]
            if not wait:
                return []
        return None

    def __iter__(self) -> Iterator[In]:
        """Yield each message as it arrives, until the controller is gone."""
        while (messages := self.receive(wait=True)) is not None:
            yield from messages

    def close(self, words: str = "") -> None:
        """Say at once that the worker is gone, and why."""
        self._gone.set()
        if words:
            self._redis.set(f"{self._prefix}:last_words", words, ex=3600)
        self._redis.delete(f"{self._prefix}:worker")

    def _sign(self) -> None:
        self._redis.set(f"{self._prefix}:worker", 1, ex=ALIVE_S)

    def _keep_signing(self) -> None:
        while not self._gone.wait(SIGN_EVERY_S):
            with suppress(Exception):  # a server that is away for a moment
                if not self._redis.exists(f"{self._prefix}:controller"):
                    self._gone.set()
                else:
                    self._sign()
