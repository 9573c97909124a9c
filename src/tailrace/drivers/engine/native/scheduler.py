"""Continuous batching: first come, first served; preemption of the most recently admitted.

A sequence is either waiting, or running with a slot in the cache. Running sequences are in the order of their
admission.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tailrace.drivers.engine.native.cache import Cache, Sequence
from tailrace.drivers.engine.native.states import States
from tailrace.drivers.engine.settings import NativeEngineSettings


def sibling_of(sequence: Sequence, version: int, others: Iterable[Sequence]) -> Sequence | None:
    """The one of the others with the same prompt as a fresh sequence, if `version` computed it."""
    if sequence.num_completion:
        return None
    for other in others:
        same_version = other.prompt_version == version and other.num_prompt == sequence.num_prompt
        if same_version and other.tokens[: other.num_prompt] == sequence.tokens:
            return other
    return None


@dataclass(frozen=True, slots=True)
class Admitted:
    """Admitted sequences with the same context, which is computed once for all of them, or copied. `sibling`:
    a sequence with a slot that begins with the context; None: it must be computed."""

    sequences: list[Sequence]
    sibling: Sequence | None


class Scheduler:
    """Decides which sequences run."""

    def __init__(self, cache: Cache | States, settings: NativeEngineSettings) -> None:
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}
        self.num_preempted = 0
        self._settings = settings
        self._ids: set[str] = set()
        """Ids of all sequences that wait or run."""

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the waiting ones. Raises ValueError if one with its id waits or runs."""
        if sequence.id in self._ids:
            raise ValueError(f"request {sequence.id!r} is already being served; abort it first")
        self._ids.add(sequence.id)
        self.waiting.append(sequence)

    def admit(self, version_of: Callable[[Sequence], int]) -> list[Admitted]:
        """Give slots to waiting sequences, up to the limits on sequences, cache and prefill. The weights of
        their version compute them, but for those whose keys and values were suspended."""
        admissions: list[Admitted] = []
        computed: dict[tuple[int, tuple[int, ...]], Admitted] = {}
        budget = limit = self._settings.max_prefill_tokens
        while self.waiting and len(self.running) < self._settings.max_num_seqs:
            sequence = self.waiting[0]
            if not self.cache.has_room(sequence):
                break
            resumed, version = self.cache.resume(sequence), version_of(sequence)
            if not resumed:
                context = version, tuple(sequence.context)
                admission = computed.get(context)
                if admission is None:
                    others = self.running.values() if self.cache.lends_prompts else ()
                    sibling = sibling_of(sequence, version, others)
                    if sibling is None:
                        if len(sequence.context) > budget < limit:
                            break
                        budget -= len(sequence.context)
                    admission = computed[context] = Admitted([], sibling)
                    admissions.append(admission)
                self.cache.add(sequence)
                admission.sequences.append(sequence)
            self.waiting.popleft()
            sequence.prompt_version = None if resumed else version
            self.running[sequence.id] = sequence
        return admissions

    def grow(self) -> None:
        """Move each sequence that fills its slot to a larger one, preempting others where needed."""
        for sequence in list(self.running.values()):
            if sequence.id not in self.running or self.cache.fits(sequence):
                continue
            while sequence.id in self.running and not self.cache.has_room(sequence):
                self._unschedule(next(reversed(self.running.values())))
                self.num_preempted += 1
            if sequence.id in self.running:
                self.cache.move(sequence)

    def _unschedule(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self.cache.remove(sequence)
        self.waiting.appendleft(sequence)

    def recompute(self) -> None:
        """Let every sequence without a pin wait again, in order, so that its context is computed anew."""
        self.cache.suspended.shrink(0)
        for sequence in reversed(list(self.running.values())):
            if sequence.pin is None:
                self._unschedule(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence."""
        self._ids.remove(sequence.id)
        del self.running[sequence.id]
        self.cache.remove(sequence)

    def abort(self, id: str) -> Sequence | None:
        """Remove a sequence and suspend its keys and values; None if there is none with this id."""
        if running := self.running.get(id):
            self.cache.suspend(running)
            self.finish(running)
            return running
        for sequence in self.waiting:
            if sequence.id == id:
                self._ids.remove(id)
                self.waiting.remove(sequence)
                return sequence
        return None
