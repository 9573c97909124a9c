"""Router: chooses the engine for a request.

The choice is the open engine that has the smallest share of its slots taken, from a heap with lazy deletion.
An entry whose share is not that of its engine any more is removed when it comes to the top, or when the heap
is rebuilt. So a change of load and a choice take O(log n) for n engines.

Beside it, the reference stage: log-probs of finished samples under the reference model.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf

from tailrace.clock import Signal, now
from tailrace.contracts.engine import Engine, with_version
from tailrace.errors import Evicted, LedgerError, VersionGone
from tailrace.record.events import (
    Decoded,
    EngineStateChanged,
    Preempted,
    Recorder,
    RequestEnded,
    RequestStarted,
)
from tailrace.rollout.episode import Serve, Written, not_written
from tailrace.types import Group, Sample

MAX_ENTRIES = 8
"""The heap is rebuilt when it has more entries than this for each engine."""


class EngineLoads:
    """The load of each engine, by its number in the sequence."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self.requests = [0] * len(engines)
        """Requests that each engine has now."""
        self.shares = [inf] * len(engines)
        """Share of the slots of each engine that is taken; infinite if the engine is not open."""
        self.refresh()

    def refresh(self) -> None:
        """Read which engines are open, and how many slots they have."""
        is_open = [engine for engine in self._engines if engine.state == "open"]
        self.num_open = len(is_open)
        self.slots = sum(engine.slots for engine in is_open)
        self.shares = [self._share(number) for number in range(len(self._engines))]
        self._rebuild()

    def add(self, number: int, requests: int) -> None:
        """Count requests that an engine got, or gave back if negative."""
        self.requests[number] += requests
        self.shares[number] = share = self._share(number)
        heappush(self._heap, (share, number))
        if len(self._heap) > MAX_ENTRIES * len(self._engines):
            self._rebuild()

    def least_loaded(self) -> int | None:
        """The open engine with the smallest share; of several, the first. None: no engine is open."""
        while self._heap[0][0] != self.shares[self._heap[0][1]]:
            heappop(self._heap)
        share, number = self._heap[0]
        return number if share < inf else None

    def _share(self, number: int) -> float:
        engine = self._engines[number]
        return self.requests[number] / engine.slots if engine.state == "open" else inf

    def _rebuild(self) -> None:
        self._heap = [(share, number) for number, share in enumerate(self.shares)]
        heapify(self._heap)


SLACK = 1 / 8
"""Share of an engine's slots. The engine that served a request before gets it again if its load is at most
this much above the least loaded engine's, because it may still hold the request's KV cache."""

DECODED_EVERY_S = 1.0
"""Decode steps are recorded in sums over at least this time, while the engine has requests."""

RunEpisode = Callable[[Sample, Serve, Recorder, Written], Awaitable[None]]
"""Extends a sample until it ends, with a function that generates the rest of a turn."""


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
        self.on_changed: Callable[[], None] = lambda: None
        self.pinned = 0
        """An engine serves the last so many versions that it loaded, and every sample ends on the version
        that it began with. 0: samples go on with new weights."""
        self.oldest_to_begin: Callable[[Group], float] = lambda group: inf
        """The oldest version on which pinned samples of a group may begin, if the newest has no slot."""
        self.batch = inf
        """Samples that may begin on an engine of an older version, of all since it loaded that."""
        self._num_begun = [0] * len(engines)  # on each engine since it loaded its newest version
        self.newest = version
        """The published version."""
        self.versions: list[tuple[int, ...]] = [(version,) for _ in engines]
        """The versions that each engine serves, the oldest first."""
        self.serving: list[dict[Sample, asyncio.Task[None]]] = [{} for _ in engines]
        """The requests of each engine."""
        self.moves: dict[Sample, int | None] = {}
        """Requests that leave their engine for another one; None: any that serves their version."""
        self._recorder = recorder
        self.loads = EngineLoads(engines)
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
        if self._decoded[number].steps > before.steps:
            sums = self._decoded[number] - before
            self._recorder.emit(Decoded(since_s, now(), engine.name, sums))

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

    def version_of(self, sample: Sample) -> int:
        """The version of a pinned sample; before its first token, the one that it would get."""
        return sample.spans[0].version if sample.spans else self.newest

    def has_room(self, sample: Sample, num_requests: int) -> bool:
        """Whether a pinned sample may be served now. `num_requests`: how many the pool has sent."""
        if not self.pinned or sample.spans:
            return True
        on_the_way = max(0, num_requests - sum(self.loads.requests))
        room = self._room(self._of_version(self.newest))
        return room > on_the_way or room + self._room(self._older(sample)) > on_the_way

    def _of_version(self, version: int) -> list[int]:
        return [number for number, versions in enumerate(self.versions) if version in versions]

    def _older(self, sample: Sample) -> list[int]:
        """The engines of older versions on which a sample may begin; none while an engine loads."""
        shares, versions = self.loads.shares, self.versions
        is_open = [n for n, share in enumerate(shares) if share < inf]
        if not all(versions[n] for n in is_open):
            return []
        oldest = self.oldest_to_begin(sample.group)
        recent = [n for n in is_open if versions[n][-1] >= oldest and self.newest not in versions[n]]
        return [n for n in recent if self._num_free(n) and self._num_begun[n] < self.batch]

    def _num_free(self, number: int) -> int:
        """The slots of an engine that are free, and for which its KV cache has room; 0 if it is not open."""
        if self.loads.shares[number] == inf:
            return 0
        engine = self.engines[number]
        return max(0, engine.usage().num_fitting(engine.slots) - self.loads.requests[number])

    def _room(self, numbers: Iterable[int]) -> int:
        return sum(map(self._num_free, numbers))

    def move(self, sample: Sample, number: int | None) -> None:
        """Move a request to another engine: its own gives it back."""
        for requests in self.serving:
            if (task := requests.get(sample)) and not task.cancelling():
                self.moves[sample] = number
                task.cancel()

    async def withdraw(self, number: int, version: int) -> None:
        """Take back the pinned requests that an engine will not serve any more once it has loaded a version.
        Returns when they have left it."""
        if not self.pinned:
            return
        self.versions[number] = kept = (*self.versions[number], version)[-self.pinned : -1]
        leaving = [sample for sample in self.serving[number] if sample.pin not in (None, *kept)]
        for sample in leaving:
            self.move(sample, None)
        while any(sample in self.serving[number] for sample in leaving):
            await self.changed.wait(f"requests to leave {self.engines[number].name}")

    def loaded(self, number: int, version: int) -> None:
        """Note that an engine has loaded a version, or will before it opens."""
        before = self.versions[number] if self.engines[number].state == "open" else ()
        self.versions[number] = with_version(before, version, max(1, self.pinned))
        self._num_begun[number] = 0
        self.changed.fire()
        if self.pinned:
            self.on_changed()

    async def _serve_turn(self, sample: Sample) -> None:
        """Generate the rest of a turn, on one engine after another if it is moved or given back."""
        target: int | None = None
        source: Engine | None = None  # that had its KV cache before it moved
        while sample.finish_reason is None:
            while (number := self._choose_engine(sample, target)) is None:
                await self.changed.wait("an engine that is open")
            engine = self.engines[number]
            self._num_begun[number] += not (sample.spans or sample.id.is_held_out)
            if source and source is not engine:
                engine.take_over(sample, source)
            sample.engine = engine.name
            if not self.loads.requests[number]:
                self._busy_since_s[number] = now()
            self.loads.add(number, 1)
            task = asyncio.current_task()
            assert task is not None
            self.serving[number][sample] = task
            had = sample.num_tokens
            self._recorder.emit(RequestStarted(now(), sample.id, engine.name, had))
            outcome = "cancelled"
            try:
                await engine.generate(sample)
                outcome = str(sample.finish_reason)
            except VersionGone:  # the engine knows better than `versions`
                outcome, sample.engine = "refused", None
                self.versions[number] = tuple(each for each in self.versions[number] if each != sample.pin)
            except Evicted:
                outcome, sample.engine = "evicted", None
            except asyncio.CancelledError:
                if sample not in self.moves or task.uncancel():  # the run ends while the sample moves
                    raise
                outcome = str(sample.finish_reason or "moved")
            finally:
                self.loads.add(number, -1)
                del self.serving[number][sample]
                if self.pinned or not self.serving[number]:
                    self.changed.fire()
                gained = sample.num_tokens - had
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
        least, shares = self.loads.least_loaded(), self.loads.shares
        last = self._numbers.get(sample.engine or "")
        if self.pinned or sample.id.is_held_out:
            version = self.version_of(sample)
            able = self._of_version(version)
            if not able and sample.spans:
                raise VersionGone(f"no engine serves version {version} any more")
            if not sample.spans and not self._room(able):
                waits = self.pinned and sample.id.is_held_out and len(able) < self.loads.num_open
                able = [] if waits else self._older(sample) or able
            least = min(able, key=shares.__getitem__, default=None)
            if least is None or shares[least] == inf:
                return None
            sample.pin = version if version in self.versions[least] else self.versions[least][-1]
            sample.group.begun(sample.pin)
            able = [number for number in able if sample.pin in self.versions[number]]
            last, target = (each if each in able else None for each in (last, target))
        if target is not None and shares[target] < inf:
            return target
        if least is None or last is None or shares[last] >= min(1.0, shares[least] + SLACK):
            return least
        return last

    def _on_engine_changed(self, engine: Engine, why: str) -> None:
        self.loads.refresh()
        number = self._numbers[engine.name]
        self.versions[number] = self.versions[number][-1:]  # an engine that starts again has the newest alone
        self._recorder.emit(EngineStateChanged(now(), engine.name, engine.state, why))
        self.changed.fire()
        self.on_changed()
