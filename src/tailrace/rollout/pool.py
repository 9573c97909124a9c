"""Pool: the groups between the prompts and the trainer.

    stage      held in               the group goes on when
    drafted    Pool._drafted         the schedule launches it
    waiting    SamplesInFlight       admission lets its first request in (`_dispatch`)
    serving    Pool._frontier        all required samples are generated
    held       Pool._held            `generated` has room; most groups skip this stage and the next one
    generated  Pool.generated        the scorers have room
    scoring    Pool.scoring          each sample has a reward or has failed, and `ready` has room
    complete   (no time passes)      its advantages are set, or it is filtered or dropped (`_complete`)
    ready      Pool.ready            the schedule takes it
    parked     PartialRolloutBuffer  the schedule launches it again, from what it has

A group may be parked or dropped at any stage. `Pool._in_flight` has the groups from waiting to scoring. A
group goes back to serving if a member that failed or is late is replaced. Finished samples of a group in
service are scored early while no generated group waits.

A drafted group is one of a later round (`draft`). Its requests are served, and nothing else is done with it:
it is not counted, scored or handed out. They wait behind all others, and one that is served gives its slot up
to another that waits. A KV cache that is full is not theirs either: an engine preempts the request that came
last.

With stale = "verify" an engine verifies what it serves (`GenerationRequest.max_age`). The pool sends back
finished members, at once: a pass over one costs less than the decode steps of a rest that waits. A member
keeps its end, its reward and a scoring under way (`Sample.to_verify`) until the engine answers how
many of its tokens it keeps. The others are waste, "changed". An episode under way is interrupted and served
again: it is played over its record, and each turn up to the last one with an old token is verified.

The samples hold all facts; tasks only change them. `_advance(group)` reads a group and moves it on. It may be
called at any time and any number of times, so a cancellation, a dead engine, a restart and samples that
finish in the same instant need no code of their own.

The partial-rollout buffer is first in, first out (APRIL 2.2; RollPacker 3: long-prompt queue). It belongs to
the run, so checkpoints save it.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from math import inf
from typing import Literal, NamedTuple

from tailrace.algo.advantages import ComputeAdvantages
from tailrace.clock import Signal, now
from tailrace.contracts.reward import Rewards
from tailrace.errors import AllDropped, AllFiltered, AllLate, RewardFailed, ScheduleError, TailraceError
from tailrace.ledger.ledger import Fate, Ledger
from tailrace.record.events import GroupReady, Recorder, SampleScored, StagesFilled
from tailrace.rollout.admission import FIFO, Admission, Full, ReadyQueue, Select, StageQueue, earliest
from tailrace.rollout.history import History
from tailrace.rollout.in_flight import Ages, SamplesInFlight, Stage
from tailrace.rollout.members import MemberRules
from tailrace.rollout.order import SortKey, launched_first
from tailrace.rollout.progress import RolloutProgress
from tailrace.rollout.race import Race
from tailrace.rollout.router import Router
from tailrace.types import Group, Sample


class PartialRolloutBuffer:
    """Groups that were stopped and will continue."""

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self.groups = list(groups)

    def __len__(self) -> int:
        return len(self.groups)

    def put(self, groups: Iterable[Group]) -> None:
        self.groups.extend(groups)

    def pop(self, n: int) -> list[Group]:
        """The first n groups, or all if there are fewer."""
        taken, self.groups = self.groups[:n], self.groups[n:]
        return taken


Draw = Callable[[int], list[Group]]
"""The next n groups of the data."""


GroupStage = Literal["held", "generated", "scoring", "complete"]
"""A stage that a generated group enters."""


class LossLimit(NamedTuple):
    """Groups lost in succession that end the run, and the error with which it ends."""

    num_groups: int
    error: type[TailraceError]
    message: str


LOSS_LIMITS = {
    "filtered": LossLimit(
        1_000,
        AllFiltered,
        "the last {num} groups were filtered: {reason} (algorithm.filter); check the reward, choose data of "
        "which the model solves a part, or filter nothing",
    ),
    "dropped": LossLimit(
        1_000,
        AllDropped,
        "the last {num} groups had no sample with a reward: {reason}; check the reward function; "
        "reward.max_failures ends a run earlier",
    ),
    "late": LossLimit(100, AllLate, "{num} groups in succession were late; raise run.groups.deadline_s"),
}
"""A lost group is replaced by another one. It is filtered, it has no reward, or none of its members was
generated before its deadline."""


class Pool:
    """Groups in flight and groups ready for the trainer."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        router: Router,
        rewards: Rewards,
        ledger: Ledger,
        partial_rollouts: PartialRolloutBuffer,
        recorder: Recorder,
        history: History,
        compute_advantages: ComputeAdvantages,
        *,
        another: Callable[[Group, Sample | None], Sample | None],
        deadline_s: float | None,
    ) -> None:
        """`another` makes one more sample of a group, or again a given one whose version is gone; None: the
        group may launch no more. `deadline_s`: as `GroupSettings.deadline_s`."""
        self.admission: Admission = FIFO
        self.order: SortKey = launched_first
        self.generated = StageQueue("generated", drop=self.drop)
        """Groups whose responses are all here, and for which the scorers have no place yet."""
        self.scoring = StageQueue("scoring", drop=self.drop)
        """Groups whose responses are all here, and whose rewards are being computed."""
        self.ready = ReadyQueue(
            "ready", drop=self.drop, coming=lambda: inf if self._source else len(self._in_flight)
        )
        self.ready.on_taken, router.on_changed = self._on_taken, self._dispatch
        self.engines_changed = router.changed
        self.changed = Signal()  # a request or a score has ended
        self.on_launch: Callable[[], None] = lambda: None
        self.on_rollout: Callable[[], None] = lambda: None
        """Called before a group enters the empty pool."""
        self.is_held = False
        """No request goes to an engine until `release`."""
        self.replace: Callable[[Group], list[Group]] | None = None
        """Draws a group in place of one that is filtered or dropped. None: nothing is drawn."""
        self.rewards = rewards
        self.progress, self.ages = RolloutProgress(), Ages()
        self._tasks, self._router, self._ledger = tasks, router, ledger
        self._partial_rollouts, self._recorder, self._history = partial_rollouts, recorder, history
        self._another, self._compute_advantages = another, compute_advantages
        self._rules = MemberRules(
            deadline_s, self._launch_member, self._remove_member, on_late=self._on_deadline
        )
        self._in_flight: dict[Group, None] = {}
        self._drafted: dict[Group, None] = {}
        self._frontier: dict[Group, None] = {}  # groups in service that lack samples
        self._held: dict[Group, None] = {}  # generated ones that `generated` has no room for
        self._enter: dict[GroupStage, Callable[[Group], None]] = {
            "held": self._held.setdefault,
            "generated": self.generated.put,
            "scoring": self.scoring.put,
            "complete": self._complete,
        }
        self._source: Draw | None = None
        self._most = inf
        self._race: Race | None = None
        self._parking: asyncio.Task[None] | None = None
        self._samples = SamplesInFlight(self._place, router.moves)
        self._orders = itertools.count()
        self._dispatching = self._shut = False
        self._oldest = -inf
        """The oldest version whose tokens may be trained; members with older ones are verified."""
        self._num_lost = Counter[str]()  # in succession, as in LOSS_LIMITS

    # -- verbs of schedules ------------------------------------------------------------------------

    def __len__(self) -> int:
        """Groups in flight or ready."""
        return len(self._in_flight) + len(self.ready)

    def launch(self, groups: list[Group]) -> None:
        """Queue groups for service, in this order.

        A group continues from what it has: tokens, finished samples, rewards; a complete one is ready at
        once. One that is filtered or dropped is replaced, so as many become ready as are launched.
        """
        for group in groups:
            self._add(group)
        self._dispatch()
        self.on_launch()

    def draft(self, groups: list[Group]) -> None:
        """Generate for groups of a later round in slots that nothing else wants, until they are launched.

        The next weights verify what today's have drawn, so tokens of these groups are drafts until then
        (`Group.is_drafted`). Raises a ScheduleError if the schedule does not verify.
        """
        if self._oldest == -inf:
            problem = "run.pool.draft: these weights may not train what they draw for a later round"
            raise ScheduleError(f'{problem}; declare stale="verify", which lets the next ones verify it')
        for group in groups:
            self._drafted[group], group.drafted_before = None, inf
            self._queue(group)
        self._dispatch()

    def feed(self, source: Draw, *, room: float, full: Full, scoring: float = inf, most: float = inf) -> None:
        """Draw from the source whenever admission has room and no request waits, until the pool is parked.

        Args:
            room: generated groups that may wait for the scorers, and complete ones for the trainer; at least
                as many as a take wants.
            full: when so many wait, "block": nothing is drawn, and groups in flight stay where they are;
                "drop_oldest": the oldest one is dropped.
            scoring: generated groups that are scored at a time.
            most: groups in the pool.
        """
        self._most = most
        self.generated.room = self.ready.room = room
        self.generated.full = self.ready.full = full
        self.scoring.room, self._source = scoring, source
        self._dispatch()

    def verify(self, oldest: float) -> None:
        """Send finished members with tokens of versions before `oldest` back to the engines, which verify
        them, and from now on all that become so. The weights are on their way to the engines."""
        self._oldest = oldest
        for group in self.groups:
            for sample in filter(self._is_too_old, group.samples):
                sample.to_verify = True
                self._samples.interrupt(sample)
            if old := [sample for sample in group.kept if sample.to_verify]:
                if group in self.ready:
                    self.ready.remove(group)
                    self._in_flight[group] = None
                self._serve_again(group)
                for sample in old:
                    self.progress.lose(sample)
                    self._samples.wait(sample)
        self._advance_complete()
        self._dispatch()

    def report_stages(self) -> None:
        """Record how full the stages were since the last call."""
        stages = {queue.name: queue.report() for queue in (self.generated, self.scoring, self.ready)}
        self._recorder.emit(StagesFilled(now(), stages))

    async def take(self, n: int, select: Select = earliest) -> list[Group]:
        """Wait for n complete groups."""
        return await self.ready.take(n, select)

    def stream(self, n: int, select: Select = earliest) -> AsyncIterator[list[Group]]:
        """n complete groups in all, in lists, as they become complete."""
        return self.ready.stream(n, select)

    async def race(self, n: int, *, scored: bool = False) -> AsyncIterator[list[Group]]:
        """The first n groups whose samples are generated, or also `scored`, in lists, as they are complete.

        All other groups are parked in the instant in which the n-th group is generated (RollPacker 3: the
        rollout ends there; scoring goes on). A generated group that is then filtered or dropped is replaced.
        """
        race = self._race = Race(n, scored)
        self.progress.end_after(n, next((group.num_required for group in self.groups), 0))
        self._park_losers()
        async for groups in self.stream(n):
            race.num_places -= len(groups)
            if not race.num_places:
                await self.settled()
                await self.park()
            yield groups

    async def park(self) -> None:
        """Stop all requests. All groups in the pool go to the partial-rollout buffer.

        They keep their tokens, finished samples and rewards. Complete groups go first, then groups in the
        order of their launch. The pool is empty afterwards.
        """
        self._race = None
        self._park([*self.ready.clear(), *self._in_flight, *self._drafted])
        self.generated.room = self.scoring.room = self.ready.room = inf
        await self.settled()

    async def settled(self) -> None:
        """Wait for aborts under way. Afterwards every token is in a group or counted as waste."""
        while (parking := self._parking) is not None:
            await asyncio.shield(parking)  # a cancelled wait must not cancel the parking itself
            if self._parking is parking:  # else another one began meanwhile
                self._parking = None
        if aborting := self._samples.aborting():
            await asyncio.wait(aborting)

    def drop(self, group: Group, reason: str, fate: Fate = "dropped") -> None:
        """Give up a group. Its tokens are waste."""
        self._remove(group)
        self.ages.remove([group])
        for sample in list(group.samples):
            self._discard(sample, reason)
        self._ledger.end(group, fate, reason)

    # -- read by admissions (admission.Service), selections and publications -----------------------

    @property
    def is_endless(self) -> bool:
        """Prompts are drawn until the pool is parked."""
        return self._source is not None

    @property
    def is_idle(self) -> bool:
        """No launched group lacks a response or a reward; a filter might replace it after the reward."""
        return not self._in_flight and self.num_requests == self._num_drafting

    @property
    def is_serving(self) -> bool:
        """Requests of launched groups are served or wait."""
        first = self._samples.first_waiting()
        return self.num_requests > self._num_drafting or (first is not None and self._is_launched(first))

    @property
    def num_requests(self) -> int:
        return self._samples.num_requests

    @property
    def num_engines(self) -> int:
        return self._router.loads.num_open

    @property
    def num_groups(self) -> int:
        return len(self._frontier)

    def serves(self, group: Group) -> bool:
        return group in self._frontier

    @property
    def groups(self) -> list[Group]:
        """All launched groups here: ready ones, then those in flight."""
        return [*self.ready.groups, *self._in_flight]

    @property
    def drafted(self) -> list[Group]:
        """The groups of a later round, in the order in which they were given to `draft`."""
        return list(self._drafted)

    def release(self) -> None:
        """Serve again after a hold."""
        self.is_held = False
        self._dispatch()

    # -- from stage to stage -----------------------------------------------------------------------

    def _add(self, group: Group) -> None:
        """Take a group into the pool. Its unfinished samples wait for an engine."""
        if not len(self):
            self.on_rollout()
        self._drafted.pop(group, None)
        group.drafted_before = self._oldest
        for sample in filter(self._is_too_old, group.samples):
            sample.to_verify = True
            self._samples.interrupt(sample)
        group.kept = [sample for sample in group.kept if not sample.to_verify]
        self.progress.launched(group, is_first=not len(self))
        self._in_flight[group] = None
        self._queue(group)
        if self._samples.of([group], Stage.SERVING):
            self._begin(group)
        self._advance(group)

    def _queue(self, group: Group) -> None:
        """Let the unfinished samples of a group wait that have no request."""
        group.order, group.predicted_tokens = next(self._orders), self._history.predicted(group.prompt)
        group.earlier = self._history.last_responses(group.prompt)
        group.on_verified = self._on_verified
        self.ages.add(group)
        served = self._samples.of([group], Stage.SERVING, Stage.ABORTING)
        for sample in group.samples:
            if not sample.ended and sample not in served:
                self._samples.wait(sample)

    def _place(self, sample: Sample) -> tuple[float, ...]:
        """The place of a sample among those that wait: drafted ones are last."""
        return (sample.group in self._drafted, *self.order(sample))

    def _begin(self, group: Group) -> None:
        """Count a launched group as in service."""
        self._frontier[group] = None
        self._rules.begin(group)

    def _advance(self, group: Group) -> None:
        """Move a group through its next stages as far as it can go now, and score its finished samples."""
        if group not in self._in_flight:
            return  # it was taken, parked or dropped
        if group.has_rules:
            self._rules.replace_failed(group)
        was_generated = group.serving_complete
        self.progress.keep_finished(group, self._awaits_its_end)
        if group.serving_complete:
            self._frontier.pop(group, None)
            for sample in [sample for sample in group.samples if sample not in group.kept]:
                self._discard(sample, "raced")
        while stage := self._next_stage(group):
            self._enter[stage](group)
        if group in self.scoring or not (group.serving_complete or len(self.generated)):
            for sample in group.kept:
                if not sample.scored and sample not in self._samples and not self._shut:
                    self._samples.score(sample, self._tasks.create_task(self._score(sample)))
        if group in self._in_flight and group.serving_complete and not was_generated:
            self._park_losers()

    def _next_stage(self, group: Group) -> GroupStage | None:
        """The stage that a group enters now. None: it stays where it is."""
        if not group.serving_complete or group not in self._in_flight or group in self.generated:
            return None
        if group in self.scoring:
            return "complete" if group.complete and not self.ready.is_full else None
        if self._held or self.generated.is_full:
            return None if group in self._held else "held"
        return "generated" if len(self.generated) or self.scoring.is_full else "scoring"

    def _on_deadline(self, group: Group) -> None:
        """Go on with a group whose late members were removed."""
        self.progress.need_fewer(group, max(0, group.num_required - len(group.samples)))
        if group.samples:
            self._advance(group)
        else:
            self._lose(group, "late", "late")
        self._dispatch()
        self.changed.fire()

    def _remove_member(self, sample: Sample, reason: str) -> None:
        """Remove a member of a group in flight. A group that was generated goes back to serving."""
        if sample in sample.group.kept:
            self.progress.lose(sample)
        self._serve_again(sample.group)
        self._discard(sample, reason)

    def _serve_again(self, group: Group) -> None:
        """Take a group out of the stages between serving and `ready`."""
        self._held.pop(group, None)
        for queue in (self.generated, self.scoring):
            if group in queue:
                queue.remove(group)
                asyncio.get_running_loop().call_soon(self._score_next)

    def _is_too_old(self, sample: Sample) -> bool:
        """Whether a finished sample, or an episode under way, must be verified before it is trained. An
        episode that failed is not played again."""
        if sample.fate or not sample.spans or (sample.failure and sample.turns):
            return False
        return (sample.ended or sample.in_episode) and sample.oldest_version < self._oldest

    def _awaits_its_end(self, sample: Sample) -> bool:
        """Whether a sample that has its last token is no member yet: its request has not ended, and the pool
        may have to send it back then."""
        return self._oldest > -inf and self._samples.has_request(sample)

    def _on_verified(self, sample: Sample, num_changed: int) -> None:
        self._ledger.verify(sample, num_changed)
        self.ready.changed.fire()  # a selection that waited for the answer may hand out groups now
        if num_changed:
            self._samples.stop_scoring(sample)

    def _launch_member(self, group: Group, gone: Sample | None = None) -> bool:
        """Add one more sample to a group, if it may have one. `gone`: a sample to begin again."""
        if sample := self._another(group, gone):
            group.samples.append(sample)
            self._samples.wait(sample)
            asyncio.get_running_loop().call_soon(self._dispatch)
        return bool(sample)

    def _score_next(self) -> None:
        """Move held and generated groups to their next stages while these have room."""
        while self._held or len(self.generated):
            if self._held and not self.generated.is_full:
                self._held.pop(group := next(iter(self._held)))
                self.generated.put(group)
            elif not self.scoring.is_full:
                group = self.generated.groups[0]
                self.generated.remove(group)
                self.scoring.put(group)
                self._advance(group)
            else:
                break
        if not len(self.generated):  # finished samples of the others need not wait any more
            for group in [each for each in self._in_flight if not each.serving_complete]:
                self._advance(group)
        self._dispatch()

    def _remove(self, group: Group) -> None:
        """Remove a group from every stage before `ready`."""
        for stage in (self._drafted, self._in_flight, self._frontier, self._held):
            stage.pop(group, None)
        self._rules.end(group)
        for queue in (self.generated, self.scoring):
            queue.remove(group)

    def _complete(self, group: Group) -> None:
        """Set the advantages of a scored group and make it ready, or filter or drop it."""
        self._remove(group)
        if not group.trainable:
            (why, _), *_ = Counter(sample.failure or "" for sample in group.kept).most_common(1)
            self._lose(group, "dropped", why)
        elif reason := self._compute_advantages(group):
            self._num_lost["dropped"] = 0
            self._lose(group, "filtered", reason)
        else:
            for sample in [s for s in group.kept if s.failure and s.fate is None]:
                self._ledger.waste(sample, sample.failure or "")
            self._num_lost["filtered"] = self._num_lost["dropped"] = 0
            if group.has_rules:
                self._num_lost["late"] = 0
            self.ready.put(group)
            self._recorder.emit(GroupReady(now(), group.prompt.index, group.num_tokens))
            self._park_losers()
        if len(self.generated):
            self._score_next()

    def _lose(self, group: Group, loss: str, reason: str) -> None:
        """Drop a group, and draw another prompt in its place. Too many losses in succession end the run."""
        self.drop(group, reason, "filtered" if loss == "filtered" else "dropped")
        self._num_lost[loss] += 1
        limit = LOSS_LIMITS[loss]
        if self._num_lost[loss] == limit.num_groups:
            raise limit.error(limit.message.format(num=limit.num_groups, reason=reason))
        if self._source is None and self.replace:
            self.launch(self.replace(group))
        self._dispatch()  # the source may draw one in its place
        self.ready.changed.fire()  # a waiting take must learn if no prompt could be drawn

    def _on_taken(self, groups: Iterable[Group]) -> None:
        self.ages.remove(groups)
        self._advance_complete()
        self._dispatch()

    def _advance_complete(self) -> None:
        """Move complete groups on that `ready` may have room for now."""
        for group in [each for each in self.scoring.groups if each.complete]:
            self._advance(group)

    def _dispatch(self) -> None:
        """Send waiting requests to engines, as many as admission and slots allow."""
        if self._dispatching or self._shut:
            return
        self._dispatching = True
        slots = self._router.loads.slots
        while (sample := self._next_request(slots)) and self.num_requests < slots and not self.is_held:
            if not self.admission.admits(sample.group, self):
                break
            if not self._router.versions.has_room(sample, self.num_requests):
                break
            task = self._tasks.create_task(self._router.serve(sample))
            self._samples.serve(sample, task)
            if self._is_launched(sample):
                self._begin(sample.group)
            # Not try/finally inside the task: a task cancelled before its first step never enters its body.
            task.add_done_callback(partial(self._on_request_ended, sample))
        if self._drafted and not self.is_held:
            self._give_up_slots(slots)
        self._dispatching = False

    def _is_launched(self, sample: Sample) -> bool:
        return sample.group not in self._drafted

    @property
    def _num_drafting(self) -> int:
        """Requests of drafted groups that engines work on."""
        return len(self._samples.of(self._drafted, Stage.SERVING, Stage.ABORTING))

    def _give_up_slots(self, slots: int) -> None:
        """Stop the drafted requests that came last, as many as requests of launched groups wait, or as there
        are fewer slots than requests."""
        first, excess = self._samples.first_waiting(), max(0, self.num_requests - slots)
        if not excess and (first is None or not self._is_launched(first)):
            return
        num = excess + len(self._samples.of(self._in_flight, Stage.WAITING))
        num -= len(self._samples.of(self._drafted, Stage.ABORTING))
        for sample in self._samples.of(self._drafted, Stage.SERVING)[::-1][: max(0, num)]:
            self._samples.park(sample)

    def _next_request(self, slots: int) -> Sample | None:
        """Return the first waiting sample. If none waits and a slot is free, draw a group from the source."""
        while (sample := self._samples.first_waiting()) is None:
            if self._source is None or self.num_requests >= slots:
                return None
            if self.generated.is_full or self.ready.is_full:
                return None
            if not self._admits_another():
                return None
            self._add(self._source(1)[0])
        return sample

    def _admits_another(self) -> bool:
        """Ask admission before a prompt is drawn, because a drawn group counts as in flight."""
        if len(self) >= self._most:
            return False
        newest = next(reversed(self._in_flight), None)
        return newest is None or self.admission.admits(newest, self)

    def _on_request_ended(self, sample: Sample, task: asyncio.Task[None]) -> None:
        """Book a request that has finished, was aborted by the pool, or failed; a failure ends the run."""
        stage, discarded = self._samples.end_request(sample)
        if discarded:
            self._ledger.waste(sample, discarded)
        elif stage is Stage.SERVING and (task.cancelled() or task.exception()):
            self._shut = True
        elif stage is Stage.SERVING and sample.finish_reason is None:
            self._discard(sample, "version gone")
            self._launch_member(sample.group, sample)
        elif sample.group in self._in_flight or sample.group in self._drafted:
            sample.to_verify |= self._is_too_old(sample)  # there was a publication meanwhile
            if not sample.ended:  # or it gave its slot up
                self._samples.wait(sample)
        if sample.failure:  # its verification failed
            self._samples.stop_scoring(sample)
        self._advance(sample.group)
        if self.order is not launched_first:
            self._samples.reorder(sample.group.samples)
        self._dispatch()
        self.changed.fire()

    async def _score(self, sample: Sample) -> None:
        """Set the reward of a sample, or its failure, also if its group is parked meanwhile: the reward
        belongs to the sample."""
        detail = ""
        try:
            sample.reward = await self.rewards.score(sample)
        except RewardFailed as failed:
            sample.failure, detail = f"reward {failed.reason}", failed.detail
        failure = "reward timeout" if sample.timed_out else sample.failure
        self._recorder.emit(SampleScored(now(), sample.id, sample.reward, failure, sample.num_tokens, detail))
        self._advance(sample.group)
        self.changed.fire()

    def _discard(self, sample: Sample, reason: str) -> None:
        """Remove a sample from its group. Its tokens are waste as soon as no engine works on it."""
        sample.group.samples.remove(sample)
        if not self._samples.discard(sample, reason) and sample.fate is None:
            self._ledger.waste(sample, reason)

    def _park_losers(self) -> None:
        """Park all other groups of a race once enough groups have won it."""
        if self._race and (losers := self._race.losers(self._in_flight, len(self.ready))):
            self._park(losers)

    def _park(self, groups: list[Group]) -> None:
        """Stop groups. There is no await in here: no request starts and no group completes afterwards."""
        self._source = None
        tasks = [self._samples.park(sample) for group in groups for sample in group.samples]
        self.ages.remove(groups)
        for group in groups:
            self._remove(group)
        aborting = [task for task in (self._parking, *tasks) if task is not None]
        self._parking = asyncio.create_task(self._finish_parking(groups, aborting))
        self.changed.fire()

    async def _finish_parking(self, groups: list[Group], aborting: list[asyncio.Task[None]]) -> None:
        """Put stopped groups into the partial-rollout buffer when their aborts have ended."""
        if aborting:
            await asyncio.wait(aborting)
        for group in groups:
            # A sample that finished in the same instant counts.
            self.progress.keep_finished(group, self._awaits_its_end)
            group.deferrals += 1
        self._partial_rollouts.put(sorted(groups, key=lambda group: (not group.complete, group.order)))

    def shut(self) -> None:
        """Stop serving and cancel all tasks, at the end of the run or after an error."""
        self._shut = True
        self._samples.cancel_all()
