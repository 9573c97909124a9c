"""The model and the scheduler of a fake server.

A token is a checksum of all tokens before it, of the weights, and of the request's seed unless it is greedy.
Each has a text of one character.
"""

import asyncio
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

BLOCK = 4
"""Positions of a block of the prefix cache."""
_order = itertools.count()


def text_of(ids: Sequence[int]) -> str:
    """The text of tokens."""
    return "".join(chr(ord("0") + id) for id in ids)


@dataclass(eq=False)
class Request:
    """What a server was asked, and its own record of what it answered.

    Args:
        ids: the prompt.
        stop: strings that end it; they are looked for in its own tokens.
        tokens, logprobs: what it has generated.
        weights: for each token, the version of the weights that generated it.
        labels: for each token, what the server was told to call these weights.
        order: of all requests of all servers.
    """

    id: str
    ids: list[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    salt: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    num_cached: int = 0
    num_prefills: int = 0
    finish: Literal["stop", "length", "abort"] | None = None
    order: int = field(default_factory=lambda: next(_order))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    checksum: int = 0
    version_at_arrival: int = 0

    def spans(self) -> list[dict[str, object]]:
        """The labels of the tokens, as servers report them."""
        found: list[dict[str, object]] = []
        for label, group in itertools.groupby(range(len(self.labels)), self.labels.__getitem__):
            places = list(group)
            found.append({"version": label, "start": places[0], "end": places[-1] + 1})
        return found


class Model:
    """Decodes all running requests together, step by step.

    Args:
        slots: requests that run together.
        step_s: time of a decode step.
        report_every: tokens after which a request reports them; all are reported before a pause.
    """

    def __init__(self, vocabulary: int, slots: int, step_s: float, report_every: int) -> None:
        self.vocabulary, self.slots, self.step_s = vocabulary, slots, step_s
        self._report_every = report_every
        self.version, self.label = 0, "default"
        self.requests: list[Request] = []
        """All there ever were, in order."""
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.ending: list[Request] = []
        """Running requests that were aborted and end with their next token."""
        self.limits_first = False
        """An abort, and the limit, are looked at before the stops."""
        self._stopped = False
        self.has_weights = True
        """False while an update is under way, and after a sleep that gave them up."""
        self.ignores_salt = False
        self.violations: list[str] = []
        """What a real server would have answered with garbage."""
        self._cache: dict[tuple[str, int], int] = {}
        """Blocks of the prefix cache: salt and checksum of the tokens, and the version of the weights."""

    @property
    def stopped(self) -> bool:
        """No step is computed: the server is paused, asleep or hung."""
        return self._stopped

    @stopped.setter
    def stopped(self, stopped: bool) -> None:
        self._stopped = stopped
        for request in self.running:
            request.changed.set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if not self.stopped and (self.running or self.waiting):
                self._step()

    def add(self, request: Request) -> None:
        request.version_at_arrival = self.version
        self.requests.append(request)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        if request.finish is None:
            self._end(request, "abort")

    def retract(self) -> None:
        """Give up the KV cache of all running requests; they are computed again."""
        self.waiting = [*self.running, *self.waiting]
        self.running = []

    def clear_cache(self) -> None:
        self._cache.clear()

    def _step(self) -> None:
        if not self.has_weights:
            self.violations.append("tokens were generated without weights")
        while self.waiting and len(self.running) < self.slots:
            self._prefill(self.waiting.pop(0))
        for request in list(self.running):
            token, logprob = self._next(request)
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.weights.append(self.version)
            request.labels.append(self.label)
            request.checksum = _checksum([token], request.checksum)
            text = text_of(request.tokens) if request.stop else ""
            stops = token in request.stop_ids or any(string in text for string in request.stop)
            is_full = len(request.tokens) >= request.max_tokens
            if request in self.ending:
                self.ending.remove(request)
                self._end(request, "abort")
            elif stops and not (is_full and self.limits_first):
                self._end(request, "stop")
            elif is_full:
                self._end(request, "length")
            elif len(request.tokens) % self._report_every == 0:
                request.changed.set()

    def _prefill(self, request: Request) -> None:
        ids = [*request.ids, *request.tokens]
        blocks = [
            ("" if self.ignores_salt else request.salt, _checksum(ids[:end]))
            for end in range(BLOCK, len(ids), BLOCK)
        ]
        cached = list(itertools.takewhile(self._cache.__contains__, blocks))
        # A request that waited during an update may keep the older prefix, as a running one does.
        if any(self._cache[block] < request.version_at_arrival for block in cached):
            self.violations.append("a request was computed from the prefix of older weights")
        self._cache |= dict.fromkeys(blocks[len(cached) :], self.version)
        request.num_cached = len(cached) * BLOCK
        request.num_prefills += 1
        request.checksum = _checksum(ids)
        self.running.append(request)

    def _next(self, request: Request) -> tuple[int, float]:
        drawn = f"{self.version} {request.seed}".encode()
        value = zlib.crc32(drawn, request.checksum)
        return value % self.vocabulary, -(1 + value % 997) / 256

    def _end(self, request: Request, finish: Literal["stop", "length", "abort"]) -> None:
        request.finish = finish
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        request.changed.set()


def _checksum(ids: Sequence[int], before: int = 0) -> int:
    return zlib.crc32(b"".join(id.to_bytes(4, "little") for id in ids), before)
