"""An engine behind HTTP: tokens in, tokens out, over the dialect of the server (engine/dialect.py).

A completion is one streaming request, or several after one another: each continues from the tokens that
have arrived, under an id of its own. So a request that is cancelled, or whose connection breaks, loses
nothing that has arrived, and no token comes twice.
"""

import asyncio
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import httpx
import msgspec

from tailrace.clock import now, waiting
from tailrace.engine.base import Capabilities, Usage
from tailrace.engine.counter import TokenCounter
from tailrace.engine.dialect import Attempt, Chunk, Dialect, VersionSpan, call, describe
from tailrace.engine.settings import SamplingSettings
from tailrace.errors import EngineDied, Evicted, ServerRefused, TransferFailed
from tailrace.types import KV, Sample, Span
from tailrace.weights.base import Weights

ABORT_S, ABORT_AGAIN_S = 5.0, 0.25
"""Seconds that an aborted request may take to end before its connection is closed, and between two calls to
abort it: the first may reach the server before the request does."""
RETRY_S = 1.0
"""The pause before a request is sent again that was not answered or refused for now."""
HEALTH_EVERY_S = 5.0
"""Seconds between two health checks, at most."""
_decode: Callable[[str], Any] = msgspec.json.decode


class Server(Protocol):
    """Where an inference server is, and what keeps it running."""

    url: str

    async def ready(self) -> None:
        """Wait until it accepts connections.

        Raises:
            TailraceError: it cannot start.
        """

    async def died(self) -> str:
        """Wait until it has ended, and return how."""

    async def close(self) -> None:
        """End it, if it was started by this run."""


@dataclass(slots=True)
class _Request:
    """A sample that is being generated.

    Args:
        attempt: what the server was asked; None: nothing yet.
        done: the sample's tokens at the start of the attempt.
        cancelled: it must not be asked again.
    """

    sample: Sample
    attempt: Attempt | None = None
    done: int = 0
    cancelled: bool = False


class HttpEngine:
    """A connection to a server: an EngineLife (engine/supervised.py).

    Args:
        detect: makes the dialect.
        check: the self-tests at the start (engine/self_test.py).
        health_timeout_s: the server counts as dead after so many seconds without an answer.
    """

    def __init__(
        self,
        name: str,
        server: Server,
        detect: Callable[[httpx.AsyncClient], Awaitable[Dialect]],
        sampling: SamplingSettings,
        *,
        check: Callable[["HttpEngine"], Awaitable[None]],
        health_timeout_s: float,
    ) -> None:
        self.name, self.counter = name, TokenCounter()
        self.dialect: Dialect
        self._server, self._detect, self._check = server, detect, check
        self._sampling, self._health_timeout_s = sampling, health_timeout_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(health_timeout_s, read=None, pool=None)
        self._client = httpx.AsyncClient(base_url=server.url, timeout=timeout, limits=limits, trust_env=False)
        self._address = os.urandom(6).hex()
        """Tells the requests of this life from all others at the server."""
        self._version = 0
        """Of the weights that the server has, as far as it was told."""
        self._num_attempts = self._num_prefilled = 0
        self._requests: dict[Sample, _Request] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._loading = asyncio.Lock()
        self._num_loads = 0
        self._open = asyncio.Event()
        """No load is under way or waits. New requests wait for it, so that they get the new weights."""
        self._open.set()
        self._died = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Those of the server."""
        return self.dialect.capabilities

    async def ready(self) -> None:
        """As EngineLife.ready."""
        await self._server.ready()
        self.dialect = await self._detect(self._client)
        await self._check(self)
        self._watcher = asyncio.create_task(self._watch())

    async def generate(self, sample: Sample) -> None:
        """As Engine.generate. A cancelled call aborts the request at the server, and returns once its last
        token is in the sample. Cancelling it again in the meantime has no effect."""
        request = self._requests[sample] = _Request(sample)
        try:
            with self._until_death(self._complete(request)) as task:
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError:
                    await self._abort(request, task)
                    raise
        finally:
            del self._requests[sample]

    async def load(self, weights: Weights, *, kv: KV) -> None:
        """As Engine.load.

        Raises:
            TransferFailed: as EngineLife.load.
        """
        async with self._closed():
            with self._until_death(self._update(weights, kv)) as update, waiting(f"{self.name} to load"):
                await asyncio.wait([update])

    async def sleep(self) -> None:
        """As EngineLife.sleep."""
        await self.dialect.sleep()

    async def wake(self) -> None:
        """As EngineLife.wake."""
        await self.dialect.wake()

    def usage(self) -> Usage:
        """The controller's own figures: the server's are its own, and other clients may share it."""
        running = [request for request in self._requests.values() if request.attempt]
        return Usage(
            num_running=len(running),
            num_waiting=len(self._requests) - len(running),
            kv_tokens=sum(len(each.sample.prompt.ids) + each.sample.num_tokens for each in running),
            num_generated=self.counter.num,
            num_prefilled=self._num_prefilled,
        )

    async def died(self) -> str:
        """As EngineLife.died."""
        return str(await asyncio.shield(self._died))

    async def close(self) -> None:
        """As EngineLife.close."""
        if self._watcher:
            self._watcher.cancel()
        for task in self._tasks:
            task.cancel()
        await self._client.aclose()
        await self._server.close()

    async def stream(self, attempt: Attempt) -> AsyncGenerator[Chunk]:
        """Send a request and yield what arrives; the last chunk has `finish`.

        Raises:
            ServerRefused: it is refused.
            EngineDied: the connection broke, or what arrives is malformed.
        """
        path, body = self.dialect.request(attempt)
        num_received = 0
        try:
            async with self._client.stream("POST", path, json=body) as reply:
                if reply.status_code >= 400:
                    text = (await reply.aread()).decode(errors="replace")
                    raise ServerRefused(f"POST {reply.url}", reply.status_code, text)
                async for event in _events(reply):
                    num_received += len((chunk := self.dialect.chunk(event, num_received)).ids)
                    yield chunk
        except httpx.HTTPError as error:
            raise EngineDied(f"{self.name}: POST {path}: {describe(error)}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise EngineDied(f"{self.name}: POST {path}: a malformed reply: {error!r}") from error

    def attempt(self, sample: Sample, max_tokens: int) -> Attempt:
        """A request for the rest of a sample, with an id that was not used before."""
        self._num_attempts += 1
        digest = blake2b(f"{sample.seed} {sample.num_tokens}".encode(), digest_size=8).digest()
        return Attempt(
            id=f"{self._address}-{self._num_attempts:09d}",
            ids=[*sample.prompt.ids, *sample.completion_ids],
            max_tokens=max_tokens,
            seed=int.from_bytes(digest, "little") >> 1,
            greedy=sample.greedy,
            salt=f"{self._address}-{self._version}",
        )

    async def _update(self, weights: Weights, kv: KV) -> None:
        try:
            await self.dialect.pause(kv)
            try:
                await self.dialect.update(weights)
                self._version = weights.version  # before the first token of these weights can arrive
            finally:
                await self.dialect.resume()
        except ServerRefused as refused:
            raise TransferFailed(f"{self.name}: {refused}") from refused

    async def _complete(self, request: _Request) -> None:
        """Ask until the sample has ended. A broken stream is asked for again while the server is well."""
        sample = request.sample
        while sample.finish_reason is None and not request.cancelled:
            await self._open.wait()
            left = self._sampling.max_completion_tokens - sample.num_tokens
            if left <= 0:
                sample.finish_reason = "length"
                return
            request.attempt, request.done = self.attempt(sample, left), sample.num_tokens
            self._num_prefilled += len(request.attempt.ids)
            try:
                ended = await self._receive(request)
            except ServerRefused as refused:
                if refused.status < 500 and refused.status not in (408, 409, 425, 429):
                    raise
                ended, why = False, str(refused)
            except EngineDied as broken:
                ended, why = False, str(broken)
            request.attempt = None
            if not ended and not request.cancelled:
                await self._check_well(why)
                await asyncio.sleep(RETRY_S)

    async def _receive(self, request: _Request) -> bool:
        """Put what arrives into the sample.

        Returns:
            True: the request has ended.

        Raises:
            Evicted: the server ended it unasked.
        """
        sample, attempt = request.sample, request.attempt
        assert attempt is not None
        async with aclosing(self.stream(attempt)) as chunks:
            async for chunk in chunks:
                self._num_prefilled -= chunk.num_cached or 0
                if chunk.ids:
                    self.counter.add(len(chunk.ids))
                    sample.extend(chunk.ids, chunk.logprobs, self._version)
                if chunk.spans:
                    self._attribute(request, chunk.spans)
                if chunk.finish in ("stop", "length"):
                    sample.finish_reason = chunk.finish
                elif chunk.finish == "abort" and not request.cancelled:
                    raise Evicted(f"{self.name} aborted {sample.id} unasked")
        if sample.finish_reason is None and not request.cancelled:
            raise EngineDied(f"{self.name}: the stream of {sample.id} ended early")
        return True

    def _attribute(self, request: _Request, spans: Sequence[VersionSpan]) -> None:
        """Correct the versions of an attempt's tokens by the server's own word. A label that is no version is
        that of the model the server started with."""
        versions = [
            Span(int(span.label) if span.label.isdecimal() else 0, span.end - span.start) for span in spans
        ]
        num_tokens = sum(span.num_tokens for span in versions)
        if num_tokens != request.sample.num_tokens - request.done:
            arrived = request.sample.num_tokens - request.done
            raise EngineDied(f"{self.name}: versions of {num_tokens} tokens came, and {arrived} tokens")
        request.sample.attribute(request.done, versions)

    async def _abort(self, request: _Request, task: asyncio.Future[None]) -> None:
        request.cancelled = True
        deadline_s = now() + ABORT_S
        while not task.done():
            if request.attempt is None or now() >= deadline_s or not await self._send_abort(request.attempt):
                task.cancel()
            with suppress(asyncio.CancelledError):  # the first one is raised again when the tokens are here
                await asyncio.wait([task], timeout=ABORT_AGAIN_S)

    async def _send_abort(self, attempt: Attempt) -> bool:
        """Whether the server may have aborted it."""
        try:
            return await self.dialect.abort(attempt)
        except asyncio.CancelledError:
            return True
        except (EngineDied, ServerRefused):
            return False

    async def _check_well(self, why: str) -> None:
        """Raise EngineDied, with a reason, if the server is not well."""
        try:
            # What computes may be silent for long while it loads weights.
            health = call(self._client, "GET", "/health") if self._num_loads else self.dialect.health()
            await asyncio.wait_for(health, self._health_timeout_s)
        except (EngineDied, ServerRefused, TimeoutError) as error:
            self._end(f"{why}; {str(error) or 'it does not answer'}")
        if self._died.done():
            raise EngineDied(str(self._died.result()))

    async def _watch(self) -> None:
        """Wait until the server has ended or does not answer any more."""
        ended = asyncio.ensure_future(self._server.died())
        every_s = min(HEALTH_EVERY_S, self._health_timeout_s / 2)
        try:
            while not self._died.done():
                await asyncio.wait([ended, self._died], timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    self._end(ended.result())
                else:
                    with suppress(EngineDied):
                        await self._check_well(f"{self.name} at {self._server.url} is not well")
        finally:
            ended.cancel()

    def _end(self, why: str) -> None:
        if not self._died.done():
            self._died.set_result(why)
            for task in self._tasks:
                task.cancel()

    @contextmanager
    def _until_death(self, work: Coroutine[Any, Any, None]) -> Iterator[asyncio.Future[None]]:
        """Run a task for the block to wait for. It is cancelled when the server dies, or with the block.

        Raises:
            EngineDied: the server died.
        """
        self._tasks.add(task := asyncio.ensure_future(work))
        try:
            yield task
            if task.cancelled():
                raise EngineDied(str(self._died.result()) if self._died.done() else f"{self.name} was closed")
            task.result()
        finally:
            self._tasks.discard(task)
            task.cancel()

    @asynccontextmanager
    async def _closed(self) -> AsyncIterator[None]:
        """Hold new requests back."""
        self._num_loads += 1
        self._open.clear()
        try:
            async with self._loading:
                yield
        finally:
            self._num_loads -= 1
            if not self._num_loads:
                self._open.set()


async def _events(reply: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    async for line in reply.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield _decode(data)
