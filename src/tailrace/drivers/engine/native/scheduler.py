"""Continuous batching: first come, first served; preemption of the most recently admitted.

A sequence is either waiting, or running with a slot in the cache. Running sequences are in the order of their
admission. They are decoded once their context is in the cache: a long one is computed in parts, between the
decode steps of the others.
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
        if same_version and other.is_filled and other.tokens[: other.num_prompt] == sequence.tokens:
            return other
    return None


@dataclass(eq=False, slots=True)
class Filling:
    """Sequences with slots and the same context, which is computed once for all of them, or copied.

    Args:
        sibling: a sequence with a slot that begins with the context; None: it must be computed.
        num_filled: positions that the slot of the first one has.
    """

    sequences: list[Sequence]
    sibling: Sequence | None
    num_filled: int = 0

    @property
    def num_left(self) -> int:
        """Positions to compute."""
        return 0 if self.sibling else len(self.sequences[0].context) - self.num_filled


class Scheduler:
    """Decides which sequences run."""

    def __init__(self, cache: Cache | States, settings: NativeEngineSettings) -> None:
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}
        self.filling: list[Filling] = []
        """Those that run and have no context in the cache yet, in the order of their admission."""
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

    def admit(self, version_of: Callable[[Sequence], int]) -> None:
        """Give slots to waiting sequences, up to the limits on sequences, cache and prefill. The weights of
        their version compute them, but for those whose keys and values were suspended."""
        computed = {
            (version_of(first := each.sequences[0]), tuple(first.context)): each for each in self.filling
        }
        limit = self._settings.max_prefill_tokens
        budget = limit - sum(each.num_left for each in self.filling)
        while self.waiting and len(self.running) < self._settings.max_num_seqs:
            sequence = self.waiting[0]
            if not self.cache.has_room(sequence):
                break
            sequence.is_filled, version = self.cache.resume(sequence), version_of(sequence)
            if not sequence.is_filled:
                context = version, tuple(sequence.context)
                filling = computed.get(context)
                if filling is None:
                    others = self.running.values() if self.cache.lends_prompts else ()
                    filling = Filling([sequence], sibling_of(sequence, version, others))
                    if filling.num_left > budget and (
                        budget <= 0 or (not self.cache.in_parts and budget < limit)
                    ):
                        break
                    budget -= filling.num_left
                    computed[context] = filling
                    self.filling.append(filling)
                else:
                    filling.sequences.append(sequence)
                self.cache.add(sequence)
            self.waiting.popleft()
            sequence.prompt_version = None if sequence.is_filled else version
            self.running[sequence.id] = sequence

    def parts(self) -> list[tuple[Sequence, int, int]]:
        """The contexts to compute before the next decode step: sequences, the positions that they have, and
        how many more."""
        budget, parts = self._settings.max_prefill_tokens, []
        for each in self.filling:
            num = min(each.num_left, budget) if self.cache.in_parts else each.num_left
            budget -= num
            if num:
                parts.append((each.sequences[0], each.num_filled, num))
                each.num_filled += num
        return parts

    def filled(self) -> list[tuple[Sequence, list[Sequence]]]:
        """Sequences whose slots have the whole context, and those to which it is to be copied."""
        done = [each for each in self.filling if not each.num_left]
        self.filling = [each for each in self.filling if each.num_left]
        for each in done:
            for sequence in each.sequences:
                sequence.is_filled = True
        return [
            (each.sibling, each.sequences) if each.sibling else (each.sequences[0], each.sequences[1:])
            for each in done
        ]

    def grow(self, goes_on: Callable[[Sequence], bool], settle: Callable[[], bool]) -> None:
        """Move each sequence that fills its slot to a larger one, preempting others where needed.

        Args:
            goes_on: whether a sequence gets another token.
            settle: reads the tokens that are not read, which may end sequences; whether there were any.
        """
        for sequence in [each for each in self.running.values() if goes_on(each)]:
            while self.running.get(sequence.id) is sequence and not self.cache.fits(sequence):
                if self.cache.has_room(sequence):
                    self.cache.move(sequence)
                elif not settle():
                    self._unschedule(next(reversed(self.running.values())))
                    self.num_preempted += 1

    def _unschedule(self, sequence: Sequence) -> None:
        self._remove(sequence)
        self.waiting.appendleft(sequence)

    def _remove(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self.cache.remove(sequence)
        if not sequence.is_filled:
            for each in self.filling:
                if sequence is each.sequences[0]:
                    each.num_filled = 0
                if sequence in each.sequences:
                    each.sequences.remove(sequence)
            self.filling = [each for each in self.filling if each.sequences]
        sequence.is_filled = False

    def renew(self, *, keep: bool) -> None:
        """Let sequences without a pin wait again, in order, so that their contexts are computed by the new
        weights. `keep`: only those of which not all is computed."""
        if not keep:
            self.cache.suspended.shrink(0)
        for sequence in reversed(list(self.running.values())):
            if sequence.pin is None and not (keep and sequence.is_filled):
                self._unschedule(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence."""
        self._ids.remove(sequence.id)
        self._remove(sequence)

    def abort(self, id: str) -> Sequence | None:
        """Remove a sequence and suspend its keys and values; None if there is none with this id."""
        if running := self.running.get(id):
            if running.is_filled:
                self.cache.suspend(running)
            self.finish(running)
            return running
        for sequence in self.waiting:
            if sequence.id == id:
                self._ids.remove(id)
                self.waiting.remove(sequence)
                return sequence
        return None
