"""Differences between inference servers: requests, replies, routes, and how they are started.
extras/http/engine.py does the rest. A dialect is made by its own `detect`, from what the server says."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from tailrace.contracts.engine import Capabilities
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.weights import Link, Weights
from tailrace.drivers.engine.settings import ServerEngineSettings
from tailrace.errors import ConfigError, EngineDied, ServerRefused
from tailrace.types import KV, Span

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One streaming request for the rest of a completion.

    Args:
        id: of this request alone. A second attempt for the same sample has another id. No id is a prefix of
            another.
        ids: the prompt and the completion so far.
        max_tokens: tokens that may still come, at least 1.
        seed: of this request; a resumed request has another one, because servers count draws from its start.
        greedy: take the most likely token; the seed then has no effect.
        salt: requests with different salts share no prefix cache.
        temperature, top_p: in place of those of the settings.
        version: of the weights that it is for, where a server has several; None: the newest.
    """

    id: str
    ids: Sequence[int]
    max_tokens: int
    seed: int
    greedy: bool
    salt: str
    temperature: float | None = None
    top_p: float | None = None
    version: int | None = None

    def temperature_or(self, default: float) -> float:
        """Return the temperature to ask for: 0 if greedy, else its own or the default."""
        if self.greedy:
            return 0.0
        return default if self.temperature is None else self.temperature


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream.

    Args:
        ids: tokens since the last event.
        logprobs: one for each of them, at the sampling temperature, over the whole vocabulary.
        finish: why the output has ended; None: more events come.
        spans: versions of all tokens of the attempt, where the server says them; only with `finish`.
        num_cached: positions of the prompt that came from the prefix cache; None: the server does not say.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: Finish | None = None
    spans: Sequence[Span] = ()
    num_cached: int | None = None


@dataclass(slots=True, kw_only=True)
class Dialect:
    """The protocol of one server.

    Coroutines raise ServerRefused if the server refuses, and EngineDied if it cannot be reached.
    """

    client: httpx.AsyncClient
    server: str
    """Name and version, for messages."""
    sampling: SamplingSettings
    stop_token_ids: list[int]
    """Every token that ends a completion."""
    dtype: str | None = None
    """Such as "bfloat16"; None: the server does not say."""
    max_context: int | None = None
    """Tokens of a prompt and its completion together; None: the server does not say."""
    capabilities: Capabilities = Capabilities()  # noqa: RUF009 (frozen)
    alive_route: str | None = None
    """A route that a well server answers at any time, also while it loads weights. None: `health` is one."""
    ends_requests: bool = False
    """An update needs a server without requests, or the server cannot say which weights generated a token.
    Requests in flight, but for those of pinned samples, are ended and go on after the update from their
    tokens."""
    num_versions: int = 1
    """Versions that it has at the same time, the last ones."""
    missing: tuple[str, ...] = ()
    """Each thing that the server lacks for reinforcement learning: the missing route, and the flag or the
    environment variable that adds it."""

    def request(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
        """The route of a streaming generation, and its JSON body."""
        raise NotImplementedError

    def chunk(self, event: Mapping[str, Any], num_received: int) -> Chunk:
        """Parse one event of the stream. Raises a ServerRefused if the event is an error; LookupError,
        TypeError or ValueError if it is malformed. `num_received`: tokens that earlier events of this attempt
        brought."""
        raise NotImplementedError

    async def score(self, attempt: Attempt, num_prefix: int, *, cached: bool) -> list[float]:
        """The log-probs of the tokens of `attempt.ids` after a prefix. With `cached` the prefix may come from
        the cache. Only where `capabilities.scores`."""
        raise AssertionError(f"{self.server} scores nothing")

    async def abort(self, attempt: Attempt) -> bool:
        """End a request; its stream then ends with finish "abort". False: the server has no route for that,
        and the caller closes the stream."""
        return False

    async def pause(self, kv: KV) -> None:
        """Stop between two decode steps, and keep every request."""

    async def resume(self) -> None:
        """Go on."""

    async def update(self, weights: Weights, link: Link) -> None:
        """Load weights, and label them with `label_of`, while paused. Where the trainer's process sends them
        over the link, it does so at the same time."""

    async def sleep(self) -> None:
        """Give the device's memory back; no request runs."""

    async def wake(self) -> None:
        """Take the memory back. The caller then loads the newest weights."""

    async def health(self) -> None:
        """Return if the server is well."""


def label_of(version: int) -> str:
    """The label of a version of the weights at a server."""
    return str(version)


def spans_of(entries: Sequence[Mapping[str, Any]] | None) -> list[Span]:
    """The versions of all tokens of an attempt, as vLLM and SGLang say them. A label that is no version is
    that of the model that the server started with."""
    spans = [(str(each["version"]), int(each["end"]) - int(each["start"])) for each in entries or ()]
    return [Span(int(label) if label.isdecimal() else 0, num) for label, num in spans if num]


def finish_of(reason: str | None) -> Finish | None:
    """A server's finish reason. Raises ValueError if it is another one."""
    match reason:
        case None | "stop" | "length" | "abort":
            return reason
    raise ValueError(f"the finish reason {reason!r}")


async def call(
    client: httpx.AsyncClient,
    method: Literal["GET", "POST"],
    route: str,
    *,
    params: Mapping[str, str] | None = None,
    body: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Make one request, and return its JSON reply, or None if the reply is not JSON.

    Args:
        timeout_s: None: wait as long as the server takes.

    Raises:
        ServerRefused: the status is 400 or greater.
        EngineDied: the server cannot be reached, or did not answer in time.
    """
    try:
        reply = await client.request(method, route, params=params, json=body, timeout=timeout_s)
    except httpx.HTTPError as error:
        raise EngineDied(f"{method} {client.base_url}{route}: {describe(error)}") from error
    if reply.status_code >= 400:
        raise ServerRefused(f"{method} {client.base_url}{route}", reply.status_code, reply.text)
    try:
        return json.loads(reply.content)
    except ValueError:
        return None


def describe(error: httpx.HTTPError) -> str:
    """An error of the connection in words; some have no message of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of a server, with environment variables beside those of this process."""

    command: tuple[str, ...]
    env: Mapping[str, str]


def find_interpreter(settings: ServerEngineSettings) -> str:
    """Return the Python interpreter that the settings, or $VLLM_PYTHON or $SGLANG_PYTHON, name. Raises a
    ConfigError if none is named, it cannot be started, or its environment lacks the server."""
    server, variable = settings.server, f"{settings.kind.upper()}_PYTHON"
    python = settings.python or os.environ.get(variable)
    remedy = f"name the interpreter of an environment with {server} here or in ${variable}"
    if not python:
        problem = f"the run must start {server} and does not know with what"
        raise ConfigError("engine.python", None, problem, remedy)
    # To import the server would take many seconds.
    question = f"from importlib.util import find_spec; print(find_spec({settings.kind!r}) or '')"
    try:
        done = subprocess.run([python, "-c", question], capture_output=True, check=False)
    except OSError as error:
        raise ConfigError("engine.python", python, f"it cannot be started ({error})", remedy) from error
    if not done.stdout.strip():
        raise ConfigError("engine.python", python, f"its environment has no {server}", remedy)
    return python
