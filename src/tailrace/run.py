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
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from pydantic import Field

from tailrace import clock
from tailrace.algo.materialise import GRPO
from tailrace.data.base import Prompts
from tailrace.engine.base import Engine
from tailrace.errors import BadRow, ConfigError, GroupsLost, ScheduleError, StalenessError, first_cause
from tailrace.ledger.journal import Journal, Unwritten
from tailrace.ledger.ledger import Ledger
from tailrace.ledger.past import Past
from tailrace.record import events
from tailrace.record.lags import Lags
from tailrace.reward.base import Rewards
from tailrace.rollout.evaluation import evaluate, held_out_samples
from tailrace.rollout.fleet import Fleet
from tailrace.rollout.history import History
from tailrace.rollout.pool import Pool
from tailrace.rollout.reference import WithReference
from tailrace.rollout.shelf import Shelf
from tailrace.settings import Settings
from tailrace.trainer.base import Reference, Trainer
from tailrace.types import KV, Batch, Group, Prompt, Sample, SampleId, noise_seed, samples_of, units_of
from tailrace.watchdog import Watchdog

MAX_SKIPPED_IN_A_ROW = 10_000
"""Rows without a usable prompt are skipped and counted; so many together are no accident."""


class RunSettings(Settings):
    """How long a run is, and what it does between rounds."""

    rounds: int = Field(ge=1)
    group_size: int = Field(ge=1)
    """K: samples of one prompt."""
    seed: int = 0
    eval_every: int = Field(default=0, ge=0)
    """Rounds between evaluations, which also stand at the start and at the end; 0: none."""
    eval_prompts: int = Field(default=128, ge=1)
    """Held-out prompts, one sample each, at the sampling temperature."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Rounds between checkpoints, the last round always among them; 0: none."""
    patience_s: float = Field(default=300.0, gt=0)
    """So long without an optimizer step, and the run says who waits for what."""
    give_up_s: float = Field(default=86_400.0, gt=0)
    """So long without an optimizer step, and the run ends with that as its error."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is wired from: live or simulated."""

    engines: Sequence[Engine]
    trainer: Trainer
    rewards: Rewards
    prompts: Prompts
    held_out: Prompts
    reference: Reference | None = None
    """Where the algorithm wants a KL to it."""


Schedule = Callable[..., Coroutine[Any, Any, None]]
"""An async function of a run and its own parameters."""


class Run:
    """One run of a schedule."""

    def __init__(
        self,
        parts: Parts,
        settings: RunSettings,
        recorder: events.Recorder,
        tasks: asyncio.TaskGroup,
        *,
        materialise: Callable[[Group], str | None] = GRPO,
        folder: Path | None = None,
        past: Past | None = None,
        journal: Journal | Unwritten | None = None,
    ) -> None:
        """materialise: of the algorithm. folder: where checkpoints go. past: what an earlier life left.
        journal: writes this one down."""
        past = past or Past()
        self.K = settings.group_size
        self.round, self.version = past.round, past.version
        self._parts, self._settings, self._recorder, self._folder = parts, settings, recorder, folder
        self._base, self._dead = past.checkpoint, past.dead
        self.promised: float | None = None
        """The bound on staleness that the schedule declared, in publications."""
        self._accumulated: dict[SampleId, Sample] = {}
        self._lags = Lags()
        self._steps_at = past.steps_at or {self.version: past.step}
        self._num_steps = past.step
        self._generated_before = past.num_generated - self._produced()
        self._journal = journal or Unwritten()
        self._ledger = Ledger(recorder, past.totals, self._journal)
        self._journal.follow(self._ledger)
        self.history = History(past.longest)
        self.parked, self._interrupted = Shelf(past.shelf), past.interrupted
        self._ledger.recall([*self.parked.groups, *self._interrupted])
        self.fleet = Fleet(parts.engines, recorder)
        self.pool = Pool(
            tasks,
            self.fleet,
            WithReference(parts.rewards, parts.reference) if parts.reference else parts.rewards,
            self._ledger,
            self.parked,
            recorder,
            replace=lambda samples: self.prompts(1, samples=samples),
            materialise=materialise,
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
            self.round += 1
        await self._between_rounds(last=True)

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
            prompt = self._next_prompt()
            group = Group(prompt, self.K, [], num_launched=samples or self.K, drawn=self.round)
            group.samples = self._new_samples(group, group.num_launched)
            self._ledger.draw(group)
            groups.append(group)
        return groups

    def restart(self, groups: list[Group], reason: str = "deferred") -> list[Group]:
        """The same prompts from nothing, K samples each; their tokens are waste."""
        for group in groups:
            for sample in group.samples:
                if sample.fate is None and sample.num_tokens:
                    self._ledger.waste(sample, reason)
            group.attempt += 1
            group.kept, group.born, group.num_launched = [], None, self.K
            group.samples = self._new_samples(group, self.K)
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
        units = units_of(batch)
        samples = [sample for unit in units for sample in unit]
        self._check_staleness(samples)
        self._accumulated.update((sample.id, sample) for sample in samples)
        start_s = clock.now()
        await self._parts.trainer.accumulate(units)
        num_tokens = sum(sample.num_tokens for sample in samples)
        ids = tuple(sample.id for sample in samples)
        self._emit(events.Accumulated(start_s, clock.now(), ids, num_tokens))

    async def step(self) -> None:
        """One optimizer step on what was accumulated since the last."""
        start_s = clock.now()
        stats = await self._parts.trainer.step()
        self._num_steps = stats.num_steps
        samples = tuple(self._accumulated.pop(id) for id in stats.samples)
        self._ledger.train(samples, self._num_steps)
        for group in dict.fromkeys(sample.group for sample in samples):
            self.history.observe(group)
        self._emit(events.Stepped(start_s, clock.now(), stats, self._lags, samples))
        self._lags = Lags()
        self._watchdog.stepped()

    async def train(self, batch: Batch) -> None:
        """accumulate, then step."""
        await self.accumulate(batch)
        await self.step()

    async def publish(self, *, kv: KV = "keep") -> None:
        """The weights to every engine, between two decode steps; nothing in flight ends. kv: what
        becomes of the cache that older weights computed."""
        start_s = clock.now()
        weights = await self._parts.trainer.publish(self.version + 1)
        self.version += 1
        self._steps_at[self.version] = self._num_steps
        await asyncio.gather(*(engine.load(weights, kv=kv) for engine in self._parts.engines if engine.open))
        self._emit(events.Published(start_s, clock.now(), self.version))

    async def ess(self, groups: Sequence[Group]) -> float:
        """Effective sample size of the groups' tokens under the current weights, in (0, 1]."""
        ess = await self._parts.trainer.ess(units_of(groups))
        self._emit(events.EssTaken(clock.now(), ess))
        return ess

    def on_policy(self, ready: Collection[Group], wanted: int) -> list[Group]:
        """A selection: only groups whose every token is of the published version."""
        return [group for group in ready if self.staleness(group) == 0][:wanted]

    def staleness(self, group: Group) -> int:
        """How many publications ago its oldest token was produced."""
        return 0 if group.born is None else self.version - group.born

    def shuffled(self, batch: Batch) -> list[Sample]:
        """The samples in an order that depends on the seed and the round only."""
        samples = samples_of(batch)
        random.Random(f"shuffle {self._settings.seed} {self.round}").shuffle(samples)
        return samples

    # -- what schedules do not see -------------------------------------------------------------------

    def _emit(self, event: events.Event) -> None:
        self._recorder.emit(event)

    def _next_prompt(self) -> Prompt:
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            index = self._ledger.totals.num_drawn
            try:
                return self._parts.prompts[index]
            except BadRow as bad:
                self._ledger.skip()
                self._emit(events.RowSkipped(clock.now(), index, bad.reason))
                reason = bad.reason
        raise ConfigError(
            "data", reason, f"{MAX_SKIPPED_IN_A_ROW} rows in a row have no usable prompt", "check the data"
        )

    def _new_samples(self, group: Group, n: int) -> list[Sample]:
        ids = [SampleId(group.prompt.index, group.attempt, index) for index in range(n)]
        return [Sample(id, group, seed=noise_seed(self._settings.seed, id)) for id in ids]

    def _must_start_afresh(self, group: Group) -> bool:
        """An interrupted group: what keeps a bound by structure counts on ages along one branch."""
        dead = group in self._dead and self._bound < inf
        return dead or self.staleness(group) > self._bound

    @property
    def _bound(self) -> float:
        return inf if self.promised is None else self.promised

    def _check_staleness(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._lags.add(sample, self.version, self._steps_since)
            if sample.spans and self.version - sample.oldest > self._bound:
                raise StalenessError(
                    f"sample {sample.id} has tokens {self.version - sample.oldest} publications old and the "
                    f"schedule promised at most {self._bound}: {sample.spans}, now {self.version}"
                )

    def _steps_since(self, version: int) -> int:
        """Optimizer steps since it was published. What is older than this life knows counts as its oldest."""
        known = version if version in self._steps_at else next(iter(self._steps_at))
        return self._num_steps - self._steps_at[known]

    async def _between_rounds(self, *, last: bool = False) -> None:
        await self.pool.settled()
        every = self._settings.checkpoint_every
        if every and self._folder and (last or self.round % every == 0):
            await self._save(self._folder / f"round_{self.round:06d}")
        every = self._settings.eval_every
        if every and (last or self.round % every == 0):
            await self._evaluate()

    async def _save(self, folder: Path) -> None:
        if folder.name == self._base:
            return  # a resumed run stands where it was saved
        await self._parts.trainer.save(folder)
        await self._journal.mark(
            folder.name,
            round=self.round,
            version=self.version,
            step=self._num_steps,
            parked=self.parked.groups,
            longest=self.history.longest,
            steps_at=self._steps_at,
        )
        num_drawn = self._ledger.totals.num_drawn
        self._emit(events.Saved(clock.now(), self.round, str(folder), self.version, num_drawn))

    async def _evaluate(self) -> None:
        parts, settings = self._parts, self._settings
        samples = held_out_samples(parts.held_out, settings.eval_prompts, settings.seed, self.round)
        result = await evaluate(samples, self.fleet, parts.rewards)
        self._ledger.totals.evaluated_tokens += result.num_tokens
        mean_tokens = result.num_tokens / len(samples)
        self._emit(events.Evaluated(clock.now(), self.round, len(samples), result.accuracy, mean_tokens))

    def _produced(self) -> int:
        return sum(engine.usage().num_generated for engine in self._parts.engines)

    async def finish(self) -> None:
        """Bring everything in, and close the books.

        Raises:
            GroupsLost: the schedule took groups and neither trained nor dropped nor parked them.
            LedgerError: tokens are unaccounted for.
        """
        await self.pool.park()
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


async def drive(
    schedule: Callable[[Run], Coroutine[Any, Any, None]],
    parts: Parts,
    settings: RunSettings,
    recorder: events.Recorder,
    *,
    materialise: Callable[[Group], str | None] = GRPO,
    folder: Path | None = None,
    past: Past | None = None,
    journal: Journal | Unwritten | None = None,
) -> None:
    """Run a schedule to its end and close the books; the first error of anything ends it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            run = Run(
                parts,
                settings,
                recorder,
                tasks,
                materialise=materialise,
                folder=folder,
                past=past,
                journal=journal,
            )
            try:
                await schedule(run)
                await run.finish()
            finally:
                run.shut()
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    finally:
        recorder.close()
