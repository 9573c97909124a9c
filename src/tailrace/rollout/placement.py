"""Placement: which devices generate and which train. Schedules do not see it.

`Run` asks for devices to train on around `accumulate`, `step` and `ess`, and for devices to generate on at
the top of a round and after a publication.

    disaggregated   both have devices of their own
    colocated       all devices generate, then all train
    elastic         all generate; in mid-round half of the engines give their devices to as many replicas of
                    the trainer; after the rollout all train (RollPacker 4.4)

The trainer sleeps while engines generate on its devices, and wakes when they sleep.

The tensor-parallel size of the engines can be chosen when a rollout begins (RollPacker 4.2): by an offline
profile for the first one, then by their preemptions. An engine preempts requests when its KV cache is full. A
group of twice as many devices holds the weights once and has more than twice the cache; its decode steps
communicate more.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from pydantic import Field

from tailrace.contracts.engine import Engine
from tailrace.contracts.trainer import Trainer
from tailrace.errors import ConfigError, NotWoken, ScheduleError, ServerRefused
from tailrace.rollout.pool import Pool
from tailrace.rollout.progress import RolloutProgress, peak_kv
from tailrace.settings import RunPath, Settings

RISE = 1.05
"""A round with more preemptions than so many times those of the last round of its kind doubles the size."""
CALM_ROUNDS = 4
"""Number of rounds in succession without a preemption that halve the size."""
OPEN_TIMEOUT_S = 600.0
"""Limit of a rollout's wait for all engines that were restarted with another size."""

Kind = Literal["disaggregated", "colocated", "elastic"]


class OfKind:
    """The properties of a kind of placement."""

    __slots__ = ()
    kind: Kind

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainer have devices in common, on which one sleeps while the other works."""
        return self.kind != "disaggregated"

    @property
    def lends(self) -> bool:
        """Whether some engines give their devices to the trainer before the rollout ends."""
        return self.kind == "elastic"


@dataclass(frozen=True, slots=True)
class DeviceSharing(OfKind):
    """Which engines and trainer replicas use the same devices."""

    kind: Kind = "disaggregated"
    engines: tuple[bool, ...] = ()
    """For each engine, whether an early replica of the trainer trains on its devices. Empty: the last
    half."""
    early_replicas: int = 1
    """Number of replicas, the first ones, that the elastic placement lets train before the rollout ends."""
    max_width: int = 1
    """The most engines whose devices may be joined to one tensor-parallel group."""
    start_width: Callable[[float], int] = field(default=lambda num_requests: 1, compare=False)
    """Returns how many engines are joined in the first rounds, given the requests that a round needs."""
    longest: int | None = None
    """Tokens of the longest possible response, where the elastic placement lends devices by finished prompts.
    None: by finished responses."""


class TensorParallelRule:
    """The paper's rule, for one kind of rounds. A rise from zero counts as a rise."""

    def __init__(self, largest: int, start: int = 1) -> None:
        self.width = start
        """Width of the next round: a multiple of the smallest tensor-parallel size."""
        self._largest, self._calm_rounds = largest, 0
        self._last: int | None = None

    def round_ended(self, num_preempted: int) -> int:
        """Count a round; return the width of the next one."""
        last, self._last = self._last, num_preempted
        self._calm_rounds = 0 if num_preempted else self._calm_rounds + 1
        if last is not None and num_preempted > RISE * last:
            self.width = min(2 * self.width, self._largest)
        elif self._calm_rounds >= CALM_ROUNDS:
            self.width, self._calm_rounds = max(self.width // 2, 1), 0
        return self.width


async def resize(engines: Sequence[Engine], width: int) -> bool:
    """Join engines to tensor-parallel groups of `width`. Return whether some were restarted."""
    wanted = [0 if number % width else width for number in range(len(engines))]
    changed = [pair for pair in zip(engines, wanted, strict=True) if pair[0].width != pair[1]]
    # All give their devices up before one takes those of another.
    await asyncio.gather(*(engine.resize(0) for engine, _ in changed))
    await asyncio.gather(*(engine.resize(width) for engine, width in changed if width))
    return bool(changed)


class ParallelismPlanner:
    """Applies the rule to the engines. Races (short rounds of tail batching) have a size of their own. With a
    largest width of 1 the size is fixed."""

    def __init__(self, engines: Sequence[Engine], progress: RolloutProgress, sharing: DeviceSharing) -> None:
        self.engines, self._progress, self._sharing = engines, progress, sharing
        self._rules: dict[bool, TensorParallelRule] = {}
        self._before = self._num_preempted()

    def round_ended(self) -> None:
        """Count the preemptions of the round."""
        before, self._before = self._before, self._num_preempted()
        if rule := self._rules.get(self._progress.is_race):
            rule.round_ended(self._before - before)

    async def choose(self) -> bool:
        """Resize the engines for the present rollout. Return whether some were restarted."""
        if not self._rules:
            start, largest = self._sharing.start_width(self._progress.num_needed), self._sharing.max_width
            self._rules = {is_race: TensorParallelRule(largest, start) for is_race in (True, False)}
        return await resize(self.engines, self._rules[self._progress.is_race].width)

    def _num_preempted(self) -> int:
        return sum(engine.usage().num_preempted for engine in self.engines)


MILESTONES = (0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50)
"""Shares of the finished responses at which the elastic placement tests whether engines may sleep."""
EARLY, LATE, NEAR = 0.4, 0.5, 0.9
"""Shares of the finished prompts at which half of the engines sleep in place of that: after a round of the
kind whose longest response had at least NEAR of the limit, and after another one (RollPacker's code)."""
ROUNDING = 1e-9
NEVER_STOPS = (
    "its engines never stop generating, so the trainer needs devices of its own; "
    'set placement.kind = "disaggregated"'
)


class PlacementSettings(OfKind, Settings):
    """Which devices generate and which train."""

    kind: Kind = "disaggregated"
    """"disaggregated": engines and trainer have devices of their own. "colocated": the same, in turn.
    "elastic": so, and in mid-round half of the engines give theirs to the first half of the trainer's
    replicas (RollPacker's stream trainer)."""
    lend_after: Literal["responses", "prompts"] = "responses"
    """When "elastic" lends devices. "responses": at 20% to 50% of the finished responses, once the KV cache
    of the rest fits on the other engines (RollPacker 4.4). "prompts": at 40% of the finished prompts, or 50%
    after a round whose longest response had less than 90% of the limit, whatever fits (RollPacker's code)."""
    devices: Literal["cpus", "gpus"] = "cpus"
    """Devices that `engines` and `trainer` number: "cpus" (cores, on Linux) or "gpus"."""
    engines: tuple[tuple[int, ...], ...] = ()
    """The devices of each engine, for example [[0], [1]]. An engine sees only its own. Empty: engines share
    all devices of the machine."""
    trainer: tuple[tuple[int, ...], ...] = ()
    """The devices of each replica of the trainer, divided among its ranks. Empty: they share all devices."""
    max_tensor_parallel_size: int | None = Field(default=None, ge=2, le=1024)
    """The largest tensor-parallel size to which engines are joined when they preempt more and more requests
    (RollPacker 4.2). engine.tensor_parallel_size is the smallest. None: the size is fixed. 2 to 1024."""
    start_tensor_parallel_size: int | None = Field(default=None, ge=1, le=1024)
    """The size of the first rounds. None: the fastest one by the offline profile; without one, the smallest.
    1 to 1024."""
    profile: RunPath | None = None
    """The offline profile of the engines, a file of `tailrace fit --profile`. None: a simulation computes it
    from [sim], and a live run has none."""

    @property
    def joins_engines(self) -> bool:
        """Whether a tensor-parallel size is chosen."""
        return bool(self.max_tensor_parallel_size or self.start_tensor_parallel_size or self.profile)


class Placement:
    """Disaggregated: engines and trainer never wait for a device."""

    def __init__(self, planner: ParallelismPlanner, pool: Pool, tasks: asyncio.TaskGroup) -> None:
        self._planner, self._pool, self._tasks = planner, pool, tasks

    def rollout_began(self) -> None:
        """Choose the devices of each engine before it serves the rollout."""
        self._pool.is_held = True
        self._tasks.create_task(self._resize_engines())

    async def round_ended(self) -> None:
        """Learn from the round. Where rollouts never end, choose the devices of each engine now."""
        self._planner.round_ended()
        if len(self._pool):
            await self._planner.choose()

    @asynccontextmanager
    async def training(self, *, all_replicas: bool = False) -> AsyncIterator[int | None]:
        """Yield how many replicas of the trainer, the first ones, may train inside the block; None: all. With
        `all_replicas` the block needs all, as an optimizer step does. Raises a ScheduleError if generation
        never stops, so that there are never devices to train on."""
        yield None

    async def generating(self) -> None:
        """Wait until the engines have their devices."""

    async def published(self) -> None:
        """Wait for the engines' devices after a publication. Raises a ScheduleError if groups are still in
        the pool: then generation never stops."""

    async def _resize_engines(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_TIMEOUT_S if await self._planner.choose() else 0.0):
                # The first engine that opens would get all requests.
                while self._pool.num_engines < sum(engine.width > 0 for engine in self._planner.engines):
                    await self._pool.engines_changed.wait("engines to open with another size")
        self._pool.release()


class Colocated(Placement):
    """All devices generate until the rollout is over; then all train, until engines wake again."""

    kind: Kind = "colocated"

    def __init__(
        self, planner: ParallelismPlanner, trainer: Trainer, pool: Pool, tasks: asyncio.TaskGroup
    ) -> None:
        super().__init__(planner, pool, tasks)
        self._engines, self._trainer = planner.engines, trainer
        self._asleep: list[Engine] = []
        self._lock = asyncio.Lock()
        pool.on_launch = self._on_launch

    def rollout_began(self) -> None:
        if not self._asleep:  # else it is a second one in a round, and keeps the size
            super().rollout_began()

    async def round_ended(self) -> None:
        await self._trainer.sleep()  # engines may start with another size
        await super().round_ended()

    @asynccontextmanager
    async def training(self, *, all_replicas: bool = False) -> AsyncIterator[int | None]:
        async with self._lock:
            if len(self._asleep) == len(self._engines) and not self._pool.is_idle:
                # A launch came after the last training; `generating` waits for the lock.
                await self._wake_engines()
            yield await self._devices_to_train_on(all_replicas)

    async def generating(self) -> None:
        if not self._asleep:
            return
        async with self._lock:
            await self._wake_engines()

    async def published(self) -> None:
        if len(self._pool):
            raise ScheduleError(f"the schedule publishes while groups are in the pool: {NEVER_STOPS}")
        await self.generating()

    async def _devices_to_train_on(self, all_replicas: bool) -> int | None:
        """Wait for devices; return how many replicas of the trainer have some, the first ones; None: all."""
        while not self._pool.is_idle:
            self._check_rollout_ends()
            await self._pool.changed.wait("the end of the rollout, to train on its devices")
        return await self._give_devices(self._engines)

    async def _wake_engines(self) -> None:
        asleep, self._asleep = self._asleep, []
        await self._trainer.sleep()
        with self._naming_settings("an engine", "trainer"):
            await asyncio.gather(*(engine.wake() for engine in asleep))

    def _check_rollout_ends(self) -> None:
        if self._pool.is_endless:
            raise ScheduleError(f"the schedule trains while it draws prompts without an end: {NEVER_STOPS}")

    async def _give_devices(self, engines: Sequence[Engine], replicas: int | None = None) -> int | None:
        """Put engines to sleep, and wake so many replicas of the trainer on their devices; None: all."""
        awake = [engine for engine in engines if engine not in self._asleep]
        self._asleep += awake
        await asyncio.gather(*(engine.sleep() for engine in awake))
        with self._naming_settings("the trainer", "engine"):
            await self._trainer.wake(replicas)
        return replicas

    @contextmanager
    def _naming_settings(self, who: str, other: str) -> Iterator[None]:
        """Turn a failure to wake into an error that names the settings to change."""
        try:
            yield
        except (NotWoken, ServerRefused) as why:
            problem = f"{who} cannot take its memory back beside what the {other} keeps ({why})"
            remedy = 'give the engines less memory, change [trainer.offload], or write "disaggregated"'
            raise ConfigError("placement.kind", self.kind, problem, remedy) from why

    def _on_launch(self) -> None:
        """Wake the engines for a launch that comes after the training of the same round."""
        if len(self._asleep) == len(self._engines):
            self._tasks.create_task(self.generating())


class Elastic(Colocated):
    """A colocated placement in which the engines on the devices of the early replicas may sleep before the
    rollout is over.

    At most once a rollout, tested at each milestone: they sleep if the projected peak of the KV cache of all
    unfinished requests fits on the others. Or they sleep at a share of the finished prompts, which follows
    from the longest response of the round of the same kind before. Their requests go on there from their
    tokens. The early replicas then accumulate complete groups. When the rollout is over all replicas train.
    """

    kind = "elastic"

    def __init__(
        self,
        planner: ParallelismPlanner,
        trainer: Trainer,
        pool: Pool,
        tasks: asyncio.TaskGroup,
        sharing: DeviceSharing,
    ) -> None:
        super().__init__(planner, trainer, pool, tasks)
        half = tuple(number >= (len(self._engines) + 1) // 2 for number in range(len(self._engines)))
        self._on_early_devices, self._early_replicas = sharing.engines or half, sharing.early_replicas
        self._tested, self._longest = -1, sharing.longest
        self._shares = {True: EARLY, False: EARLY}
        """Shares of the finished prompts at which engines sleep, in races and in other rounds."""

    async def generating(self) -> None:
        self._tested = -1
        await super().generating()

    async def round_ended(self) -> None:
        progress, near = self._pool.progress, NEAR * (self._longest or 0)
        self._shares[progress.is_race] = EARLY if progress.longest >= near else LATE
        await super().round_ended()

    async def _devices_to_train_on(self, all_replicas: bool) -> int | None:
        while not self._pool.is_idle:
            self._check_rollout_ends()
            if not self._asleep and self._is_due() and (engines := self._may_sleep()):
                await self._give_devices(engines, self._early_replicas)
                continue
            if self._asleep and not all_replicas:
                return self._early_replicas
            await self._pool.changed.wait("devices to train on")
        return await self._give_devices(self._engines)

    def _is_due(self) -> bool:
        """Whether a milestone was reached that was not tested, or the share of the prompts. After the last
        milestone there is no test."""
        progress = self._pool.progress
        if self._longest:
            needed = int(self._shares[progress.is_race] * progress.num_needed_groups)
            return progress.num_finished_groups >= needed
        share = progress.share + ROUNDING
        reached = max((n for n, milestone in enumerate(MILESTONES) if milestone <= share), default=-1)
        is_new, self._tested = reached > self._tested, max(reached, self._tested)
        return is_new

    def _may_sleep(self) -> list[Engine]:
        """Return the engines that may sleep now: those on the early replicas' devices, if the others have
        room for all unfinished requests, where room counts."""
        shares = sharing_engines([engine.width for engine in self._engines], self._on_early_devices)
        staying = [e for e, is_shared in zip(self._engines, shares, strict=True) if not is_shared and e.width]
        if not any(shares) or not any(engine.state == "open" for engine in staying):
            return []
        rooms = [engine.usage().kv_capacity for engine in staying if engine.state == "open"]
        # Whether the requests fit where a capacity is unknown is unknown, too.
        if not self._longest and self._projected_kv() > sum(-inf if room is None else room for room in rooms):
            return []
        return [e for e, is_shared in zip(self._engines, shares, strict=True) if is_shared and e.width]

    def _projected_kv(self) -> float:
        for engine in self._engines:
            engine.report()
        samples = [sample for group in self._pool.groups for sample in group.samples]
        unfinished = [sample for sample in samples if not sample.ended]
        contexts = [sample.num_context_tokens for sample in unfinished]
        more = self._pool.progress.lengths.expected_more([sample.num_tokens for sample in unfinished])
        return peak_kv(contexts, more)


def sharing_engines(widths: Sequence[int], shared: Sequence[bool]) -> list[bool]:
    """Return for each engine whether all devices of its tensor-parallel group are shared with early replicas.
    All are False if a group has devices of both kinds.

    Args:
        widths: engines joined to each one's tensor-parallel group; 0: it has joined another one's.
        shared: for each engine, whether its own devices are shared.
    """
    shares = [False] * len(widths)
    for number, width in enumerate(widths):
        group = shared[number : number + width]
        if any(group) and not all(group):
            return [False] * len(widths)
        shares[number] = bool(group) and all(group)
    return shares


DISAGGREGATED = DeviceSharing()


def make_placement(
    sharing: DeviceSharing, engines: Sequence[Engine], trainer: Trainer, pool: Pool, tasks: asyncio.TaskGroup
) -> Placement:
    planner = ParallelismPlanner(engines, pool.progress, sharing)
    placement = Placement(planner, pool, tasks)
    if sharing.lends:
        placement = Elastic(planner, trainer, pool, tasks, sharing)
    elif sharing.takes_turns:
        placement = Colocated(planner, trainer, pool, tasks)
    if sharing.max_width > 1:
        pool.on_rollout = placement.rollout_began
    return placement
