"""Drafts: tokens that a step checks beside the one that it draws.

The noise of a draw is a function of seed and place, so the next tokens of a request are determined: a drafted
token is the one that will be drawn, or it is not. A step reads some drafted tokens after the last one, draws
at each place and keeps the draws up to and with the first that differs from its draft. So drafts change how
many tokens a step gives, and no token (speculative decoding: Leviathan, Kalman and Matias, ICML 2023; here
the acceptance is a comparison).

A step with more rows takes longer. How many tokens are drafted follows from the seconds of steps by their
rows and the share of drafts that were right, both measured while the engine works.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median_low

from tailrace.drivers.engine.native.cache import Sequence as Request
from tailrace.drivers.engine.native.matches import LENGTHS

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Upper limits of the numbers of rows whose steps are measured together."""
KEPT = 5
"""Measurements of steps of like rows, whose median counts: a first or a disturbed step may take many times as
long, and steps without drafts are few."""
NEW_DRAFT = 1 / 64
"""The least weight of a new draft in the share of right ones. The first drafts weigh more: the share is the
mean of what it may be after them, where any share was as likely before."""
PLAIN_EVERY = 64
"""One of so many steps with drafts has none, so that the seconds of such steps are known. At first more have
none: after 1, 2, 4, ... steps with drafts."""
MAX_REST = 127
"""The most steps for which nothing is drafted after drafts did not pay. After them a few are tried, at most
one a request, because seconds and shares may be others now."""


class StepSeconds:
    """The seconds of a step as a function of its rows, from steps that were measured."""

    def __init__(self) -> None:
        self._last = [deque[tuple[float, int]](maxlen=KEPT) for _ in SIZES]
        """Seconds and rows of the last steps, by SIZES."""
        self.most_rows = 0
        """The widest step that was measured."""

    def observe(self, rows: int, seconds: float) -> None:
        """A step took so long. Steps of more rows than all SIZES are not used."""
        if (number := bisect_left(SIZES, rows)) < len(SIZES):
            self._last[number].append((seconds, rows))
            self.most_rows = max(self.most_rows, rows)

    def __call__(self, rows: int) -> float:
        """Seconds of a step with so many rows: on the line between the nearest measured ones, beyond them as
        of the nearest. It never falls with the rows. 0: no step was measured."""
        known = [median_low(each) for each in self._last if each]
        seconds = [*accumulate((each for each, _ in known), max)]
        after = bisect_left([each for _, each in known], rows)
        if after in (0, len(known)):
            return seconds[min(after, len(known) - 1)] if known else 0.0
        low, high = known[after - 1][1], known[after][1]
        return seconds[after - 1] + (seconds[after] - seconds[after - 1]) * (rows - low) / (high - low)


class Drafter:
    """Proposes drafts for the requests of a step: as many as give the most tokens a second.

    Args:
        max_tokens: of a request in one step.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self.seconds = max_tokens, StepSeconds()
        self._right = dict.fromkeys(LENGTHS, (0.5, 0))
        """The share of drafts that were right after right ones, and how many were seen, by the length of the
        match."""
        self._lengths: dict[Request, int] = {}
        """The lengths of the matches whose drafts are checked now."""
        self._rest = self._last_rest = 0
        self._until_plain = self._plain_every = 1

    def propose(self, rooms: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Drafts for requests, those without left out. `rooms`: the most tokens of each."""
        self._lengths = {}
        if self._rest or not self._until_plain:
            self._rest = max(0, self._rest - 1)
            self._until_plain = self._plain_every = min(PLAIN_EVERY, 2 * self._plain_every)
            return {}
        drafts: dict[Request, list[int]] = {}
        chances: list[tuple[float, int, Request]] = []
        for request, room in rooms.items():
            if room <= 0 or request.matches is None:
                continue
            if match := request.matches.find(request.tokens, min(room, self._max_tokens)):
                drafts[request], self._lengths[request] = match.ids, match.length
                right, _ = self._right[match.length]
                chances += ((right**depth, -depth, request) for depth in range(1, len(match.ids) + 1))
        chances.sort(key=lambda each: each[:2], reverse=True)
        num = self._best_number(len(rooms), [chance for chance, _, _ in chances])
        if self._last_rest == MAX_REST:
            num = num or min(len(rooms), len(chances))
        widths = dict.fromkeys(drafts, 0)
        for _, _, request in chances[:num]:
            widths[request] += 1
        self._until_plain -= num > 0
        if chances:
            self._rest = self._last_rest = 0 if num else min(MAX_REST, 2 * self._last_rest + 1)
        return {request: drafts[request][:width] for request, width in widths.items() if width}

    def _best_number(self, num_requests: int, chances: Sequence[float]) -> int:
        """How many of the drafts give the most tokens a second, where the likeliest are taken first. No step
        is more than twice as wide as measured ones, because what a wider one costs is not known."""
        room = max(0, 2 * self.seconds.most_rows - num_requests)
        best, best_num, tokens = num_requests / max(self.seconds(num_requests), 1e-9), 0, float(num_requests)
        for num, chance in enumerate(chances[:room], 1):
            tokens += chance
            if (rate := tokens / max(self.seconds(num_requests + num), 1e-9)) > best:
                best, best_num = rate, num
        return best_num

    def observe(self, request: Request, num_drafted: int, num_right: int) -> None:
        """Book how many of the first drafts of a request were right."""
        length = self._lengths.pop(request)
        for number in range(min(num_right + 1, num_drafted)):
            right, seen = self._right[length]
            weight = max(NEW_DRAFT, 1 / (seen + 3))
            self._right[length] = right + weight * ((number < num_right) - right), seen + 1
