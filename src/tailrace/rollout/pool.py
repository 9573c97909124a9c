"""Pool: the groups between the prompts and the trainer.

    waiting (held in line) -> serving (on an engine) -> finished -> being judged -> complete -> ready

All truth is in the samples; tasks only drive them. `_look(group)` reads a group and does what it lacks,
and may be called at any time, any number of times. That is why a cancellation, completions in the same
instant, a dead engine and a restart need no code of their own.
"""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from math import inf

from tailrace.clock import now
from tailrace.errors import RewardFailed
from tailrace.ledger.ledger import Fate, Ledger
from tailrace.record.events import GroupReady, Recorder, SampleScored
from tailrace.reward.base import Rewards
from tailrace.rollout.admission import FIFO, Admission
from tailrace.rollout.router import Router
from tailrace.rollout.ready_queue import Full, ReadyQueue
from tailrace.rollout.selection import Select, earliest
from tailrace.rollout.partial_rollouts import PartialRolloutBuffer
from tailrace.types import Group, Sample

Draw = Callable[[int], list[Group]]
ComputeAdvantages = Callable[[Group], str | None]
"""Sets the advantages of a judged group; or says why it must not be trained."""


class Pool:
    """Groups in flight and groups ready."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        router: Router,
        rewards: Rewards,
        ledger: Ledger,
        partial_rollouts: PartialRolloutBuffer,
        recorder: Recorder,
        *,
        replace: Callable[[int], list[Group]],
        compute_advantages: ComputeAdvantages,
    ) -> None:
        self.admission: Admission = FIFO
        self.ready = ReadyQueue("the pool", drop=self.drop, coming=self._coming)
        self.ready.on_taken = router.on_changed = self._pump
        self._tasks, self._router, self._rewards = tasks, router, rewards
        self._ledger, self._partial_rollouts, self._recorder = ledger, partial_rollouts, recorder
        self._replace, self._compute_advantages = replace, compute_advantages
        self._groups: dict[Group, None] = {}  # here and not complete
        self._frontier: dict[Group, None] = {}  # being served, and lacking responses
        self._serving: dict[Sample, asyncio.Task[None]] = {}
        self._scoring: dict[Sample, asyncio.Task[None]] = {}
        self._line: list[tuple[int, int, Sample]] = []  # a heap: (order, tie, sample)
        self._waiting: dict[Sample, None] = {}  # what of the line is still to be served
        self._cut: dict[Sample, str] = {}  # out of its group: waste once its task has ended
        self._source: Draw | None = None
        self._places = inf  # how many more groups a race lets out
        self._parking: asyncio.Task[None] | None = None
        self._orders, self._ties = itertools.count(), itertools.count()
        self._pumping = self._shut = False

    # -- the verbs ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Groups here: in flight or ready."""
        return len(self._groups) + len(self.ready)

    def launch(self, groups: list[Group]) -> None:
        """Put groups in the line, in this order. Each goes on from what it has: tokens, finished
        siblings, rewards; one that is complete is ready at once. One that is filtered or dropped is
        replaced, so as many come out as go in."""
        for group in groups:
            self._enter(group)
        self._pump()

    def feed(self, source: Draw, *, room: float, full: Full) -> None:
        """Draw from the source whenever admission has room and nothing waits, until park. When `room`
        complete groups wait to be taken, nothing more is drawn, and what is in flight still completes
        (hold); or the oldest is thrown out for each that comes (drop)."""
        self.ready.room, self.ready.full = room, full
        self._source = source
        self._pump()

    async def take(self, n: int, select: Select = earliest) -> list[Group]:
        """n complete groups, at once."""
        return await self.ready.take(n, select)

    def stream(self, n: int, select: Select = earliest) -> AsyncIterator[list[Group]]:
        """n complete groups in all, in lists, as they complete."""
        return self.ready.stream(n, select)

    async def race(self, n: int, select: Select = earliest) -> AsyncIterator[list[Group]]:
        """The first n groups, in lists, as they complete. All others are parked in the instant the n-th is
        there, whatever the taker does then; the last list goes out when that is settled."""
        self._places = n
        self._end_race()
        async for groups in self.stream(n, select):
            n -= len(groups)
            self._places -= len(groups)
            if n == 0:
                await self.settled()
                await self.park()
            yield groups

    async def park(self) -> None:
        """Stop everything. Whatever nobody has taken goes to the partial-rollout buffer with its tokens, finished
        siblings and rewards: complete groups first, then in the order of launch. Afterwards the pool is
        empty."""
        self._park([*self.ready.clear(), *self._groups])
        self.ready.room = inf
        await self.settled()

    async def settled(self) -> None:
        """Wait for aborts under way: afterwards every token is in a group or in the waste."""
        if self._parking is not None:
            await asyncio.shield(self._parking)  # a cancelled wait must not cancel the parking itself
            self._parking = None
        if cut := [self._serving[sample] for sample in self._cut]:
            await asyncio.wait(cut)

    def drop(self, group: Group, reason: str, fate: Fate = "dropped") -> None:
        """Give a living group up: its tokens are waste."""
        for sample in list(group.samples):
            self._discard(sample, reason)
        self._ledger.end(group, fate, reason)

    # -- what admission, placements and checkpoints may ask ------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._serving)

    @property
    def num_groups(self) -> int:
        return len(self._frontier)

    def serves(self, group: Group) -> bool:
        return group in self._frontier

    @property
    def living(self) -> list[Group]:
        """Every group here: ready first, then in flight."""
        return [*self.ready.groups, *self._groups]

    # -- the machine -------------------------------------------------------------------------------

    def _coming(self) -> float:
        """How many groups may still become ready."""
        return inf if self._source else len(self._groups)

    def _enter(self, group: Group) -> None:
        group.order = next(self._orders)
        self._groups[group] = None
        for sample in group.samples:
            if sample.finish_reason is None:
                self._waiting[sample] = None
                heapq.heappush(self._line, (group.order, next(self._ties), sample))
        self._look(group)

    def _look(self, group: Group) -> None:
        """Do what the group lacks."""
        if group not in self._groups:
            return  # taken, parked or dropped: not ours now
        self._keep_finished(group)
        if group.serving_complete:
            self._frontier.pop(group, None)
            for sample in [s for s in group.samples if s not in group.kept]:
                self._discard(sample, "raced")
        for sample in group.kept:
            if not sample.scored and sample not in self._scoring and not self._shut:
                self._start_scoring(sample)
        if group.complete:
            self._complete(group)

    @staticmethod
    def _keep_finished(group: Group) -> None:
        for sample in group.samples:
            full = len(group.kept) >= group.num_required
            if sample.finish_reason and not full and sample not in group.kept:
                group.kept.append(sample)

    def _complete(self, group: Group) -> None:
        """Set the advantages of a complete group and make it ready to train, or drop it with the reason."""
        del self._groups[group]
        if not group.trainable:
            reasons = Counter(sample.failure or "" for sample in group.kept)
            self.drop(group, reasons.most_common(1)[0][0])
        elif reason := self._compute_advantages(group):
            self.drop(group, reason, "filtered")
        else:
            for sample in [s for s in group.kept if s.failure and s.fate is None]:  # None: not parked since
                self._ledger.waste(sample, sample.failure or "")
            self.ready.put(group)
            self._recorder.emit(GroupReady(now(), group.prompt.index, group.num_tokens))
            self._end_race()
            return
        self._refill(group)

    def _refill(self, group: Group) -> None:
        """Another prompt takes the place of a group that will never be ready."""
        if self._source is None:
            self.launch(self._replace(group.num_launched))
        self.ready.changed.fire()  # whoever waits must learn if none could be drawn

    def _pump(self) -> None:
        """Serve as many as admission and slots allow."""
        if self._pumping or self._shut:
            return
        self._pumping = True
        slots = self._router.slots
        while (sample := self._head(slots)) and len(self._serving) < slots:
            if not self.admission.admits(sample.group, self):
                break
            heapq.heappop(self._line)
            del self._waiting[sample]
            self._frontier[sample.group] = None
            self._serving[sample] = task = self._tasks.create_task(self._router.serve(sample))
            # Not try/finally inside: a task cancelled before its first step never enters its body.
            task.add_done_callback(partial(self._left, sample))
        self._pumping = False

    def _head(self, slots: int) -> Sample | None:
        """The first of the line that still waits; drawn from the source if the line is empty and one of the
        slots is free."""
        while True:
            while self._line and self._line[0][2] not in self._waiting:
                heapq.heappop(self._line)
            if self._line:
                return self._line[0][2]
            if self._source is None or self.ready.is_full:
                return None
            if len(self._serving) >= slots or not self._admits_another():
                return None
            self._enter(self._source(1)[0])

    def _admits_another(self) -> bool:
        """Ask admission before a prompt is drawn: what is drawn counts as in flight."""
        newest = next(reversed(self._groups), None)
        return newest is None or self.admission.admits(newest, self)

    def _left(self, sample: Sample, task: asyncio.Task[None]) -> None:
        """Its task has ended: finished, or cancelled by the pool; or else the task group ends the run."""
        del self._serving[sample]
        if reason := self._cut.pop(sample, None):
            self._ledger.waste(sample, reason)
        elif self._parking is None and (task.cancelled() or task.exception()):
            self._shut = True
        self._look(sample.group)
        self._pump()

    def _start_scoring(self, sample: Sample) -> None:
        self._scoring[sample] = task = self._tasks.create_task(self._score(sample))
        task.add_done_callback(lambda _: self._scoring.pop(sample))

    async def _score(self, sample: Sample) -> None:
        """Goes on when its group is parked: the reward belongs to the sample."""
        detail = ""
        try:
            sample.reward = await self._rewards.score(sample)
        except RewardFailed as failed:
            sample.failure, detail = f"reward {failed.reason}", failed.detail
        self._recorder.emit(
            SampleScored(now(), sample.id, sample.reward, sample.failure, sample.num_tokens, detail)
        )
        self._look(sample.group)

    def _discard(self, sample: Sample, reason: str) -> None:
        """Out of its group; waste as soon as no engine works on it."""
        sample.group.samples.remove(sample)
        self._waiting.pop(sample, None)
        if scoring := self._scoring.get(sample):
            scoring.cancel()
        if serving := self._serving.get(sample):
            self._cut[sample] = reason
            _cancel(serving)
        elif sample.fate is None:
            self._ledger.waste(sample, reason)

    def _end_race(self) -> None:
        """It is decided when as many are ready as have not been taken."""
        if len(self.ready) >= self._places and self._groups:
            self._park(list(self._groups))

    def _park(self, groups: list[Group]) -> None:
        """The instant of parking, without an await: nobody enters or completes after it."""
        self._source, self._places = None, inf
        for held in (self._groups, self._frontier, self._waiting):
            held.clear()
        self._line.clear()
        tasks = list(self._serving.values())
        for task in tasks:
            _cancel(task)
        self._parking = asyncio.create_task(self._settle(groups, tasks))

    async def _settle(self, groups: list[Group], tasks: list[asyncio.Task[None]]) -> None:
        if tasks:
            await asyncio.wait(tasks)
        for group in groups:
            self._keep_finished(group)  # what finished in the same instant counts
            group.deferrals += 1
        self._partial_rollouts.put(sorted(groups, key=lambda group: (not group.complete, group.order)))

    def shut(self) -> None:
        """The end, or an error. Nobody is served any more; otherwise every task that is cancelled would
        make room for another, and the task group would never end."""
        self._shut = True
        for task in [*self._serving.values(), *self._scoring.values()]:
            task.cancel()


def _cancel(task: asyncio.Task[None]) -> None:
    """Once: a second cancellation would interrupt the abort that the first one waits for."""
    if not task.cancelling():
        task.cancel()
