"""Run: the vocabulary that schedules speak.

    prompts --launch--> pool --take--> accumulate, step --> publish --> engines
       ^                 |  ^                                              |
       |              park  restart                                        |
       `-- data          v  |           rewards <-- finished samples <-----'
                  partial-rollout buffer

A schedule is an async function over these verbs. It keeps no state of its own at the top of a round, where
a resumed run starts. What it carries from one round to the next is in the run (`run.parked`, `run.pool`).
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite
from typing import Literal

from tailrace import clock
from tailrace.algo.advantages import ComputeAdvantages
from tailrace.contracts.data import Prompts
from tailrace.contracts.engine import Engine
from tailrace.contracts.weights import Weights
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.checkpoints import Checkpoints, Evaluations
from tailrace.controller.cost import Cost
from tailrace.controller.interruption import Interruption
from tailrace.controller.state import RunState
from tailrace.controller.watchdog import Watchdog
from tailrace.errors import BadRow, ConfigError, GroupsLost, NotFinite, ScheduleError, StalenessError
from tailrace.ledger.ledger import Ledger, NullJournal
from tailrace.ledger.recovery import StartingPoint
from tailrace.record import events
from tailrace.record.events import Recorder, RowSkipped
from tailrace.record.lags import Lags
from tailrace.rollout.difficulty import DifficultyPools
from tailrace.rollout.history import History
from tailrace.rollout.in_flight import Ages
from tailrace.rollout.placement import Placement
from tailrace.rollout.pool import PartialRolloutBuffer, Pool
from tailrace.rollout.router import Router
from tailrace.types import KV, Batch, Group, Prompt, Sample, SampleId, Stale, noise_seed, samples_of, units_of

MAX_CONSECUTIVE_BAD_ROWS = 10_000
"""A row without a usable prompt is skipped and counted. This many in succession end the run."""


class PromptSource:
    """Draws each row of the data once an epoch, in order, or passes it over. The ledger counts both."""

    def __init__(
        self,
        prompts: Prompts,
        pools: DifficultyPools,
        settings: RunSettings,
        ledger: Ledger,
        recorder: Recorder,
    ) -> None:
        self._prompts, self._pools, self._settings = prompts, pools, settings
        self._ledger, self._recorder = ledger, recorder

    def group(self, num_samples: int, round: int) -> Group:
        """A group of the next prompt that no pool passes over. Raises a ConfigError if the data has none, or
        no usable row left."""
        for _ in range(MAX_CONSECUTIVE_BAD_ROWS):
            self._ledger.draw(group := Group(self._next_prompt(), 0, [], round_drawn=round))
            if not (pool := self._pools.passes_over(group.prompt)):
                return self.begin(group, num_samples)
            self._ledger.end(group, "dropped", pool)
        problem = f"{MAX_CONSECUTIVE_BAD_ROWS} rows in succession were passed over"
        remedy = "raise data.pools.easy_fraction and hard_fraction, or give other rows"
        raise ConfigError("data.pools", pool, problem, remedy)

    def report_pools(self) -> None:
        """Record how many rows each pool has."""
        if self._pools.settings.is_used:
            sizes = {pool: self._pools.sizes[pool] for pool in ("easy", "hard")}
            self._recorder.emit(events.PoolsFilled(clock.now(), sizes))

    def recall(self, groups: Sequence[Group]) -> None:
        """Take up groups that an earlier process drew. One whose tokens are lost begins anew."""
        for group in groups:
            group.has_rules = self._settings.groups.applies_to(group.prompt)
            if not group.samples:
                self.begin(group, group.num_launched)
        self._ledger.recall(groups)

    def begin(self, group: Group, num_samples: int) -> Group:
        """The group with new samples for its current attempt."""
        group.has_rules = self._settings.groups.applies_to(group.prompt)
        group.num_required = self._settings.num_trained if group.has_rules else self._settings.group_size
        group.kept, group.oldest_version, group.num_launched, group.num_replaced = [], None, num_samples, 0
        group.samples = [self._sample(group, number) for number in range(num_samples)]
        return group

    def another(self, group: Group, gone: Sample | None) -> Sample | None:
        """One more sample of a group with rules; None if it may launch no more. `gone`: instead, that sample
        again, with the same noise, because its version is gone."""
        if gone:
            group.last_attempt += 1
            return self._sample(group, gone.id.number)
        if group.num_replaced == self._settings.groups.replacements:
            return None
        group.num_replaced += 1
        return self._sample(group, group.num_launched + group.num_replaced - 1)

    def _sample(self, group: Group, number: int) -> Sample:
        id = SampleId(group.prompt.index, group.last_attempt, number)
        return Sample(id, group, seed=noise_seed(self._settings.seed, id))

    def _next_prompt(self) -> Prompt:
        for _ in range(MAX_CONSECUTIVE_BAD_ROWS):
            index = self._ledger.totals.num_drawn
            try:
                return self._prompts[index]
            except BadRow as bad:
                self._ledger.skip()
                self._recorder.emit(RowSkipped(clock.now(), index, bad.reason, bad.detail))
                reason = bad.reason
        problem = f"{MAX_CONSECUTIVE_BAD_ROWS} rows in succession have no usable prompt"
        raise ConfigError("data", reason, problem, "check the data")


Receivers = Collection[Engine] | Literal["idle"] | None
"""Engines that get a publication: these; each one when it is idle; None: all."""


class WeightUpdate:
    """Loads the newest version into engines, between two decode steps: now, or when they are idle.

    Args:
        tasks: the loads run in this task group.
        ages: of the groups that engines may be working on.
    """

    def __init__(self, tasks: asyncio.TaskGroup, router: Router, ages: Ages) -> None:
        self._tasks, self._router, self._ages = tasks, router, ages
        self._loads: list[asyncio.Task[None]] = []
        self._weights: Weights | None = None
        self._kv: KV = "keep"
        self._is_pulled, self._under_way = False, set[int]()

    def distribute(self, weights: Weights, to: Receivers, kv: KV) -> None:
        """Begin to load a newer version. `kv`: whether engines keep the cache of requests in flight."""
        engines = self._router.engines
        self._weights, self._kv, self._is_pulled = weights, kv, to == "idle"
        self._router.versions.newest = weights.version
        chosen = engines if to is None else () if to == "idle" else to
        self.pull(chosen)
        for engine in engines:
            if engine not in chosen:
                engine.report()  # its tokens are a publication older now
        self._load_idle_engines()
        loads = list(self._loads)
        self._ages.published(lambda: all(load.done() for load in loads))

    def pull(self, engines: Collection[Engine]) -> None:
        """Begin to load the newest version into engines that do not serve it."""
        for number, engine in enumerate(self._router.engines):
            is_behind = self._router.versions.newest not in self._router.versions.served[number]
            if engine in engines and is_behind and number not in self._under_way:
                self._begin_load(number)

    async def arrived(self) -> None:
        """Wait until the engines have loaded what they are loading."""
        while loads := self._loads:
            self._loads = []
            await asyncio.wait(loads)

    def _begin_load(self, number: int) -> None:
        assert self._weights is not None
        self._under_way.add(number)
        self._loads.append(self._tasks.create_task(self._run_load(number, self._weights, self._kv)))

    async def _run_load(self, number: int, weights: Weights, kv: KV) -> None:
        await self._router.withdraw(number, weights.version)
        await self._router.engines[number].load(weights, kv=kv)
        self._under_way.discard(number)
        self._router.loaded(number, weights.version)

    async def keep(self) -> None:
        """Call `_load_idle_engines` after each change of an engine, until cancelled."""
        while True:
            self._load_idle_engines()
            await self._router.changed.wait(None)

    def _load_idle_engines(self) -> None:
        """Begin to load the newest version into engines without requests: all of them if they pull, else the
        closed ones, because a trainer does not keep older versions."""
        router, moves = self._router, self._router.moves.values()
        for number, engine in enumerate(router.engines if self._weights else ()):
            is_free = not router.serving[number] and number not in self._under_way and number not in moves
            is_behind = router.versions.newest not in router.versions.served[number]
            if is_free and is_behind and (self._is_pulled or engine.state != "open"):
                self._begin_load(number)


MAX_NOT_FINITE = 3
"""Consecutive optimizer steps without a finite loss or gradient that end the run. Their gradients are
discarded, and a single one may be an overflow of bfloat16."""


def check_verified(unable: str, key: str = "schedule.stale", value: object = "verify") -> None:
    """Raise a ConfigError for stale = "verify", or what else asks for it, if engines are unable to; empty:
    none is."""
    if unable:
        problem = f"{unable} cannot draw its tokens again with the same noise"
        remedy = "write another one, or choose the embedded engine"
        raise ConfigError(key, value, problem, remedy)


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of a run, which know each other. `controller.execution.joined` makes them."""

    components: RunComponents
    settings: RunSettings
    recorder: Recorder
    tasks: asyncio.TaskGroup
    advantages: ComputeAdvantages
    journal: NullJournal
    interruption: Interruption
    state: RunState
    ledger: Ledger
    history: History
    parked: PartialRolloutBuffer
    prompt_source: PromptSource
    router: Router
    cost: Cost
    pool: Pool
    update: WeightUpdate
    placement: Placement
    checkpoints: Checkpoints
    evaluations: Evaluations
    watchdog: Watchdog


class Run:
    """One run of a schedule. `start` is what earlier processes of it left."""

    def __init__(self, parts: RunParts, start: StartingPoint) -> None:
        self._parts, self._settings, self._state = parts, parts.settings, parts.state
        self._ledger, self._recorder = parts.ledger, parts.recorder
        self.pool, self.router, self.parked = parts.pool, parts.router, parts.parked
        self.history, self.checkpoints = parts.history, parts.checkpoints
        self.group_size = parts.settings.group_size
        """Samples of one prompt (K)."""
        self.declared: float | None = None
        """The bound on staleness that the schedule has declared, in publications."""
        self.masks = False
        """Whether tokens that are older than the bound are masked, and not waited for."""
        self.verifies = False
        """Whether tokens that are older than the bound are verified."""
        self._bound, self._lags = inf, Lags()
        self._drift = 0.0  # since the KV cache was last recomputed
        self._is_in_round = False
        self._accumulated: dict[SampleId, Sample] = {}
        self._waiting: list[list[Sample]] = []
        self._interrupted, self._on_dead_branch = start.interrupted, start.dead
        self.pool.replace = lambda group: self.prompts(1, group.num_launched)
        beside = (parts.watchdog.watch(), parts.journal.keep(), parts.update.keep())
        self._beside = [parts.tasks.create_task(work) for work in beside]

    # -- the vocabulary ----------------------------------------------------------------------------

    def declare(self, *, staleness: float, stale: Stale = "wait", pinned: int = 0) -> None:
        """Declare a bound on the age of trained tokens, asserted on every trained token.

        A schedule that declares nothing is refused before it starts.

        Args:
            staleness: publications; 0 is on-policy, math.inf is no bound.
            stale: "wait": an older token in a batch is an error. "mask": the tokens of a sample up to the
                last older one are masked out of the loss, and the others are trained. "verify": older ones
                are drawn again by the newest weights, as are all of an earlier life; what differs is lost.
            pinned: every sample ends on the version that it began with, which is the newest one when it
                begins, and an engine serves the last so many versions that it loaded. If no engine serves
                that of a sample any more, the sample starts again ("version gone"). 0: samples go on with new
                weights.

        Raises:
            ScheduleError: an engine serves fewer versions at a time.
            ConfigError: an engine cannot verify.
        """
        for engine in self.engines:
            if engine.versions < pinned:
                problem = f"{engine.name} serves {engine.versions} at a time, and the schedule needs {pinned}"
                remedy = (
                    "serve more adapters (trainer.lora.versions, sim.engines.versions), or lower staleness"
                )
                raise ScheduleError(f"versions of the weights: {problem}; {remedy}")
        self.declared, self.router.versions.pinned = staleness, pinned
        self._bound, self.masks = staleness, stale == "mask" and staleness < inf
        self.verifies = stale == "verify"
        if self.verifies:
            self._begin_to_verify()

    def _begin_to_verify(self) -> None:
        oldest = self.version - self._bound
        if self._bound == inf:
            problem = 'with stale = "verify" tokens are verified when they are older than a bound'
            raise ConfigError("schedule.staleness", None, problem, "set it")
        unable = [engine.name for engine in self.engines if not engine.capabilities.verifies]
        check_verified(", ".join(unable))
        self.router.max_age = int(self._bound)
        self.pool.verify(oldest)
        for group in [*self.parked.groups, *self._interrupted]:
            group.outdate(int(oldest) - 1)

    async def rounds(self, *, while_parked: bool = False) -> AsyncIterator[int]:
        """The rounds that remain. Evaluations and checkpoints stand between them.

        Args:
            while_parked: after the last round there are more rounds (`overtime`) until no group is parked.
        """
        while not self.overtime or (while_parked and len(self.parked)):
            await self._between_rounds()
            self._recorder.emit(events.RoundStarted(clock.now(), self.round, self.version))
            self._is_in_round = True
            yield self.round
            if self._accumulated:
                raise ScheduleError(
                    f"round {self.round} ended with {len(self._accumulated)} samples accumulated and no "
                    "step; call run.step() before the round ends"
                )
            await self._end_round()
        await self._between_rounds(last=True)

    @property
    def engines(self) -> Sequence[Engine]:
        return self._parts.components.engines

    @property
    def trainer_replicas(self) -> int:
        return self._parts.components.trainer.replicas

    @property
    def round(self) -> int:
        return self._state.round

    @property
    def version(self) -> int:
        """The published version."""
        return self._state.version

    @property
    def overtime(self) -> bool:
        """All configured rounds are over; only parked groups remain."""
        return self.round >= self._settings.rounds

    def prompts(self, n: int, samples: int | None = None) -> list[Group]:
        """The next n groups.

        Groups that a crash interrupted come first. They continue from their tokens where the bound allows
        it.

        Args:
            samples: samples to launch for each group; more than `group_size` makes the group a race for the
                first `group_size` samples. With rules in [run.groups] that is a ConfigError.
        """
        if samples and samples > self.group_size and self._settings.groups.has_rule:
            problem = "this schedule races the members of a group itself"
            remedy = "remove [run.groups], or set schedule.response_speculation = 1"
            raise ConfigError("run.groups", "these rules", problem, remedy)
        groups, self._interrupted = self._interrupted[:n], self._interrupted[n:]
        self.restart([group for group in groups if self._is_too_old(group)], reason="interrupted")
        while len(groups) < n:
            groups.append(self._parts.prompt_source.group(samples or self.group_size, self.round))
        return groups

    def restart(self, groups: list[Group], reason: str = "deferred") -> list[Group]:
        """Begin the prompts of groups again, with `group_size` samples each. The groups' tokens are waste."""
        for group in groups:
            for sample in group.samples:
                if sample.fate is None and sample.num_tokens:
                    self._ledger.waste(sample, reason)
            group.attempt = group.last_attempt = group.last_attempt + 1
            self._parts.prompt_source.begin(group, self.group_size)
        return groups

    def defer(self, groups: list[Group]) -> None:
        """Park groups that were drawn and not launched."""
        for group in groups:
            group.deferrals += 1
        self.parked.put(groups)

    def drop(self, groups: list[Group], reason: str) -> None:
        """Give up groups that were taken. Their tokens are waste with this reason."""
        for group in groups:
            self.pool.drop(group, reason)

    async def accumulate(self, batch: Batch) -> None:
        """Forward and backward pass now, or before the step if advantages depend on all of its samples.
        Gradients are kept; the weights do not change."""
        units = self._checked_units(batch)
        if self._parts.advantages.wait_for_step:
            self._waiting += units
        else:
            await self._accumulate(units)

    async def _accumulate(self, units: list[list[Sample]]) -> None:
        while units:
            async with self._parts.placement.training() as replicas:
                # One unit at a time, because the other replicas may join at any time.
                share, units = (units, []) if replicas is None else (units[:1], units[1:])
                start_s, samples = clock.now(), list(chain.from_iterable(share))
                await self._parts.components.trainer.accumulate(
                    share, version=self.version, replicas=replicas
                )
                num_tokens = sum(sample.num_tokens for sample in samples)
                ids = tuple(sample.id for sample in samples)
                self._recorder.emit(events.Accumulated(start_s, clock.now(), ids, num_tokens))

    async def step(self) -> None:
        """One optimizer step on all gradients accumulated since the last step."""
        lags, self._lags = self._lags, Lags()
        if waiting := self._waiting:
            self._waiting = []
            self._parts.advantages.of_step(list(chain.from_iterable(waiting)))
            await self._accumulate(waiting)
        async with self._parts.placement.training(all_replicas=True):
            start_s = clock.now()
            async with self._parts.interruption.protected():
                stats = await self._parts.components.trainer.step()
                self._state.stepped(stats)
                self._drift += stats.kl / max(1.0, lags.mean)
                samples = tuple(self._accumulated.pop(id) for id in stats.samples)
                self._ledger.train(samples, stats.num_steps)
        for group in dict.fromkeys(sample.group for sample in samples):
            self.history.observe(group)
        self.router.report_preemptions()
        self.pool.report_stages()
        self._parts.prompt_source.report_pools()
        overrun = self._parts.cost.record()
        self._recorder.emit(events.Stepped(start_s, clock.now(), stats, lags, samples))
        self._parts.watchdog.stepped()
        if self._state.completes_round:
            self._parts.interruption.complete()
            await asyncio.sleep(0)  # the schedule ends here, before it begins anything else
        elif overrun:
            self._parts.interruption.stop(overrun, "prices.budget")
        if self._state.num_not_finite == MAX_NOT_FINITE:
            self._raise_not_finite()

    async def train(self, batch: Batch) -> None:
        """accumulate, then step."""
        await self.accumulate(batch)
        await self.step()

    async def publish(self, *, to: Receivers = None, kv: KV | float = "keep") -> None:
        """Send the weights to engines. These load them between two decode steps; no request ends.

        Returns when the weights are on their way. Requests launched from now on get the new weights, and
        training may go on while engines load. The next publication waits until this one has arrived.

        Args:
            to: None: every engine. "idle": each takes the newest weights when it has no request. Else only
                these, at least one; the others keep their weights. Of pinned samples, an engine gives back
                those whose version it will not serve any more. Evaluations wait for an engine of the newest.
            kv: whether engines keep or recompute the KV cache of requests in flight. A number: they keep it
                while the drift since they last recomputed it is below, in nats a token. The drift is a sum
                over optimizer steps: the KL of the behaviour policy to the current one over the tokens of the
                step, divided by their mean lag if that is above 1.
        """
        if to is not None and not to:
            raise ScheduleError('publish(to=...) names no engine; name one, or write to="idle"')
        if self.verifies and to is not None:
            problem = 'with stale = "verify" each engine needs the newest weights'
            raise ScheduleError(f"publish(to=...): {problem}; leave `to` out")
        version = self.version + 1
        start_s = clock.now()
        weights = await self._parts.components.trainer.publish(version)
        await self._parts.update.arrived()
        await self._parts.evaluations.make_room(version)
        self._state.published(version)
        kv = self._keep_or_recompute("recompute" if self.verifies else kv)
        self._parts.update.distribute(weights, to, kv)
        if self.verifies:
            self.pool.verify(version - self._bound)
        await asyncio.sleep(0)  # the loads reach the engines before any later request does
        self._recorder.emit(events.Published(start_s, clock.now(), version, weights.changed, kv))
        await self._parts.placement.published()

    def pull(self, engines: Collection[Engine]) -> None:
        """Let engines load the published weights now. Others go on with pinned samples of older versions."""
        self._parts.update.pull(engines)

    @contextmanager
    def every(self, seconds: float, call: Callable[[], None]) -> Iterator[None]:
        """Call a function every so many seconds of the rounds inside the block."""

        async def keep_calling() -> None:
            while True:
                await asyncio.sleep(seconds)
                if self._is_in_round:
                    call()

        timer = self._parts.tasks.create_task(keep_calling())
        try:
            yield
        finally:
            timer.cancel()

    def serving(self, engine: Engine) -> list[Sample]:
        """The samples that an engine serves now."""
        return list(self.router.serving[self.engines.index(engine)])

    def served(self, engine: Engine) -> tuple[int, ...]:
        """The versions that an engine serves, the oldest first. Empty while it loads."""
        return self.router.versions.served[self.engines.index(engine)]

    def move(self, sample: Sample, engine: Engine) -> None:
        """Let another engine of the same version go on with a request in flight, without prefill where
        engines can hand over a KV cache. One that is not in flight stays where it is."""
        source = next((each for each in self.engines if sample in self.serving(each)), engine)
        version = self.served(source)[-1:] if sample.pin is None else (sample.pin,)
        if not {*version} & {*self.served(engine)}:
            served = self.served(engine)
            problem = f"cannot move to {engine.name}, which serves {served} and not version {version}"
            raise ScheduleError(f"sample {sample.id} {problem}")
        if source is not engine:
            self.router.move(sample, self.engines.index(engine))

    async def ess(self, groups: Sequence[Group]) -> float:
        """Effective sample size under the current weights of the groups' tokens that would be in the loss, in
        (0, 1] (PipelineRL 5)."""
        async with self._parts.placement.training(all_replicas=True):
            ess = await self._parts.components.trainer.ess(self._masked(groups), version=self.version)
        self._recorder.emit(events.EssTaken(clock.now(), ess))
        return ess

    def staleness(self, group: Group) -> int:
        """Publications since the oldest token of the group was generated."""
        if group.oldest_version is None:
            return int(group in self.pool.ages.may_start_older)
        return self.version - group.oldest_version

    def shuffled(self, batch: Batch) -> list[Sample]:
        """The samples in an order that depends on the seed and the round only."""
        samples = samples_of(batch)
        random.Random(f"shuffle {self._settings.seed} {self.round}").shuffle(samples)
        return samples

    async def finish(self) -> None:
        """Stop all requests and check the ledger.

        Raises:
            GroupsLost: the schedule took groups and neither trained, dropped nor parked them.
            LedgerError: tokens are unaccounted for.
        """
        await self.pool.park()
        await self._parts.update.arrived()
        await self._parts.evaluations.ended()
        here = {group.prompt.index for group in [*self.parked.groups, *self._interrupted]}
        if lost := sorted(self._ledger.active.keys() - here):
            raise GroupsLost(f"prompts {lost} were taken and neither trained, dropped nor parked")
        await self._close_ledger()

    async def complete_round(self) -> None:
        """End a round that an earlier life began, with the steps that it lacked. The schedule then begins
        again at the top of the next round, as after a crash: first with the groups that this one held."""
        parked = list(self.parked.groups)
        await self.pool.park()
        await self.publish()
        await self._parts.update.arrived()
        self.parked.groups = parked
        held = [group for group in self._ledger.active.values() if group not in parked]
        self._interrupted = [group for group in held if not self._is_partly_trained(group)]
        await self._end_round()

    def _is_partly_trained(self, group: Group) -> bool:
        """Whether some of a group's samples were trained in an earlier step. The others are waste then."""
        left = [sample for sample in group.samples if sample.fate is None]
        if len(left) == len(group.samples):
            return False
        for sample in left:
            self._ledger.waste(sample, "interrupted")
        self._ledger.end(group, "trained", "trained")
        return True

    async def interrupt(self) -> None:
        """Stop all requests in mid-round, save the trainer and check the ledger."""
        parked = list(self.parked.groups)  # without those that only the interruption parks
        await self.pool.park()
        await self._parts.update.arrived()
        await self.checkpoints.save_mid_round(parked)
        await self._parts.evaluations.ended()
        await self._close_ledger()

    def shut(self) -> None:
        """Stop everything that runs beside the schedule."""
        for task in self._beside:
            task.cancel()
        self.pool.shut()

    def _is_too_old(self, group: Group) -> bool:
        """Whether an interrupted group must start from nothing. A schedule that waits counts ages along one
        sequence of versions, so a group with tokens of versions that were undone starts from nothing, too."""
        if self.masks or self.verifies:
            return False
        undone = group in self._on_dead_branch and self._bound < inf
        return undone or self.staleness(group) > self._bound

    def _masked(self, batch: Batch) -> list[list[Sample]]:
        """Return the units of a batch, without the tokens that are too old in the loss."""
        units = units_of(batch)
        oldest = 0 if self._parts.advantages.masks_carried else self._bound if self.masks else inf
        for sample in chain.from_iterable(units):
            sample.num_masked = sample.num_older(self.version - oldest)
        return units

    def _checked_units(self, batch: Batch) -> list[list[Sample]]:
        """Return the units of a batch, masked, and count their lags.

        Raises:
            ScheduleError: a sample was accumulated already.
            StalenessError: a token in the loss is older than declared.
        """
        units = self._masked(batch)
        for sample in chain.from_iterable(units):
            if sample.id in self._accumulated:
                raise ScheduleError(f"sample {sample.id} is to be trained twice; train each group once")
            self._accumulated[sample.id] = sample
            self._lags.add(sample, self.version, self._state.lag)
            if self.router.versions.pinned and len(sample.spans) > 1:
                raise StalenessError(f"sample {sample.id} is pinned and has tokens of {sample.spans}")
            age = max((self.version - span.version for span in sample.loss_spans), default=0)
            if age > self._bound:
                raise StalenessError(
                    f"sample {sample.id} has tokens {age} publications old and the schedule declared at most "
                    f"{self._bound}: {sample.spans}, {sample.num_masked} masked, now {self.version}"
                )
        return units

    def _keep_or_recompute(self, kv: KV | float) -> KV:
        if not isinstance(kv, str):
            kv = "keep" if self._drift < kv else "recompute"  # a KL that is not a number recomputes, too
        if kv == "recompute":
            self._drift = 0.0
        return kv

    def _raise_not_finite(self) -> None:
        num, steps = self._state.num_not_finite, self._state.num_steps
        raise NotFinite(
            f"step {steps - num + 1} was the first of {num} without a finite loss or gradient; lower "
            "trainer.learning_rate, then --resume, which goes on from the newest checkpoint"
        )

    async def _end_round(self) -> None:
        self._is_in_round = False
        self._parts.cost.record()
        self._recorder.emit(events.RoundEnded(clock.now(), self.round))
        await self._parts.placement.round_ended()
        self._state.end_round()

    async def _between_rounds(self, *, last: bool = False) -> None:
        if last and not isfinite(self._state.loss):
            self._raise_not_finite()
        await self.pool.settled()
        async with self._parts.interruption.protected():
            await self.checkpoints.save_if_due(self.parked.groups, last=last)
        await self._parts.placement.generating()
        if not self._state.cut_steps:  # else the evaluation of this round was made before its first step
            await self._parts.evaluations.run_if_due(self.round, last=last)

    async def _close_ledger(self) -> None:
        self._ledger.check(self._parts.cost.num_generated)
        self.router.check_counts()
        self._parts.cost.record()
        self._ledger.measure = lambda: None  # what the store gets now is what was paid
        tokens = self._ledger.held_tokens, self._ledger.drafted_tokens
        self._recorder.emit(events.BooksClosed(clock.now(), len(self._ledger.active), *tokens))
        await self._parts.journal.finish()
