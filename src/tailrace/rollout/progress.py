"""Progress of a rollout, and the KV cache that the rest of it will need (RollPacker 4.4)."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import inf

from tailrace.types import Group, Sample

MAX_KNOWN = 8192
"""Lengths of finished responses that are remembered."""


class RolloutProgress:
    """Responses of the present rollout, which begins with a launch into an empty pool."""

    def __init__(self) -> None:
        self.num_launched = 0
        """Responses launched, without those that the rules of a group do not require."""
        self.num_finished = 0
        """Responses that ended and are kept."""
        self.num_finished_groups = self.longest = 0
        """Groups whose required responses have ended, and the tokens of the longest of these responses."""
        self.lengths = KnownLengths()
        self._num_needed = self._num_groups = 0
        self._limit = self._limit_groups = inf

    def launched(self, group: Group, *, is_first: bool) -> None:
        """Count a launched group; the first one begins a rollout."""
        if is_first:
            self.num_launched = self.num_finished = self._num_needed = 0
            self.num_finished_groups = self.longest = self._num_groups = 0
            self._limit = self._limit_groups = inf
        self.num_launched += group.num_required if group.has_rules else len(group.samples)
        self._num_needed += group.num_required
        self._num_groups += 1
        self.num_finished += len(group.kept)
        if group.serving_complete:
            self._count(group)

    def end_after(self, num_groups: int, group_size: int) -> None:
        """End the rollout after this number of groups."""
        self._limit, self._limit_groups = num_groups * group_size, num_groups

    def keep_finished(self, group: Group, waits: Callable[[Sample], bool]) -> None:
        """Keep the samples of a group that have ended and do not wait, as many as it requires."""
        if group.serving_complete:
            return
        for sample in [each for each in group.samples if each.ended and not waits(each)]:
            if sample not in group.kept and not group.serving_complete:
                group.kept.append(sample)
                self.num_finished += 1
                self.lengths.add(sample.num_tokens)
        if group.serving_complete:
            self._count(group)

    def need_fewer(self, group: Group, num_members: int) -> None:
        """Need fewer responses of a group, after members of it were lost."""
        was_complete = group.serving_complete
        self.num_launched -= num_members
        self._num_needed -= num_members
        group.num_required -= num_members
        if group.serving_complete and group.kept and not was_complete:
            self._count(group)

    def lose(self, sample: Sample) -> None:
        """Keep a finished sample no longer."""
        self.num_finished_groups -= sample.group.serving_complete
        sample.group.kept.remove(sample)
        self.num_finished -= 1

    def _count(self, group: Group) -> None:
        self.num_finished_groups += 1
        self.longest = max(self.longest, *(sample.num_tokens for sample in group.kept))

    @property
    def num_needed_groups(self) -> float:
        """Groups after which the rollout ends."""
        return min(self._limit_groups, self._num_groups)

    @property
    def num_needed(self) -> float:
        """Responses after which the rollout ends."""
        return min(self._limit, self._num_needed)

    @property
    def share(self) -> float:
        """Share of the needed responses that are finished, at most 1. In a race more are launched (RollPacker
        4.4 has no word on them), and the losers never finish."""
        return min(1.0, self.num_finished / self.num_needed) if self.num_needed else 0.0

    @property
    def is_race(self) -> bool:
        """More responses were launched than are needed: a short round of tail batching."""
        return self.num_needed < self.num_launched


class KnownLengths:
    """The lengths of the responses that ended last."""

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        self._recent = deque(lengths, MAX_KNOWN)

    def add(self, length: int) -> None:
        self._recent.append(length)

    def expected_more(self, had: Sequence[int]) -> list[float]:
        """The tokens that unfinished responses are expected to gain, which have `had` so many.

        A response of t tokens is expected to reach the mean of the known lengths above t. If none is known,
        it is expected to reach 2 t.
        """
        known = sorted(self._recent)
        sums = list(accumulate(known, initial=0))
        more = []
        for tokens in had:
            above = bisect_right(known, tokens)
            num_above = len(known) - above
            mean = (sums[-1] - sums[above]) / num_above if num_above else 2.0 * tokens
            more.append(mean - tokens)
        return more


def peak_kv(contexts: Sequence[int], more: Sequence[float]) -> float:
    """The largest KV cache of requests that are decoded together, in positions. They have `contexts`
    positions and will gain `more` tokens, one a step. It is largest in a step in which a request ends."""
    peak, context = 0.0, float(sum(contexts))
    ends = sorted(zip(more, contexts, strict=True))
    for number, (steps, own) in enumerate(ends):
        running = len(ends) - number
        peak = max(peak, context + running * steps)
        context -= own
    return peak
