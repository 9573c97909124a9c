"""An engine behind HTTP: tokens in, tokens out, over the dialect of the server (extras/http/dialect.py).

A completion is one streaming request, or several after one another: each continues from the tokens that
have arrived, under an id of its own. So a request that is cancelled, or whose connection breaks, loses
nothing that has arrived, and no token comes twice.
"""

import asyncio
import os
import re
import ssl
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
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import Any, Protocol, TypeVar

import httpx
import msgspec
from typing_extensions import override

from tailrace.clock import ended, now, waiting
from tailrace.contracts.engine import (
    Arrival,
    Capabilities,
    DecodeSums,
    EngineProcess,
    TokenCounter,
    Usage,
    with_version,
)
from tailrace.contracts.weights import DTYPE, Link, Probe, TensorInfo, Weights
from tailrace.drivers.engine.proof import ProbeAnswer, Prover
from tailrace.drivers.engine.stops import Decoder, first_stop, stop_window
from tailrace.drivers.weights.manifest import check_tensors
from tailrace.drivers.weights.transfers import Receiver, Transfers
from tailrace.errors import EngineDied, Evicted, ServerRefused, TransferFailed, VersionGone
from tailrace.extras.http.dialect import Attempt, Chunk, Dialect, call, describe
from tailrace.types import KV, Sample, Span

_DRAFTS = {"checked": "draft_tokens", "accepted": "accepted_tokens", "drafted": "drafts"}
_COUNTER = r"^vllm:%s_total(?:\{[^}]*\})? ([0-9.e+]+)$"
_CACHE = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'\b(block_size|num_gpu_blocks)="(\d+)"')


def read_figures(page: str) -> Usage:
    """The figures of the KV cache and the numbers of drafted tokens on a metrics page."""
    num_preempted, *drafts = (
        sum(int(float(count)) for count in re.findall(_COUNTER % name, page, re.MULTILINE))
        for name in ("num_preemptions", *(f"spec_decode_num_{each}" for each in _DRAFTS.values()))
    )
    capacities = [dict(_LABEL.findall(labels)) for labels in _CACHE.findall(page)]
    known = [int(each["block_size"]) * int(each["num_gpu_blocks"]) for each in capacities if len(each) == 2]
    return Usage(
        num_preempted=num_preempted,
        kv_capacity=sum(known) if known else None,
        decoded=DecodeSums(**dict(zip(_DRAFTS, drafts, strict=True))),
    )


TOKEN_VARIABLE = "TAILRACE_TOKEN"
"""The environment variable with the bearer token that requests to servers have."""
_decode: Callable[[str], Any] = msgspec.json.decode
T = TypeVar("T")


@dataclass(slots=True)
class Request:
    """A sample that is being generated."""

    sample: Sample
    attempt: Attempt | None = None
    """The open attempt at the server; None: there is none."""
    start: int = 0
    """The sample's tokens at the start of the attempt."""
    cancelled: bool = False
    """Whether the request must not be sent again."""


class Server(Protocol):
    """An inference server: its address, and the process that keeps it running."""

    url: str

    async def ready(self) -> None:
        """Wait until it accepts connections. Raises TailraceError if it cannot start."""

    async def died(self) -> str:
        """Wait until it has ended, and return how."""

    async def close(self) -> None:
        """End it, if it was started by this run."""


@cache
def _tls() -> ssl.SSLContext:
    """Shared: else httpx reads all certificates for each connection, which takes tens of milliseconds."""
    return httpx.create_ssl_context(trust_env=False)


class Connection:
    """The way to one server.

    Args:
        timeout_s: seconds without an answer after which the server counts as dead. A stream may be silent for
            longer.
    """

    def __init__(self, name: str, url: str, timeout_s: float) -> None:
        self.name, self.url, self.timeout_s = name, url, timeout_s
        self.dialect: Dialect
        """Set once the server has been asked what it can do."""
        self.figures = Usage()
        """Usage at the last deep health check, with the preemptions and the drafts since the first one."""
        self._first: Usage | None = None
        # No connection is used twice: a server may close an idle one at the moment of the next request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(timeout_s, read=None, pool=None)
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False, verify=_tls()
        )
        self._address = os.urandom(6).hex()
        """Tells the requests and the prefix cache of this connection from all others at the server."""
        self._num_attempts = 0

    async def detect(self, detect: Callable[[httpx.AsyncClient], Awaitable[Dialect]]) -> None:
        """Ask the server what it can do."""
        self.dialect = await detect(self.client)

    def room(self, sample: Sample) -> int:
        """Tokens that may still come in the sample's present turn; not above 0: none."""
        context = (self.dialect.max_context or inf) - sample.num_context_tokens
        return int(min(self.dialect.sampling.room(sample), context))

    def attempt(self, sample: Sample, max_tokens: int, version: int) -> Attempt:
        """A request for the rest of a sample's present turn, with an id that was not used before."""
        asked = self.probe(sample.context_ids, max_tokens, seed=sample.request_seed, salt=str(version))
        asked = replace(asked, greedy=sample.greedy, version=version)
        return replace(asked, temperature=sample.temperature, top_p=sample.top_p)

    def probe(self, ids: Sequence[int], max_tokens: int, *, seed: int, salt: str) -> Attempt:
        """Any request, with an id that was not used before."""
        self._num_attempts += 1
        id, salt = f"{self._address}-{self._num_attempts:09d}", f"{self._address}-{salt}"
        return Attempt(id, ids, max_tokens, seed, greedy=False, salt=salt)

    async def stream(self, attempt: Attempt) -> AsyncGenerator[Chunk]:
        """Send a request and yield what arrives; the last chunks have `finish`.

        Raises:
            ServerRefused: it is refused.
            EngineDied: the connection broke, or what arrives is malformed.
        """
        path, body = self.dialect.request(attempt)
        num_received = 0
        try:
            async with self.client.stream("POST", path, json=body) as reply:
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

    async def whole(self, attempt: Attempt) -> Chunk:
        """Send a request and return all that arrives as one chunk. Raises as `stream`."""
        chunks = [chunk async for chunk in self.stream(attempt)]
        return Chunk(
            [id for chunk in chunks for id in chunk.ids],
            [logprob for chunk in chunks for logprob in chunk.logprobs],
            next((chunk.finish for chunk in chunks if chunk.finish), None),
            num_cached=next((chunk.num_cached for chunk in chunks if chunk.num_cached is not None), None),
        )

    async def health(self, *, deep: bool) -> None:
        """Raises EngineDied if the server is not well. `deep` asks what computes, too, which may be silent
        for long while it loads weights."""
        route = None if deep else self.dialect.alive_route
        check = call(self.client, "GET", route) if route else self.dialect.health()
        try:
            await asyncio.wait_for(check, self.timeout_s)
        except TimeoutError:
            raise EngineDied(f"{self.name} at {self.url} has not answered for {self.timeout_s:g} s") from None
        except ServerRefused as refused:
            raise EngineDied(f"{self.name}: {refused}") from refused
        if deep:
            with suppress(httpx.HTTPError):
                read = read_figures((await self.client.get("/metrics", timeout=self.timeout_s)).text)
                first = self._first = self._first or read
                num_preempted, decoded = (
                    read.num_preempted - first.num_preempted,
                    read.decoded - first.decoded,
                )
                self.figures = msgspec.structs.replace(read, num_preempted=num_preempted, decoded=decoded)

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()


async def _events(reply: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    async for line in reply.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield _decode(data)


ABORT_S, ABORT_AGAIN_S = 30.0, 0.5
"""Seconds that an aborted request may take to end before its connection is closed, and between two calls to
abort it: the first may reach the server before the request does."""
FRUITLESS = 5
"""Replies to one sample that break in sequence, without a token; then the server counts as dead."""
RETRY_S = 1.0
"""The pause before a request is sent again that was not answered or refused for now."""
HEALTH_EVERY_S = 5.0
"""Seconds between two health checks, at most."""
ABORTED_S = 0.05
"""The pause before the server is asked again to end requests that an update may not meet."""
_FOR_NOW = (408, 409, 425, 429)
"""Statuses below 500 after which a request may be sent again."""


class HttpEngine(EngineProcess):
    """A connection to a server.

    Args:
        detect: makes the dialect.
        check: the self-tests at the start (extras/http/self_test.py).
        transfers: those of the trainer.
        expected: the tensors of the model; anything else is refused before the server is touched.
        decode: as the server does.
        dtype: of the server.
        adapter: it gets adapters in place of whole weights.
        num_ranks: processes of the server that receive weights.
        standalone: each link has an address of its own.
    """

    def __init__(
        self,
        name: str,
        server: Server,
        detect: Callable[[httpx.AsyncClient], Awaitable[Dialect]],
        *,
        health_timeout_s: float,
        check: Callable[["HttpEngine"], Awaitable[None]],
        transfers: Transfers,
        expected: Sequence[TensorInfo],
        decode: Decoder,
        dtype: DTYPE = "float32",
        adapter: bool = False,
        num_ranks: int = 1,
        standalone: bool = False,
    ) -> None:
        self.name, self.counter = name, TokenCounter()
        self.capabilities = Capabilities()
        self.connection = Connection(name, server.url, health_timeout_s)
        self._server, self._detect, self._check = server, detect, check
        self._transfers, self._expected, self._decode = transfers, expected, decode
        self._new_prover = partial(Prover, exact=False, dtype=dtype, adapter=adapter)
        self._prover: Prover | None = None
        self.arrival: Arrival | None = None
        self._receiver = Receiver(name, num_ranks, standalone)
        self._versions: tuple[int, ...] = (0,)
        """Versions of the weights that the server was told to load, the newest last."""
        self._num_prefilled = 0
        self._requests: dict[Sample, Request] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._loading = asyncio.Lock()
        self._num_loads = 0
        """Loads that are under way or wait."""
        self._open = asyncio.Event()
        """No load is under way or waits. New requests wait for it, so that they get the new weights."""
        self._open.set()
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def dialect(self) -> Dialect:
        """The protocol of the server."""
        return self.connection.dialect

    @override
    async def ready(self) -> None:
        await self._server.ready()
        await self.connection.detect(self._detect)
        self.capabilities = self.dialect.capabilities
        self._watcher = asyncio.create_task(self._watch())
        await self._check(self)

    @override
    async def generate(self, sample: Sample) -> None:
        """A cancelled call aborts the request at the server, and returns once its last
        token is in the sample. Cancelling it again in the meantime has no effect."""
        request = self._requests[sample] = Request(sample)
        try:
            with self._until_death(self._complete(request)) as task:
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError:
                    await self._abort(request, task)
                    raise
        finally:
            del self._requests[sample]

    @override
    async def load(self, weights: Weights, *, kv: KV) -> None:
        """Raises WeightsRefused if the weights are not those of the model. The server was not asked then."""
        async with self._closed():
            if weights.tensors:
                check_tensors(weights.tensors, self._expected)
            with waiting(f"{self.name} to load"):
                await self._transfers.load(weights, self._receiver, partial(self._load, kv))

    @override
    async def sleep(self) -> None:
        await self._unless_dead(self.dialect.sleep())

    @override
    async def wake(self) -> None:
        await self._unless_dead(self.dialect.wake())

    @override
    def usage(self) -> Usage:
        """The controller's own figures: other clients may share the server."""
        running = [request for request in self._requests.values() if request.attempt]
        return msgspec.structs.replace(
            self.connection.figures,
            num_running=len(running),
            num_waiting=len(self._requests) - len(running),
            kv_tokens=sum(each.sample.num_context_tokens for each in running),
            num_generated=self.counter.num,
            num_prefilled=self._num_prefilled,
        )

    @override
    async def died(self) -> str:
        return await asyncio.shield(self._died)

    @override
    async def close(self) -> None:
        if self._watcher:
            self._watcher.cancel()
        for task in self._tasks:
            task.cancel()
        await self.connection.close()
        await self._server.close()

    async def _load(self, kv: KV, weights: Weights, link: Link) -> None:
        await self._unless_dead(self._proven(weights, kv, link))

    async def _proven(self, weights: Weights, kv: KV, link: Link) -> None:
        """Load weights, and answer their probe."""
        probe, self.arrival = weights.probe if self.capabilities.scores else None, None
        if probe and self._prover is None:
            self._prover = self._new_prover(probe, await self._answer(probe))
        await self._update(weights, kv, link)
        if self._prover and probe and probe.expected:
            start_s = now()
            answer = await self._answer(probe)
            self.arrival = self._prover.judge(weights.version, probe, answer, now() - start_s)

    async def _answer(self, probe: Probe) -> ProbeAnswer:
        """The warm question is asked as any request is; what the last one left in the cache may answer it."""
        try:
            warm = await self.score(probe.ids, probe.num_prefix, cached=True)
            cold = await self.score(probe.ids, probe.num_prefix)
        except (ServerRefused, LookupError, TypeError, ValueError) as error:
            raise TransferFailed(f"{self.name} does not answer the probe: {error!r}") from error
        return ProbeAnswer(warm, cold)

    @override
    async def score(self, ids: Sequence[int], num_prefix: int, *, cached: bool = False) -> list[float]:
        attempt = self.connection.probe(ids, 1, seed=0, salt=str(self._versions[-1]))
        return await self._unless_dead(self.dialect.score(attempt, num_prefix, cached=cached))

    async def _update(self, weights: Weights, kv: KV, link: Link) -> None:
        try:
            await self.dialect.pause(kv)
            try:
                if self.dialect.ends_requests:
                    await self._end_attempts()
                await self.dialect.update(weights, link)
                # before the first token of these weights can arrive
                self._versions = with_version(self._versions, weights.version, self.dialect.num_versions)
            finally:
                await self.dialect.resume()
        except ServerRefused as refused:
            raise TransferFailed(f"{self.name}: {refused}") from refused

    async def _complete(self, request: Request) -> None:
        """Ask until the turn has ended. A broken stream is asked for again while the server is well."""
        sample, num_fruitless = request.sample, 0
        while sample.finish_reason is None and not request.cancelled:
            await self._open.wait()
            if sample.pin not in (None, *self._versions):
                raise VersionGone(f"{self.name} does not have version {sample.pin}")
            left = self.connection.room(sample)
            if left <= 0:
                sample.finish_reason = "length"
                return
            request.attempt = self.connection.attempt(sample, left, self._version_of(sample))
            request.start = sample.num_tokens
            self._num_prefilled += len(request.attempt.ids)
            try:
                await self._receive(request, request.attempt)
                request.attempt = None
            except ServerRefused as refused:
                if refused.status == 404:  # the model, the adapter and the route were there
                    raise EngineDied(f"{self.name} was started again: {refused}") from refused
                if refused.status < 500 and refused.status not in _FOR_NOW:
                    raise
                await self._before_retry(request)
            except EngineDied as broken:
                num_fruitless = 0 if sample.num_tokens > request.start else num_fruitless + 1
                if num_fruitless == FRUITLESS:
                    self._end(str(broken))
                    raise
                await self._before_retry(request)

    async def _receive(self, request: Request, attempt: Attempt) -> None:
        """Put what arrives into the sample, until the request has ended. Tokens after the end of the turn are
        dropped, and not counted. Raises Evicted if the server ended it unasked."""
        sample, ended, num_dropped = request.sample, False, 0
        async with aclosing(self.connection.stream(attempt)) as chunks:
            async for chunk in chunks:
                self._num_prefilled -= chunk.num_cached or 0
                end = 0 if sample.finish_reason else self._end_in(request, chunk)
                num_dropped += len(chunk.ids) - len(ids := chunk.ids[:end])
                if ids:
                    self.counter.add(len(ids))
                    sample.extend(ids, chunk.logprobs[:end], self._version_of(sample))
                if chunk.spans:
                    self._attribute(request, attempt, chunk.spans, num_dropped)
                ended = ended or chunk.finish is not None
                if end:
                    sample.finish_reason = "stop"
                    if not ended and not await self._send_abort(attempt):
                        return
                elif end is None and chunk.finish in ("stop", "length"):
                    sample.finish_reason = chunk.finish
        if not ended:
            raise EngineDied(f"{self.name}: the stream of {sample.id} ended early")
        if sample.finish_reason is None and not request.cancelled and not self._num_loads:
            raise Evicted(f"{self.name} aborted {sample.id} unasked")

    def _end_in(self, request: Request, chunk: Chunk) -> int | None:
        """The tokens of a chunk up to the one that ends the turn; None: the server will say it. A server sees
        the stop strings in its own attempt, and SGLang no stop where it aborts or the limit is reached."""
        sample, strings = request.sample, self.dialect.sampling.stop
        window = stop_window(strings)
        if sample.num_tokens - request.start >= window and chunk.finish not in ("abort", "length"):
            return None
        before = sample.completion_ids[max(sample.turn_start, sample.num_tokens - window - 2) :]
        return first_stop(self._decode, before, chunk.ids, strings, self.dialect.stop_token_ids)

    def _version_of(self, sample: Sample) -> int:
        return self._versions[-1] if sample.pin is None else sample.pin

    async def _end_attempts(self) -> None:
        """End all requests at the server, also those that reach it late, but for those of pinned samples. The
        load holds their successors."""
        while attempts := [
            each.attempt for each in self._requests.values() if each.attempt and each.sample.pin is None
        ]:
            await asyncio.gather(*map(self._send_abort, attempts))
            await asyncio.sleep(ABORTED_S)

    def _attribute(self, request: Request, attempt: Attempt, spans: Sequence[Span], num_dropped: int) -> None:
        """Correct the versions of an attempt's tokens by the server's own word."""
        told, num_tokens = sum(span.num_tokens for span in spans), request.sample.num_tokens
        if told != (arrived := num_tokens - request.start + num_dropped):
            raise EngineDied(f"{self.name}: versions of {told} tokens came with {arrived} tokens")
        request.sample.attribute(request.start, spans)
        request.sample.attribute(num_tokens, ())
        if min(span.version for span in spans) < (attempt.version or 0):
            self._end(f"{self.name} was started again: it has lost version {attempt.version}")

    async def _before_retry(self, request: Request) -> None:
        """Raise EngineDied if the server is not well, else make a pause."""
        request.attempt = None
        if not request.cancelled:
            await self._check_health()
            await asyncio.sleep(RETRY_S)

    async def _abort(self, request: Request, task: asyncio.Future[None]) -> None:
        """Returns once the tokens are here. A cancellation takes effect after it."""
        request.cancelled = True
        deadline_s = now() + ABORT_S

        async def abort() -> None:
            while not task.done():
                late = now() >= deadline_s
                if request.attempt is None or late or not await self._send_abort(request.attempt):
                    task.cancel()
                await asyncio.wait([task], timeout=ABORT_AGAIN_S)

        await ended(asyncio.ensure_future(abort()))

    async def _send_abort(self, attempt: Attempt) -> bool:
        """Whether the server may have aborted it. One that does not answer in time may; the end of the stream
        has the versions of its tokens."""
        try:
            return await self.dialect.abort(attempt)
        except EngineDied:
            return True
        except ServerRefused:
            return False

    async def _check_health(self) -> None:
        """Raise EngineDied if the server is not well; it then has died for good."""
        try:
            await self.connection.health(deep=not self._num_loads)
        except EngineDied as died:
            self._end(str(died))
            raise

    async def _watch(self) -> None:
        """Wait until the server has ended or does not answer any more."""
        ended = asyncio.ensure_future(self._server.died())
        every_s = min(HEALTH_EVERY_S, self.connection.timeout_s / 2)
        try:
            while not self._died.done():
                await asyncio.wait([ended, self._died], timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    self._end(ended.result())
                else:
                    with suppress(EngineDied):
                        await self._check_health()
        finally:
            ended.cancel()

    def _end(self, why: str) -> None:
        if not self._died.done():
            self._died.set_result(why)
            for task in self._tasks:
                task.cancel()

    async def _unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        with self._until_death(work) as task:
            await asyncio.wait([task])
        return task.result()

    @contextmanager
    def _until_death(self, work: Coroutine[Any, Any, T]) -> Iterator[asyncio.Future[T]]:
        """Run a task that the block waits for. The server's death (EngineDied) or the block cancels it."""
        self._tasks.add(task := asyncio.ensure_future(work))
        try:
            yield task
            if task.cancelled():
                raise EngineDied(self._died.result() if self._died.done() else f"{self.name} was closed")
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
