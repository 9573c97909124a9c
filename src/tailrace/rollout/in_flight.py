"""Samples in flight, each with its state, and groups in flight, by the age of their tokens."""

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from tailrace.rollout.order import SortKey
from tailrace.types import Group, Sample


class Stage(Enum):
    """The stage of a sample in the pool."""

    WAITING = auto()
    SERVING = auto()
    ABORTING = auto()
    """Its request was cancelled, and the engine has not yet given it up."""


@dataclass(slots=True)
class _State:
    stage: Stage
    task: asyncio.Task[None] | None = None
    discarded: str | None = None
    """The sample has left its group; its tokens become waste with this reason."""
    place: tuple[float, ...] = ()
    """Its place in the queue while it waits."""


class SamplesInFlight:
    """One state for each sample, and the queue of those that wait, in `order`."""

    def __init__(self, order: SortKey, moves: dict[Sample, int | None]) -> None:
        self._order, self._moves = order, moves
        self._states: dict[Sample, _State] = {}
        self._scoring: dict[Sample, asyncio.Task[None]] = {}  # also of samples that are verified meanwhile
        self._queue: list[tuple[tuple[float, ...], int, Sample]] = []  # a heap: (place, tie, sample)
        self._ties = itertools.count()
        self.num_requests = 0
        """Samples that are served or aborting."""

    def __contains__(self, sample: Sample) -> bool:
        return sample in self._states or sample in self._scoring

    def has_request(self, sample: Sample) -> bool:
        """Whether a sample is served, or waits for it."""
        return sample in self._states

    def wait(self, sample: Sample) -> None:
        """Queue a sample for service."""
        self._enqueue(sample, self._order(sample))

    def reorder(self, samples: Iterable[Sample]) -> None:
        """Update the places of samples in the queue. Samples that do not wait are ignored."""
        for sample in samples:
            state = self._states.get(sample)
            if state is not None and state.stage is Stage.WAITING:
                place = self._order(sample)
                if place != state.place:
                    self._enqueue(sample, place)

    def first_waiting(self) -> Sample | None:
        """The waiting sample with the smallest place; of equal ones, the one that waits longest."""
        while self._queue:
            place, _, sample = self._queue[0]
            state = self._states.get(sample)
            if state is not None and state.stage is Stage.WAITING and state.place == place:
                return sample
            heapq.heappop(self._queue)  # it was parked or discarded meanwhile, or has another place
        return None

    def _enqueue(self, sample: Sample, place: tuple[float, ...]) -> None:
        self._states[sample] = _State(Stage.WAITING, place=place)
        heapq.heappush(self._queue, (place, next(self._ties), sample))

    def serve(self, sample: Sample, task: asyncio.Task[None]) -> None:
        """Count a waiting sample as served; `task` is its request."""
        self._states[sample] = _State(Stage.SERVING, task)
        self.num_requests += 1

    def end_request(self, sample: Sample) -> tuple[Stage, str | None]:
        """Forget a sample whose request has ended. Returns its last stage; if it was discarded, why."""
        state = self._states.pop(sample)
        self.num_requests -= 1
        return state.stage, state.discarded

    def score(self, sample: Sample, task: asyncio.Task[None]) -> None:
        """Count a finished sample as scoring until the task ends."""
        self._scoring[sample] = task
        task.add_done_callback(partial(self._end_scoring, sample))

    def _end_scoring(self, sample: Sample, task: asyncio.Task[None]) -> None:
        if self._scoring.get(sample) is task:
            del self._scoring[sample]

    def stop_scoring(self, sample: Sample) -> None:
        """Cancel the scoring of a sample, if it is under way."""
        if task := self._scoring.pop(sample, None):
            task.cancel()

    def of(self, groups: Iterable[Group], *stages: Stage) -> list[Sample]:
        """The samples of groups that are in one of these stages."""
        samples = [(each, self._states.get(each)) for group in groups for each in group.samples]
        return [sample for sample, state in samples if state is not None and state.stage in stages]

    def park(self, sample: Sample) -> asyncio.Task[None] | None:
        """Stop a sample. Returns the task of its abort, if an engine works on it. Scoring goes on."""
        state = self._states.get(sample)
        if state is None:
            return None
        if state.task is None:
            del self._states[sample]
        else:
            state.stage = Stage.ABORTING
            self._moves.pop(sample, None)  # it goes nowhere
            # Once: a second cancellation would interrupt the abort that the first one waits for.
            if not state.task.cancelling():
                state.task.cancel()
        return state.task

    def interrupt(self, sample: Sample) -> None:
        """Stop the request of a sample, if it has one. It does not stop to wait for one."""
        if (state := self._states.get(sample)) and state.task:
            self.park(sample)

    def discard(self, sample: Sample, reason: str) -> bool:
        """Stop a sample for good. Returns whether an engine works on it until `end_request`."""
        state = self._states.get(sample)
        aborting = self.park(sample) is not None
        if state is not None and aborting:
            state.discarded = reason
        if not sample.scored:
            self.stop_scoring(sample)
        return aborting

    def aborting(self) -> list[asyncio.Task[None]]:
        """The tasks of aborts under way."""
        states = self._states.values()
        return [state.task for state in states if state.stage is Stage.ABORTING and state.task is not None]

    def cancel_all(self) -> None:
        """Cancel every task."""
        serving = [state.task for state in self._states.values() if state.task is not None]
        for task in [*serving, *self._scoring.values()]:
            task.cancel()


class Ages:
    """The groups in flight or ready, counted by the oldest version of their tokens."""

    def __init__(self) -> None:
        self.by_version: Counter[int] = Counter()
        """Number of groups with tokens, by the oldest version."""
        self._without_tokens: set[Group] = set()
        self._held_over: set[Group] = set()  # those without tokens that came before the last publication
        self._has_arrived: Callable[[], bool] = lambda: True

    def add(self, group: Group) -> None:
        """Count a group. It may have been added before."""
        if group.on_older is not None:
            return
        group.on_older = partial(self._on_older, group)
        if group.oldest_version is None:
            self._without_tokens.add(group)
        else:
            self.by_version[group.oldest_version] += 1

    def remove(self, groups: Iterable[Group]) -> None:
        """Count groups no longer. They may have been removed before."""
        for group in groups:
            if group.on_older is not None:
                group.on_older = None
                self._uncount(group, group.oldest_version)

    def published(self, has_arrived: Callable[[], bool]) -> None:
        """Note that a version was published. `has_arrived`: whether every engine has loaded it."""
        self._has_arrived = has_arrived
        self._held_over = set(self._without_tokens)

    @property
    def may_start_older(self) -> set[Group]:
        """The groups whose first token may be of the version before the published one.

        An engine reports the tokens of the old weights when the new weights arrive. Until then a group
        without reported tokens may have some of the old version.
        """
        if self._held_over and self._has_arrived():
            self._held_over = set()
        return self._held_over

    def _on_older(self, group: Group, before: int | None, version: int) -> None:
        self._uncount(group, before)
        self.by_version[version] += 1

    def _uncount(self, group: Group, version: int | None) -> None:
        if version is None:
            self._without_tokens.discard(group)
            self._held_over.discard(group)
        else:
            self.by_version[version] -= 1
            if not self.by_version[version]:
                del self.by_version[version]
