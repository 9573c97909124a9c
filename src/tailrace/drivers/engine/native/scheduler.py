"""Continuous batching: first come, first served; preemption of the most recently admitted.

A sequence is either waiting, or running with a slot in the cache. Running sequences are in the order of their
admission. A context that is longer than a step may compute is computed in parts, between the decode steps of
the others; those that came later wait for it.
"""

from collections import OrderedDict
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
    a sequence with a slot that begins with the context; None: its positions `part` must be computed."""

    sequences: list[Sequence]
    sibling: Sequence | None
    part: range


class Scheduler:
    """Decides which sequences run."""

    def __init__(self, cache: Cache | States, settings: NativeEngineSettings) -> None:
        self.cache = cache
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()
        self.running: dict[str, Sequence] = {}
        self.num_preempted = 0
        self.partial: Sequence | None = None
        """The last one that runs, if only a part of its context, `_num_filled` positions, is in the cache."""
        self._num_filled = 0
        self._settings = settings

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the waiting ones. Raises ValueError if one with its id waits or runs."""
        if sequence.id in self.waiting or sequence.id in self.running:
            raise ValueError(f"request {sequence.id!r} is already being served; abort it first")
        self.waiting[sequence.id] = sequence

    def admit(self, version_of: Callable[[Sequence], int]) -> list[Admitted]:
        """Give slots to waiting sequences, up to the limits on sequences, cache and prefill. The weights of
        their version compute them, but for those whose keys and values were suspended."""
        admissions: dict[tuple[int, tuple[int, ...], str], Admitted] = {}
        budget = limit = self._settings.max_prefill_tokens
        if (sequence := self.partial) is not None:
            part = self._next_part(sequence, limit)
            admissions[version_of(sequence), (*sequence.context,), ""] = Admitted([sequence], None, part)
            budget -= len(part)
        while self.waiting and not self.partial and len(self.running) < self._settings.max_num_seqs:
            sequence = next(iter(self.waiting.values()))
            if not self.cache.has_room(sequence):
                break
            resumed, version = self.cache.resume(sequence), version_of(sequence)
            if not resumed:
                alone = sequence.id if sequence.to_verify else ""  # each has noise of its own
                context = version, (*sequence.context,), alone
                admission = admissions.get(context)
                if admission is None:
                    others = self.running.values() if self.cache.in_parts else ()
                    sibling = sibling_of(sequence, version, others)
                    if sibling is None and len(sequence.context) > budget < limit:
                        break
                    part = range(0) if sibling else self._next_part(sequence, budget)
                    budget -= len(part)
                    admission = admissions[context] = Admitted([], sibling, part)
                self.cache.add(sequence)
                admission.sequences.append(sequence)
            del self.waiting[sequence.id]
            sequence.prompt_version = None if resumed else version
            self.running[sequence.id] = sequence
        return list(admissions.values())

    def _next_part(self, sequence: Sequence, num: int) -> range:
        """At most so many positions of a context that are not computed yet."""
        start, end = self._num_filled, len(sequence.context)
        self.partial, self._num_filled = None, 0
        if self.cache.in_parts and end > start + num:
            self.partial, self._num_filled = sequence, (end := start + num)
        return range(start, end)

    def grow(self, settle: Callable[[], bool]) -> None:
        """Move each sequence that fills its slot to a larger one, preempting others where needed. `settle`:
        reads the tokens that are not read, which may end sequences; whether there were any."""
        for sequence in list(self.running.values()):
            while self.running.get(sequence.id) is sequence and not self.cache.fits(sequence):
                if self.cache.has_room(sequence):
                    self.cache.move(sequence)
                elif not settle():
                    self._unschedule(next(reversed(self.running.values())))
                    self.num_preempted += 1

    def _unschedule(self, sequence: Sequence) -> None:
        self.cache.remove(self._stopped(sequence))
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)

    def _stopped(self, sequence: Sequence) -> Sequence:
        del self.running[sequence.id]
        if sequence is self.partial:
            self.partial, self._num_filled = None, 0
        return sequence

    def sequences(self) -> list[Sequence]:
        """All sequences that run or wait."""
        return [*self.running.values(), *self.waiting.values()]

    def renew(self, *, keep: bool) -> None:
        """Let sequences without a pin wait again, in order, so that new weights compute their contexts.
        `keep`: only the one of which a part is computed, and those to be verified."""
        if not keep:
            self.cache.forget()
        for sequence in reversed(list(self.running.values())):
            if sequence.pin is None and (sequence is self.partial or sequence.to_verify or not keep):
                self._unschedule(sequence)

    def cut(self, sequence: Sequence) -> None:
        """Go on with a running sequence that has lost tokens; the rest of its context is computed."""
        if sequence is self.partial:
            self.partial, self._num_filled = None, 0
        self.cache.cut(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence."""
        self.cache.remove(self._stopped(sequence))

    def abort(self, id: str) -> Sequence | None:
        """Remove a sequence and suspend its keys and values; None if there is none with this id."""
        if (sequence := self.running.get(id)) is None:
            return self.waiting.pop(id, None)
        leave = self.cache.remove if sequence is self.partial else self.cache.suspend
        leave(self._stopped(sequence))
        return sequence
