"""A connection to an inference server: its requests, one stream for each, and its health."""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import inf
from typing import Any, Protocol

import httpx
import msgspec

from tailrace.engine.dialect import Attempt, Chunk, Dialect, call, describe
from tailrace.engine.prometheus import CacheFigures, read_figures
from tailrace.errors import EngineDied, ServerRefused
from tailrace.types import Sample

TOKEN_VARIABLE = "TAILRACE_TOKEN"
"""The environment variable with the bearer token that requests to servers have."""
_decode: Callable[[str], Any] = msgspec.json.decode


@dataclass(slots=True)
class Request:
    """A sample that is being generated.

    Args:
        attempt: what the server was asked; None: nothing at present.
        start: the sample's tokens at the start of the attempt.
        cancelled: it must not be asked again.
    """

    sample: Sample
    attempt: Attempt | None = None
    start: int = 0
    cancelled: bool = False


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
        self._max_context_tokens: float = inf
        """Of a request and its answer, as the server says."""
        self.figures = CacheFigures()
        """As of the last deep health check."""
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
        """Ask the server what it can do, and how long a request and its answer may be."""
        self.dialect = await detect(self.client)
        self._max_context_tokens = (await self.dialect.model()).max_context or inf

    def room(self, sample: Sample, max_completion_tokens: int) -> int:
        """Tokens that may still come in the sample's present turn; not above 0: none."""
        context = self._max_context_tokens - sample.num_context_tokens
        return int(min(min(max_completion_tokens, sample.turn_limit) - sample.num_tokens, context))

    def attempt(self, sample: Sample, max_tokens: int, version: int) -> Attempt:
        """A request for the rest of a sample's present turn, with an id that was not used before."""
        seed = blake2b(f"{sample.seed} {sample.num_tokens}".encode(), digest_size=8).digest()
        return self.probe(
            sample.context_ids,
            max_tokens,
            seed=int.from_bytes(seed, "little") >> 1,
            greedy=sample.greedy,
            salt=str(version),
            temperature=sample.temperature,
        )

    def probe(
        self,
        ids: Sequence[int],
        max_tokens: int,
        *,
        seed: int,
        greedy: bool = False,
        salt: str,
        temperature: float | None = None,
    ) -> Attempt:
        """Any request, with an id that was not used before."""
        self._num_attempts += 1
        id = f"{self._address}-{self._num_attempts:09d}"
        return Attempt(id, ids, max_tokens, seed, greedy, f"{self._address}-{salt}", temperature)

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
        """Return if the server is well.

        Args:
            deep: ask what computes, too. It may be silent for long while it loads weights.

        Raises:
            EngineDied: it is not.
        """
        check = self.dialect.health() if deep else call(self.client, "GET", self.dialect.alive_route)
        try:
            await asyncio.wait_for(check, self.timeout_s)
        except TimeoutError:
            raise EngineDied(f"{self.name} at {self.url} has not answered for {self.timeout_s:g} s") from None
        except ServerRefused as refused:
            raise EngineDied(f"{self.name}: {refused}") from refused
        if deep:
            with suppress(httpx.HTTPError):
                self.figures = read_figures((await self.client.get("/metrics", timeout=self.timeout_s)).text)

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()


async def _events(reply: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    async for line in reply.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield _decode(data)
