"""Router: chooses the engine for a request: the one that served the sample last, or the least loaded one of
those that may serve it (loads.py, versions.py)."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from math import inf

from tailrace.clock import Signal, now
from tailrace.contracts.engine import Engine
from tailrace.errors import Evicted, LedgerError, VersionGone
from tailrace.record.events import (
    Decoded,
    EngineStateChanged,
    Preempted,
    Recorder,
    RequestEnded,
    RequestStarted,
)
from tailrace.rollout.loads import EngineLoads
from tailrace.rollout.versions import PinnedVersions
from tailrace.types import Sample

SLACK = 1 / 8
"""Share of an engine's slots. The engine that served a request before gets it again if its load is at most
this much above the least loaded engine's, because it may still hold the request's KV cache."""

DECODED_EVERY_S = 1.0
"""Decode steps are recorded in sums over at least this time, while the engine has requests."""

Serve = Callable[[Sample], Awaitable[None]]
"""Generates the rest of a turn, or verifies one (`Sample.verified_turn`). It may be cancelled at any
token."""
Written = Callable[[], Awaitable[None]]
"""Waits until the samples, as they stand, would survive a kill of the run."""
RunEpisode = Callable[[Sample, Serve, Recorder, Written], Awaitable[None]]
"""Extends a sample until it ends, with a function that generates the rest of a turn."""


async def not_written() -> None:
    """`Written` of a run that is not stored."""


async def single_turn(sample: Sample, serve: Serve, recorder: Recorder, written: Written) -> None:
    """Generate a sample that is one response."""
    await serve(sample)


class Router:
    """Serves a sample on the engine that served it last if that has room, else on the least loaded engine. If
    an engine gives a request back, another engine continues it.

    Args:
        run_episode: how turns become a sample; None: a sample is one turn.
        written: waits until the ledger of the run has been written.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        recorder: Recorder,
        run_episode: RunEpisode | None = None,
        written: Written = not_written,
        version: int = 0,
    ) -> None:
        self.engines, self._run_episode, self._written = engines, run_episode or single_turn, written
        self.changed = Signal()
        self.max_age: int | None = None
        """Publications by which a token may be older than the weights that continue it (`Sample.max_age`)."""
        self.on_changed: Callable[[], None] = lambda: None
        self.serving: list[dict[Sample, asyncio.Task[None]]] = [{} for _ in engines]
        """The requests of each engine."""
        self.moves: dict[Sample, int | None] = {}
        """Requests that leave their engine for another one; None: any that serves their version."""
        self._recorder = recorder
        self.loads = EngineLoads(engines)
        self.versions = PinnedVersions(engines, self.loads, version)
        self._numbers = {engine.name: number for number, engine in enumerate(engines)}
        self._preempted = {engine.name: engine.usage().num_preempted for engine in engines}
        self._decoded = [engine.usage().decoded for engine in engines]
        self._busy_since_s = [0.0] * len(engines)
        for engine in engines:
            engine.on_state = partial(self._on_engine_changed, engine)

    @property
    def num_generated(self) -> int:
        """Tokens that samples have gained from all engines."""
        return sum(engine.usage().num_generated for engine in self.engines)

    @property
    def num_prefilled(self) -> int:
        """Context positions that all engines have computed."""
        return sum(engine.usage().num_prefilled for engine in self.engines)

    def check_counts(self) -> None:
        """Raises a LedgerError if an idle engine's own count is not that of the tokens that arrived."""
        for engine in self.engines:
            usage = engine.usage()
            if usage.num_counted not in (None, usage.num_generated):
                raise LedgerError(
                    f"{engine.name} counts {usage.num_counted} tokens of its own, and {usage.num_generated} "
                    "arrived"
                )

    def _report_decoding(self, number: int) -> None:
        """Record the decode steps of an engine, at most every `DECODED_EVERY_S` and when it becomes idle."""
        is_idle, since_s = not self.loads.requests[number], self._busy_since_s[number]
        if not is_idle and now() - since_s < DECODED_EVERY_S:
            return
        engine, before = self.engines[number], self._decoded[number]
        self._busy_since_s[number], self._decoded[number] = now(), engine.usage().decoded
        sums, drafts = self._decoded[number] - before, engine.capabilities.drafts
        if sums.steps or drafts:
            self._recorder.emit(Decoded(since_s, now(), engine.name, sums, drafts))

    def report_preemptions(self) -> None:
        """Record how many requests each engine has preempted since the last call."""
        for engine in self.engines:
            before, self._preempted[engine.name] = self._preempted[engine.name], engine.usage().num_preempted
            if num := self._preempted[engine.name] - before:
                self._recorder.emit(Preempted(now(), engine.name, num))

    async def serve(self, sample: Sample) -> None:
        """Extend the sample until it ends. It may be cancelled at any token."""
        with suppress(VersionGone):
            await self._run_episode(sample, self._serve_turn, self._recorder, self._written)

    def move(self, sample: Sample, number: int | None) -> None:
        """Move a request to another engine: its own gives it back."""
        for requests in self.serving:
            if (task := requests.get(sample)) and not task.cancelling():
                self.moves[sample] = number
                task.cancel()

    async def withdraw(self, number: int, version: int) -> None:
        """Take back the pinned requests that an engine will not serve any more once it has loaded a version.
        Returns when they have left it."""
        if not self.versions.pinned:
            return
        kept = self.versions.make_room(number, version)
        leaving = [sample for sample in self.serving[number] if sample.pin not in (None, *kept)]
        for sample in leaving:
            self.move(sample, None)
        while any(sample in self.serving[number] for sample in leaving):
            await self.changed.wait(f"requests to leave {self.engines[number].name}")

    def loaded(self, number: int, version: int) -> None:
        """Note that an engine has loaded a version, or will before it opens."""
        self.versions.loaded(number, version)
        self.changed.fire()
        if self.versions.pinned:
            self.on_changed()

    async def _serve_turn(self, sample: Sample) -> None:
        """Generate the rest of a turn, or verify one, on one engine after another if it is moved or given
        back."""
        target: int | None = None
        source: Engine | None = None  # that had its KV cache before it moved
        sample.max_age = None if sample.id.is_held_out else self.max_age
        is_verified = False  # a turn that had ended, and nothing has changed
        while not is_verified and (sample.finish_reason is None or sample.to_verify):
            while (number := self._choose_engine(sample, target)) is None:
                await self.changed.wait("an engine that is open")
            engine = self.engines[number]
            self.versions.num_begun[number] += not (sample.spans or sample.id.is_held_out)
            if source and source is not engine:
                engine.take_over(sample, source)
            sample.engine = engine.name
            if not self.loads.requests[number]:
                self._busy_since_s[number] = now()
            self.loads.add(number, 1)
            task = asyncio.current_task()
            assert task is not None
            self.serving[number][sample] = task
            had, had_lost = sample.num_tokens, sample.num_changed
            self._recorder.emit(RequestStarted(now(), sample.id, engine.name, had))
            outcome = "cancelled"
            try:
                await engine.generate(sample)
                is_verified = (turn := sample.verified_turn) is not None
                outcome = str(sample.finish_reason if turn is None else sample.turns[turn].finish_reason)
            except VersionGone:  # the engine knows better than `versions`
                outcome, sample.engine = "refused", None
                self.versions.refused(number, sample.pin)
            except Evicted:
                outcome, sample.engine = "evicted", None
            except asyncio.CancelledError:
                if sample not in self.moves or task.uncancel():  # the run ends while the sample moves
                    raise
                outcome = str(sample.finish_reason or "moved")
            finally:
                self.loads.add(number, -1)
                del self.serving[number][sample]
                if self.versions.pinned or not self.serving[number]:
                    self.changed.fire()
                gained = sample.num_tokens - had + sample.num_changed - had_lost
                self._recorder.emit(
                    RequestEnded(now(), sample.id, engine.name, sample.num_tokens, gained, outcome)
                )
                self._report_decoding(number)
            target = self.moves.pop(sample, None)
            source = engine if outcome == "moved" else None

    def _choose_engine(self, sample: Sample, target: int | None) -> int | None:
        """Return the number of the engine for a sample; None: it waits for one that is open, and a held-out
        sample for one of the newest version. `target`: where it moves. Raises a VersionGone if no engine
        serves the version of a pinned sample any more."""
        able: Collection[int] = range(len(self.engines))
        shares, least = self.loads.shares, self.loads.least_loaded()
        if self.versions.pinned or sample.id.is_held_out:
            able = self.versions.pin(sample)
            least = min(able, key=shares.__getitem__, default=None)
        if least is None:
            return None
        if target is not None and target in able and shares[target] < inf:
            return target
        last = self._numbers.get(sample.engine or "")
        if last is not None and last in able and shares[last] < min(1.0, shares[least] + SLACK):
            return last
        return least

    def _on_engine_changed(self, engine: Engine, why: str) -> None:
        self.loads.refresh()
        number = self._numbers[engine.name]
        self.versions.restarted(number)
        self._recorder.emit(EngineStateChanged(now(), engine.name, engine.state, why))
        self.changed.fire()
        self.on_changed()
