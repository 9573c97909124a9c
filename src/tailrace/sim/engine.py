"""A simulated engine: continuous batching in whole decode steps.

Time is settled when something changes, in O(1) whatever the number of requests. A request that joins, or
continues, costs a prefill of what the cache does not hold: nothing if the engine kept its KV cache, nothing
for a prompt that another sample of the group has in the cache, else the prompt and all tokens so far. When
the cache is full, the request that was admitted last is preempted and keeps its tokens.

An engine may serve its last versions at the same time, as adapters of LoRA: a pinned sample keeps its own.
That costs nothing more. Nor does the KV cache of a request that moves: its transfer hides behind the decoding
of the others, and `abort_s` is paid.

The time of decode steps has a closed form. A step of n running requests takes

    overhead_s + max(base_s, compute_s * n) + (slope_s + overhead_per_request_s) * n + context_s * P

seconds, where P positions are in the KV cache when it begins. A step adds n positions. So k steps that begin
with P positions take k * first_s + growth_s * k * (k - 1) / 2 seconds, where first_s is the time of the
first and growth_s = context_s * n.

Drafted tokens (`acceptance` of `SimEngineSettings`) are further rows of a step, which then gives more tokens.
Here time goes by in steps of one token for each request: such a step has its share of the seconds.

A sample that is too old (`Sample.max_age`) is verified when it is admitted, again after a load. Its seed, the
place and the update decide whether a token changes (`survival`). A new end is as long as the old one. A pass
over its context costs a prefill of all of it, and the projection to the vocabulary and a draw at each token
that it had, in chunks, up to the first that changes (`verify_positions`).

Engines that were joined to one tensor-parallel group divide all but the overheads, and communicate: see
`communication_s` and `reduce_s` of `SimEngineSettings`.

Engines may die at random and are started again (`Faults`).
"""

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import log2, sqrt
from typing import NamedTuple

from tailrace.clock import now
from tailrace.contracts.engine import (
    VERIFIED_ROWS,
    Arrival,
    Capabilities,
    DecodeSums,
    Engine,
    EngineState,
    Usage,
    with_version,
)
from tailrace.contracts.weights import Weights
from tailrace.errors import EngineDied, Evicted, VersionGone
from tailrace.sim.host import Host
from tailrace.sim.settings import DEFAULT_SLOTS, SimEngineSettings
from tailrace.sim.world import Chance
from tailrace.types import KV, FinishReason, Group, Sample


class Steps(NamedTuple):
    """Decode steps in sequence by the same requests, each of which gains one token."""

    first_s: float
    """Seconds of the first step."""
    growth_s: float = 0.0
    """Seconds by which each step is longer than the one before."""
    depth: int = 0
    """Tokens that are drafted for a request."""

    @classmethod
    def of(cls, cost: SimEngineSettings, num_running: int, kv_positions: int, width: int = 1) -> "Steps":
        """Return the steps of a batch, with as many drafts as make them fastest.

        Args:
            kv_positions: in the cache of the requests when the first step begins.
            width: engines that are joined to one tensor-parallel group.
        """
        plain = cls._at(cost, num_running, kv_positions, width, 0)
        if not cost.acceptance:
            return plain
        depths = range(1, len(cost.acceptance) + 1)
        return min((plain, *(cls._at(cost, num_running, kv_positions, width, depth) for depth in depths)))

    @classmethod
    def _at(
        cls, cost: SimEngineSettings, num_running: int, kv_positions: int, width: int, depth: int
    ) -> "Steps":
        num_rows = num_running * (1 + cost.draft_share * depth) if depth else num_running
        alone_s = max(cost.base_s, cost.compute_s * num_rows) + cost.slope_s * num_rows
        growth_s = cost.context_s * num_running
        host_s = cost.overhead_s + cost.overhead_per_request_s * num_running
        if cost.context_s:
            alone_s += cost.context_s * kv_positions
        if width > 1:
            reduced_s = cost.communication_s * log2(width) + cost.reduce_s * num_rows * (1 - 1 / width)
            alone_s, growth_s = alone_s / width + reduced_s, growth_s / width
        gained = cost.gained(depth)
        return cls((alone_s + host_s) / gained, growth_s / gained, depth)

    def slower(self, factor: float) -> "Steps":
        return self._replace(first_s=self.first_s * factor, growth_s=self.growth_s * factor)

    def seconds(self, start: float, end: float) -> float:
        """Return the time from one number of steps to another. Only the start may be a part of a step."""
        alike_s = max(0.0, end - start) * self.first_s
        return alike_s + self.growth_s * end * (end - 1) / 2 if end > 1 else alike_s

    def after(self, start: float, seconds: float) -> float:
        """Return the number of steps, whole ones and a part of one, that are done after some seconds. A part
        of the first step, `start`, was done before."""
        if not self.growth_s:
            return start + seconds / self.first_s
        seconds += start * self.first_s
        slope = self.first_s - self.growth_s / 2
        whole = int(2 * seconds / (slope + sqrt(slope**2 + 2 * self.growth_s * seconds)) + 1e-9)
        rest_s = seconds - self.seconds(0, whole)
        return whole + max(0.0, rest_s / (self.first_s + self.growth_s * whole))


class Suspended:
    """Positions of the cache by the aborted sample that they belong to, the oldest first."""

    def __init__(self) -> None:
        self._positions: dict[Sample, int] = {}
        self._total = 0

    def keep(self, sample: Sample, positions: int) -> None:
        self._positions[sample] = positions
        self._total += positions

    def forget(self, sample: Sample) -> int:
        """Return the positions that were kept of a sample, and drop them."""
        kept = self._positions.pop(sample, 0)
        self._total -= kept
        return kept

    def shrink(self, room: int) -> None:
        """Forget the oldest samples until the others fit into so many positions."""
        while self._positions and self._total > room:
            self.forget(next(iter(self._positions)))


@dataclass(slots=True)
class _Running:
    """A request that is being decoded. It has `base` + steps tokens and will have `length`."""

    future: asyncio.Future[None]
    base: int
    length: int
    prompt_version: int | None = None
    """The version that computed its prompt; None if its KV cache was still there."""


class SimEngine:
    """An `Engine` that takes virtual time.

    Args:
        length_of: the length of the response that a sample will have, in tokens.
        max_tokens: a response of this length is cut off (finish reason "length").
        host: what slows it down while others work; None: it has devices of its own.
    """

    def __init__(
        self,
        name: str,
        cost: SimEngineSettings,
        length_of: Callable[[Sample], int],
        max_tokens: float = math.inf,
        host: Host | None = None,
    ) -> None:
        self.name, self.version, self._cost, self.versions = name, 0, cost, cost.versions or 1
        self._set_width(1)
        self.capabilities = Capabilities(
            exact_versions=True, sleep=True, top_p=True, drafts=bool(cost.acceptance), verifies=True
        )
        self.state: EngineState = "open"
        self.on_state: Callable[[str], None] = lambda why: None
        self.on_arrival: Callable[[Arrival], None] = lambda arrival: None
        self._newest = 0  # version of the weights that wait for the engine to open
        self._served: tuple[int, ...] = (0,)  # those that it loaded since it opened last, the newest last
        self._asleep = False
        self._length_of, self._max_tokens = length_of, max_tokens
        self._running: dict[Sample, _Running] = {}
        self._queue: dict[Sample, asyncio.Future[None]] = {}
        self._generated = self._prefilled = self._verified = self._preempted = 0
        # Sums over the decode steps, as the next one (DecodeSums).
        self._num_steps = self._num_requests = self._positions = self._drafted = self._checked = 0.0
        self._decode_s = 0.0
        self._steps, self._credit, self._since = 0, 0.0, now()  # whole decode steps; part of one; until when
        self._suspended = Suspended()
        self._prompts: Counter[Group] = Counter()  # running samples whose prompt these weights have computed
        self._ends: list[tuple[int, int, Sample]] = []  # a heap: (step at which it ends, tie, sample)
        self._ties = itertools.count()
        self._kv_base = 0  # the cache holds kv_base + steps * running positions
        self._timer: asyncio.TimerHandle | None = None
        self._host, self._slowdown, self._is_busy = host, 1.0, False
        if host:
            host.listeners.append(self._on_host_changed)

    async def generate(self, sample: Sample) -> None:
        if self.state != "open":
            raise Evicted(self.name)
        if sample.pin not in (None, *self._served):
            raise VersionGone(self.name)
        self._queue[sample] = future = asyncio.get_running_loop().create_future()
        self._reschedule()
        try:
            await future
        except asyncio.CancelledError:
            await asyncio.sleep(self._cost.abort_s)  # until the abort arrives the engine goes on
            raise
        finally:
            if self._queue.pop(sample, None):
                self._reschedule()
            elif sample in self._running:
                self._count_steps()
                self._suspend(sample)
                self._remove(sample, None)
                self._reschedule()

    async def load(self, weights: Weights, *, kv: KV) -> None:
        self._newest = weights.version
        if self.state != "open":
            return
        self.report()
        self.version = weights.version
        self._served = with_version(self._served, weights.version, self.versions)
        for sample in [*self._running, *self._queue]:
            if sample.pin not in (None, *self._served):
                future = self._queue.pop(sample, None) or self._remove(sample, None)
                future.set_exception(VersionGone(self.name))
        old = [sample for sample in self._running if self._is_too_old(sample)]
        self._queue = {sample: self._remove(sample, None) for sample in old} | self._queue  # verified there
        self._prompts.clear()
        stall_s = self._cost.load_s
        if kv == "recompute":
            self._suspended = Suspended()
            stall_s += self._prefill_s(self._kv_tokens)
            self._prefilled += self._kv_tokens
        self._delay(stall_s)
        self._reschedule()
        await asyncio.sleep(stall_s)

    async def sleep(self) -> None:
        if self._asleep:
            return
        self._asleep = True
        self._close("asleep", Evicted(self.name), "its device is lent")
        await asyncio.sleep(self._cost.sleep_s)

    async def wake(self) -> None:
        if not self._asleep or not self.width:
            return
        await asyncio.sleep(self._cost.wake_s)
        self._asleep = False
        self._open("its device is back")

    async def resize(self, width: int) -> None:
        if self.state == "open":
            self._close("asleep", Evicted(self.name), "its tensor-parallel size changes")
        self._asleep = True
        self._set_width(width)
        if width:
            await asyncio.sleep(self._cost.regroup_s)
            self._asleep = False
            self._open(f"it uses the devices of {width} engines")

    def take_over(self, sample: Sample, source: Engine) -> None:
        assert isinstance(source, SimEngine)
        self._suspended.keep(sample, source._suspended.forget(sample))

    def report(self) -> None:
        self._count_steps()
        for sample in self._running:
            self._update_sample(sample)

    def usage(self) -> Usage:
        # It counts nothing, so that to look at an engine changes no rounding.
        whole = 0
        if self._running and now() > self._since:
            whole = int(self._next_steps.after(self._credit, now() - self._since) + 1e-6)
        num_new = whole * len(self._running)
        return Usage(
            num_running=len(self._running),
            num_waiting=len(self._queue),
            kv_tokens=self._kv_tokens + num_new,
            num_generated=self._generated + num_new,
            num_prefilled=self._prefilled,
            num_preempted=self._preempted,
            kv_capacity=self._kv_capacity,
            decoded=DecodeSums(
                steps=round(self._num_steps),
                running=(num_requests := round(self._num_requests)),
                positions=round(self._positions),
                seconds=self._decode_s,
                prefilled=self._prefilled,
                prefill_s=self._prefill_s(self._prefilled, self._verified),
                checked=round(self._checked),
                accepted=self._generated - num_requests,
                drafted=round(self._drafted),
                verified=self._verified,
            ),
        )

    def die(self) -> None:
        """End the engine. Every request is given back with its tokens."""
        self._close("dead", EngineDied(self.name), "it was told to die")

    def revive(self) -> None:
        """Start it again, with the newest weights. It stays asleep while the trainer has its device."""
        if not self._asleep:
            self._open("it was started again")

    def fail(self, restart_s: float) -> float:
        """Die, and come back after some seconds, which are returned. While it sleeps it does not."""
        if self.state != "open":
            return 0.0
        self.die()
        asyncio.get_running_loop().call_later(restart_s, self.revive)
        return restart_s

    # -- inside ------------------------------------------------------------------------------------

    def _close(self, state: EngineState, error: Evicted, why: str) -> None:
        self._count_steps()
        self.state = state
        self._suspended = Suspended()
        futures = [self._remove(sample, None) for sample in list(self._running)] + [*self._queue.values()]
        self._queue.clear()
        self._reschedule()
        for future in futures:
            if not future.done():
                future.set_exception(error)
        self.on_state(why)

    def _open(self, why: str) -> None:
        self.version, self.state, self._served = self._newest, "open", (self._newest,)
        self._prompts.clear()
        self.on_state(why)

    @property
    def _kv_tokens(self) -> int:
        return self._kv_base + self._steps * len(self._running)

    def _set_width(self, width: int) -> None:
        """Resize: a group has the slots and the cache of all its devices, and the weights once."""
        self.width, devices = width, max(width, 1)
        self.slots = (self._cost.slots or DEFAULT_SLOTS) * devices
        self._kv_capacity = self._cost.kv_tokens * devices + self._cost.weight_tokens * (devices - 1)

    @property
    def _next_steps(self) -> Steps:
        steps = Steps.of(self._cost, len(self._running), self._kv_tokens, self.width)
        return steps if self._slowdown == 1.0 else steps.slower(self._slowdown)

    def _count_steps(self) -> None:
        """Count the whole decode steps since the last change; the rest of a step is kept as credit."""
        time = now()
        if time <= self._since:
            return  # stalled until then
        if self._running:
            next_steps, num_running = self._next_steps, len(self._running)
            steps = next_steps.after(self._credit, time - self._since)
            self._credit = max(0.0, steps - (whole := int(steps + 1e-6)))
            positions = whole * self._kv_tokens + num_running * whole * (whole - 1) // 2
            depth, gained = next_steps.depth, self._cost.gained(next_steps.depth)
            num_requests = whole * num_running / gained
            num_drafted = self._cost.draft_share * num_requests if depth else 0.0
            self._num_steps += whole / gained
            self._num_requests += num_requests
            self._positions += positions / gained
            self._drafted += num_drafted
            self._checked += num_drafted * depth
            self._decode_s += time - self._since
            self._steps += whole
            self._generated += whole * num_running
            self._suspended.shrink(self._kv_capacity - self._kv_tokens)
        else:
            self._credit = 0.0
        self._since = time

    def _delay(self, seconds: float) -> None:
        self._since = max(self._since, now()) + seconds

    def _reschedule(self) -> None:
        """Admit requests that fit, and set the next timer: something has changed."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self.state != "open":
            return self._report_to_host()
        self._count_steps()
        if not self._in_mid_step:
            self._admit_waiting()
        self._suspended.shrink(self._kv_capacity - self._kv_tokens)
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        if self._running:
            steps = self._ends[0][0] - self._steps
            room = (self._kv_capacity - self._kv_tokens) // len(self._running)
            steps = min(steps, max(1, room + 1))
            if self._queue and self._in_mid_step and len(self._running) < self.slots:
                steps = min(steps, 1)  # the requests that wait join at the end of this step
            when = self._since + self._next_steps.seconds(self._credit, steps)
            self._timer = asyncio.get_running_loop().call_at(when, self._on_timer)
        self._report_to_host()

    def _report_to_host(self) -> None:
        if not self._host:
            return
        is_busy = bool(self._running) and self.state == "open"
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            (self._host.begin if is_busy else self._host.end)("engine")

    def _on_host_changed(self) -> None:
        if self._host and self._host.engine_slowdown != self._slowdown:
            self._count_steps()
            self._slowdown = self._host.engine_slowdown
            self._reschedule()

    def _on_timer(self) -> None:
        self._timer = None
        self._count_steps()
        while self._ends and self._ends[0][0] <= self._steps:
            sample = heapq.heappop(self._ends)[2]
            request = self._running.get(sample)
            if request and request.base + self._steps >= request.length:
                future = self._remove(sample, "length" if request.length >= self._max_tokens else "stop")
                if not future.done():
                    future.set_result(None)
        while self._kv_tokens > self._kv_capacity and len(self._running) > 1:
            youngest = next(reversed(self._running))
            self._preempted += 1
            self._queue = {youngest: self._remove(youngest, None)} | self._queue
        self._reschedule()

    @property
    def _in_mid_step(self) -> bool:
        """Whether a decode step is under way. A request that arrives then joins at its end."""
        return bool(self._running) and self._credit > 1e-6

    def _admit_waiting(self) -> None:
        while self._queue and len(self._running) < self.slots:
            sample = next(iter(self._queue))
            context = sample.num_context_tokens
            if self._running and self._kv_tokens + context > self._kv_capacity:
                return
            is_old = self._is_too_old(sample)
            num_drawn = self._verify(sample) if is_old else 0
            self._kv_base += sample.num_context_tokens - self._steps
            base, length = sample.turn_end - self._steps, sample.turn_end
            if sample.verified_turn is None:
                length = self._length_of(sample)
            self._running[sample] = _Running(self._queue.pop(sample), base, length)
            heapq.heappush(self._ends, (length - base, next(self._ties), sample))
            computed = max(self._num_uncached(sample, context), context if is_old else 0)
            self._prefilled += computed
            self._verified += num_drawn
            self._delay(self._prefill_s(computed, num_drawn))

    def _is_too_old(self, sample: Sample) -> bool:
        oldest, max_age = sample.turn_version, sample.max_age
        return oldest is not None and max_age is not None and oldest < self.version - max_age

    def _verify(self, sample: Sample) -> int:
        """Keep the tokens of a turn before the first that is another one now. Returns those drawn again."""
        num_tokens, num_kept = sample.turn_end - sample.turn_start, self._num_kept(sample)
        sample.verify(num_kept, self.version)
        return min(num_tokens, (num_kept // VERIFIED_ROWS + 1) * VERIFIED_ROWS)

    def _num_kept(self, sample: Sample) -> int:
        """Tokens of a turn before the first that an update since it was drawn has changed."""
        start, kept, survival = sample.turn_start, sample.turn_end - sample.turn_start, self._cost.survival
        for update in range(sample.oldest_version + 1, self.version + 1) if survival < 1.0 else ():
            chance = Chance(SURVIVAL, sample.turn_seed, update).uniform()
            first = int(math.log(chance) / math.log(survival)) if survival else 0
            if any(span.version < update for span in sample.spans_between(start + first, start + kept)):
                kept = first
        return kept

    def _prefill_s(self, positions: int, num_drawn: int = 0) -> float:
        """Seconds to prefill, and to draw so many tokens again; a tensor-parallel group divides the work."""
        as_many = positions + self._cost.verify_positions * num_drawn
        return as_many / (self._cost.prefill_tokens_per_s * max(self.width, 1))

    def _num_uncached(self, sample: Sample, context: int) -> int:
        if self._suspended.forget(sample) == context:
            return 0
        cached = sample.num_tokens == 0 and self._prompts[sample.group] > 0
        self._prompts[sample.group] += 1
        self._running[sample].prompt_version = self.version
        return 0 if cached else context

    def _suspend(self, sample: Sample) -> None:
        """Keep the KV cache of an aborted request."""
        before = sample.num_context_tokens - sample.turn_end
        self._suspended.keep(sample, before + self._running[sample].base + self._steps)

    def _update_sample(self, sample: Sample) -> None:
        version = self.version if sample.pin is None else sample.pin
        sample.grow(self._running[sample].base + self._steps - sample.turn_end, version)

    def _remove(self, sample: Sample, finish_reason: FinishReason | None) -> asyncio.Future[None]:
        sample.end_turn(finish_reason)
        self._update_sample(sample)
        request = self._running.pop(sample)
        if request.prompt_version == self.version:
            self._prompts[sample.group] -= 1
            if not self._prompts[sample.group]:
                del self._prompts[sample.group]
        self._kv_base -= sample.num_context_tokens - sample.turn_end + request.base
        return request.future


FAULT, SURVIVAL = 7, 8
"""Keys of random streams; world.py and reward.py have the others."""


def let_die(die: Callable[[], float], mean_life_s: float, seed: int, number: int) -> None:
    """Call `die` after exponential times, inside the virtual loop. It returns the seconds until the next life
    begins. Each number has its own random stream."""
    loop, chance = asyncio.get_running_loop(), Chance(FAULT, seed, number)

    def live() -> None:
        loop.call_later(-mean_life_s * math.log(chance.uniform()), end)

    def end() -> None:
        loop.call_later(die(), live)

    live()
