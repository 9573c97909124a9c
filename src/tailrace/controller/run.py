"""Run: wires the rooms, and is the vocabulary that schedules speak.

    prompts --launch--> pool --take--> accumulate, step --> publish --> engines
       ^                 |  ^                                              |
       |              park  restart                                        |
       `-- data          v  |           rewards <-- finished samples <-----'
                        parked

A schedule is an async function over these verbs. It must be memoryless at the top of a round: what it keeps
from one round to the next, it gets from the run (`run.parked`, `len(run.pool)`, `run.prompts`), because that
is where a killed run starts again.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from math import inf
from pathlib import Path

from tailrace import clock
from tailrace.ahead import Ahead
from tailrace.algo.compute_advantages import GRPO
from tailrace.controller.checkpoints import Checkpoints
from tailrace.controller.prompts import PromptSource
from tailrace.errors import GroupsLost, ScheduleError, StalenessError
from tailrace.ledger.journal import Journal, Unwritten
from tailrace.ledger.ledger import Ledger
from tailrace.ledger.past import Past
from tailrace.controller.base import Parts, RunSettings
from tailrace.record import events
from tailrace.record.lags import Lags
from tailrace.controller.publication import WeightUpdate
from tailrace.rollout.router import Router
from tailrace.rollout.history import History
from tailrace.rollout.pool import Pool
from tailrace.rollout.reference import WithReference
from tailrace.rollout.partial_rollouts import PartialRolloutBuffer
from tailrace.controller.state import RunState
from tailrace.types import KV, Batch, Group, Sample, SampleId, samples_of, units_of
from tailrace.controller.watchdog import Watchdog


class Run:
    """One run of a schedule."""

    def __init__(
        self,
        parts: Parts,
        settings: RunSettings,
        recorder: events.Recorder,
        tasks: asyncio.TaskGroup,
        *,
        compute_advantages: Callable[[Group], str | None] = GRPO,
        folder: Path | None = None,
        past: Past | None = None,
        journal: Journal | Unwritten | None = None,
    ) -> None:
        """compute_advantages: sets the advantages of a complete group. folder: where checkpoints go.
        past: what an earlier life left. journal: writes this one down."""
        past = past or Past()
        self.K = settings.group_size
        self._parts, self._settings, self._recorder = parts, settings, recorder
        self._standing, self._dead = RunState(past), past.dead
        self.promised: float | None = None
        """The bound on staleness that the schedule declared, in publications."""
        self._accumulated: dict[SampleId, Sample] = {}
        self._answered_s = 0.0
        """When the trainer did the last thing that it was asked to."""
        self._tasks = tasks
        self._arriving: WeightUpdate | None = None
        self._one_after_another = asyncio.Lock()  # of publications
        self._lags = Lags()
        self._generated_before = past.num_generated - self._produced()
        self._journal = journal or Unwritten()
        self._ledger = Ledger(recorder, past.totals, self._journal)
        self._journal.follow(self._ledger)
        self.history = History(past.longest)
        self.parked, self._interrupted = PartialRolloutBuffer(past.partial_rollouts), past.interrupted
        self._ledger.recall([*self.parked.groups, *self._interrupted])
        self.router = Router(parts.engines, recorder)
        self._drawing = PromptSource(parts.prompts, settings, self._ledger, recorder)
        self._between = Checkpoints(
            parts,
            settings,
            self.router,
            self._ledger,
            self._journal,
            recorder,
            folder=folder,
            base=past.checkpoint,
        )
        self.pool = Pool(
            tasks,
            self.router,
            WithReference(parts.rewards, parts.reference) if parts.reference else parts.rewards,
            self._ledger,
            self.parked,
            recorder,
            replace=lambda samples: self.prompts(1, samples=samples),
            compute_advantages=compute_advantages,
        )
        self._watchdog = Watchdog(recorder, settings.patience_s, settings.give_up_s)
        self._beside = [tasks.create_task(work) for work in (self._watchdog.watch(), self._journal.keep())]

    # -- the vocabulary ----------------------------------------------------------------------------

    def promise(self, *, staleness: float) -> None:
        """No token that is trained is older than so many publications; 0 is on-policy, math.inf no bound.
        Asserted on every token. A schedule that promises nothing is refused before it starts."""
        self.promised = staleness

    async def rounds(self, *, while_parked: bool = False) -> AsyncIterator[int]:
        """The rounds that remain. Evaluation and checkpoints stand between them. while_parked: when they are
        over, there are more, in `overtime`, until nothing is parked."""
        while not self.overtime or (while_parked and len(self.parked)):
            await self._between_rounds()
            self._emit(events.RoundStarted(clock.now(), self.round, self.version))
            yield self.round
            if self._accumulated:
                raise ScheduleError(
                    f"round {self.round} ended with {len(self._accumulated)} samples accumulated and no "
                    "step; call run.step() before the round ends"
                )
            self._emit(events.RoundEnded(clock.now(), self.round))
            self._standing.round += 1
        await self._between_rounds(last=True)

    @property
    def round(self) -> int:
        return self._standing.round

    @property
    def version(self) -> int:
        """The published one."""
        return self._standing.version

    @property
    def overtime(self) -> bool:
        """No round of the run's own remains: what is parked is to be brought to its end."""
        return self.round >= self._settings.rounds

    def prompts(self, n: int, samples: int | None = None) -> list[Group]:
        """The next n groups, of K samples each; with more samples than K a group is a race for the first
        K. Groups that a crash interrupted come first, from their tokens if the promise allows it."""
        groups, self._interrupted = self._interrupted[:n], self._interrupted[n:]
        stale = [group for group in groups if self._must_start_afresh(group)]
        self.restart(stale, reason="interrupted")
        while len(groups) < n:
            groups.append(self._drawing.group(samples or self.K, self.round))
        return groups

    def restart(self, groups: list[Group], reason: str = "deferred") -> list[Group]:
        """The same prompts from nothing, K samples each; their tokens are waste."""
        for group in groups:
            for sample in group.samples:
                if sample.fate is None and sample.num_tokens:
                    self._ledger.waste(sample, reason)
            group.attempt += 1
            group.kept, group.oldest_version, group.num_launched = [], None, self.K
            group.samples = self._drawing.samples(group, self.K)
        return groups

    def defer(self, groups: list[Group]) -> None:
        """Put groups that were drawn off until later: they are parked before they start."""
        for group in groups:
            group.deferrals += 1
        self.parked.put(groups)

    def drop(self, groups: list[Group], reason: str) -> None:
        """Give taken groups up, counted."""
        for group in groups:
            self.pool.drop(group, reason)

    async def accumulate(self, batch: Batch) -> None:
        """Forward and backward now; the weights stay as they are."""
        await self._accumulate(self._checked(batch))

    async def step(self) -> None:
        """One optimizer step on what was accumulated since the last."""
        await self._step(self._ask_step())

    async def train(self, batch: Batch, *, publish: KV | None = None) -> None:
        """accumulate, then step; then publish, where it is said what becomes of the cache. All is asked for
        together, so that the trainer need not wait in between."""
        units = self._checked(batch)  # before anything is asked for
        verbs = [self._accumulate(units), self._step(self._ask_step())]
        if publish:
            verbs.append(self._publish(self._standing.ask_publication(), publish))
        await asyncio.gather(*verbs)

    @asynccontextmanager
    async def ahead(self, *, publish: KV | None = None) -> AsyncIterator[Ahead]:
        """Its `train` is as this one's, but returns while its batch is still with the trainer: the next is
        handed over before the trainer is done. All of them are trained when the block ends."""
        ahead = Ahead(lambda batch: self._tasks.create_task(self.train(batch, publish=publish)))
        yield ahead
        await ahead.trained()

    async def publish(self, *, kv: KV = "keep") -> None:
        """The weights to every engine, between two decode steps; nothing in flight ends. They are on their
        way when this returns: all that is launched from now on gets them, and the trainer may go on. kv: what
        becomes of the cache that older weights computed."""
        await self._publish(self._standing.ask_publication(), kv)

    async def ess(self, groups: Sequence[Group]) -> float:
        """Effective sample size of the groups' tokens under the current weights, in (0, 1]."""
        ess = await self._parts.trainer.ess(units_of(groups))
        self._emit(events.EssTaken(clock.now(), ess))
        return ess

    def on_policy(self, ready: Collection[Group], wanted: int) -> list[Group]:
        """A selection: only groups whose every token is of the published version."""
        return [group for group in ready if self.staleness(group) == 0][:wanted]

    def staleness(self, group: Group) -> int:
        """How many publications ago its oldest token was produced. One that has none may still get it from
        the version before, where the published one has not arrived."""
        if group.oldest_version is None:
            return int(self._arriving is not None and self._arriving.awaits(group))
        return self.version - group.oldest_version

    def shuffled(self, batch: Batch) -> list[Sample]:
        """The samples in an order that depends on the seed and the round only."""
        samples = samples_of(batch)
        random.Random(f"shuffle {self._settings.seed} {self.round}").shuffle(samples)
        return samples

    # -- what schedules do not see -------------------------------------------------------------------

    def _emit(self, event: events.Event) -> None:
        self._recorder.emit(event)

    def _must_start_afresh(self, group: Group) -> bool:
        """An interrupted group: what keeps a bound by structure counts on ages along one branch."""
        dead = group in self._dead and self._bound < inf
        return dead or self.staleness(group) > self._bound

    @property
    def _bound(self) -> float:
        return inf if self.promised is None else self.promised

    async def _accumulate(self, units: list[list[Sample]]) -> None:
        samples = list(chain.from_iterable(units))
        asked_s = clock.now()
        await self._parts.trainer.accumulate(units)
        start_s = self._answered(asked_s)
        num_tokens = sum(sample.num_tokens for sample in samples)
        ids = tuple(sample.id for sample in samples)
        self._emit(events.Accumulated(start_s, clock.now(), ids, num_tokens))

    def _ask_step(self) -> Lags:
        """Of what it trains. From now on it counts as asked for."""
        lags, self._lags = self._lags, Lags()
        self._standing.steps_asked += 1
        return lags

    async def _step(self, lags: Lags) -> None:
        asked_s = clock.now()
        stats = await self._parts.trainer.step()
        start_s = self._answered(asked_s)
        self._standing.num_steps = stats.num_steps
        samples = tuple(self._accumulated.pop(id) for id in stats.samples)
        self._ledger.train(samples, stats.num_steps)
        for group in dict.fromkeys(sample.group for sample in samples):
            self.history.observe(group)
        self._emit(events.Stepped(start_s, clock.now(), stats, lags, samples))
        self._watchdog.stepped()

    async def _publish(self, version: int, kv: KV) -> None:
        asked_s = clock.now()
        # Two versions before may still be on their way, where the trainer is ahead: it keeps them.
        weights = await self._parts.trainer.publish(version)
        start_s = self._answered(asked_s)
        async with self._one_after_another:
            await self._arrived()
            self._standing.version = version
            self._arriving = WeightUpdate(self._tasks, self._parts.engines, weights, kv, self.pool.living)
            await asyncio.sleep(0)  # the engines are told before anything else is asked of them
            self._emit(events.Published(start_s, clock.now(), version))

    def _answered(self, asked_s: float) -> float:
        """The trainer has done what it was asked to at a time: when did it begin with that?"""
        start_s, self._answered_s = max(asked_s, self._answered_s), clock.now()
        return start_s

    def _checked(self, batch: Batch) -> list[list[Sample]]:
        """The units of a batch, none of which is with the trainer already or has a token older than promised
        when it is trained; their lags are counted."""
        units, version = units_of(batch), self._standing.version_asked
        for sample in chain.from_iterable(units):
            if sample.id in self._accumulated:
                raise ScheduleError(f"sample {sample.id} is to be trained twice; train each group once")
            self._accumulated[sample.id] = sample
            self._lags.add(sample, version, self._standing.steps_since)
            if sample.spans and version - sample.oldest_version > self._bound:
                raise StalenessError(
                    f"sample {sample.id} has tokens {version - sample.oldest_version} publications old and the "
                    f"schedule promised at most {self._bound}: {sample.spans}, now {version}"
                )
        return units

    async def _between_rounds(self, *, last: bool = False) -> None:
        await self.pool.settled()
        await self._between.save(self._standing, self.parked.groups, self.history.longest, last=last)
        await self._between.evaluate(self.round, last=last)

    async def _arrived(self) -> None:
        """Wait until the published weights are where they were sent."""
        if self._arriving is not None:
            await self._arriving.ended()
            self._arriving = None

    def _produced(self) -> int:
        return sum(engine.usage().num_generated for engine in self._parts.engines)

    async def finish(self) -> None:
        """Bring everything in, and close the books.

        Raises:
            GroupsLost: the schedule took groups and neither trained nor dropped nor parked them.
            LedgerError: tokens are unaccounted for.
        """
        await self.pool.park()
        await self._arrived()
        here = {group.prompt.index for group in [*self.parked.groups, *self._interrupted]}
        if lost := sorted(self._ledger.living.keys() - here):
            raise GroupsLost(f"prompts {lost} were taken and neither trained, dropped nor parked")
        self._ledger.check(self._produced() + self._generated_before)
        self._emit(events.BooksClosed(clock.now(), len(self._ledger.living), self._ledger.held_tokens))
        await self._journal.finish()

    def shut(self) -> None:
        """Stop everything that runs beside the schedule."""
        for task in self._beside:
            task.cancel()
        self.pool.shut()
