"""The samples in the pool: which ones wait, which ones are served, which ones are scored."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from tailrace.types import Sample

Order = Callable[[Sample], tuple[float, ...]]
"""The place of a sample among those that wait; the smallest is served first. It may depend on the finished
samples of the group."""


def launched_first(sample: Sample) -> tuple[float, ...]:
    """The order in which groups were launched."""
    return (sample.group.order,)


class Stage(Enum):
    """What happens to a sample in the pool."""

    WAITING = auto()
    SERVING = auto()
    ABORTING = auto()
    """Its request was cancelled, and the engine has not yet given it up."""
    SCORING = auto()


@dataclass(slots=True)
class _State:
    stage: Stage
    task: asyncio.Task[None] | None = None
    discarded: str | None = None
    """The sample has left its group; its tokens become waste with this reason."""
    place: tuple[float, ...] = ()
    """Its place in the queue while it waits."""


class SamplesInFlight:
    """One state for each sample, and the queue of those that wait.

    Args:
        order: of the samples that wait.
    """

    def __init__(self, order: Order = launched_first) -> None:
        self._order = order
        self._states: dict[Sample, _State] = {}
        self._queue: list[tuple[tuple[float, ...], int, Sample]] = []  # a heap: (place, tie, sample)
        self._ties = itertools.count()
        self.num_requests = 0
        """Samples that are served or aborting."""

    def __contains__(self, sample: Sample) -> bool:
        return sample in self._states

    def wait(self, sample: Sample) -> None:
        """Queue a sample for service."""
        self._enqueue(sample, self._order(sample))

    def reorder(self, samples: Iterable[Sample]) -> None:
        """Give those of the samples that wait their present places."""
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
        """A waiting sample goes to an engine."""
        self._states[sample] = _State(Stage.SERVING, task)
        self.num_requests += 1

    def served(self, sample: Sample) -> tuple[Stage, str | None]:
        """The task that served a sample has ended. Returns its last stage, and the reason if it was
        discarded."""
        state = self._states.pop(sample)
        self.num_requests -= 1
        return state.stage, state.discarded

    def score(self, sample: Sample, task: asyncio.Task[None]) -> None:
        """A finished sample is scored until the task ends."""
        self._states[sample] = _State(Stage.SCORING, task)
        task.add_done_callback(lambda _: self._states.pop(sample))

    def park(self, sample: Sample) -> asyncio.Task[None] | None:
        """Stop a sample. Returns the task of its abort, if an engine works on it. Scoring goes on."""
        state = self._states.get(sample)
        if state is None or state.stage is Stage.SCORING:
            return None
        if state.task is None:
            del self._states[sample]
        else:
            state.stage = Stage.ABORTING
            # Once: a second cancellation would interrupt the abort that the first one waits for.
            if not state.task.cancelling():
                state.task.cancel()
        return state.task

    def discard(self, sample: Sample, reason: str) -> bool:
        """Stop a sample for good. Returns whether an engine still works on it; then `served` gives the
        reason."""
        state = self._states.get(sample)
        aborting = self.park(sample) is not None
        if state is not None and aborting:
            state.discarded = reason
        elif state is not None and state.task is not None:  # it is scored
            state.task.cancel()
        return aborting

    def aborting(self) -> list[asyncio.Task[None]]:
        """The tasks of aborts under way."""
        states = self._states.values()
        return [state.task for state in states if state.stage is Stage.ABORTING and state.task is not None]

    def cancel_all(self) -> None:
        """Cancel every task."""
        for state in list(self._states.values()):
            if state.task is not None:
                state.task.cancel()
