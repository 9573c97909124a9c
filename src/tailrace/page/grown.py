"""The bubbles of a life that grows: only those that may have changed are derived anew."""

import math
from collections.abc import Iterable, Iterator

from tailrace.page.bubbles import TRAINER, Bubble, bubbles
from tailrace.page.life import Life
from tailrace.record.intervals import most_at_once, total

SCORING = "scoring"


class GrownBubbles:
    """Follows one life."""

    def __init__(self, life: Life) -> None:
        self.recorded_s = 0.0
        self.scoring: list[Bubble] = []
        """When samples waited for their rewards."""
        self._life = life
        self._lanes: dict[str, list[Bubble]] = {}
        self._peak = 0
        """The most rollouts that ran at once."""
        self._known: object = None
        """What the bubbles of all times depend on."""

    def __iter__(self) -> Iterator[Bubble]:
        """The bubbles of the trainer, then of each engine."""
        for lane in sorted(self._lanes, key=lambda lane: (lane != TRAINER, lane)):
            yield from self._lanes[lane]

    def update(self) -> None:
        """Derive what follows from the last `Life.update`."""
        since_s = self._life.changed_s
        activity = self._life.activity(since_s)
        self._peak = max(self._peak, most_at_once(activity.rollouts))
        known = self._life.start_s, list(activity.requests), self._peak
        if known != self._known:
            self._known, since_s, activity = known, -math.inf, self._life.activity()
        found: dict[str, list[Bubble]] = {lane: [] for lane in (TRAINER, *activity.requests)}
        for bubble in bubbles(activity, self._peak):
            found[bubble.lane].append(bubble)
        for lane, new in found.items():
            _replace(self._lanes.setdefault(lane, []), since_s, new)
        waits = ((max(start_s, since_s), end_s) for start_s, end_s in activity.scoring.tolist())
        _replace(self.scoring, since_s, (Bubble(SCORING, *times, SCORING) for times in waits))
        self.recorded_s = self._life.end_s - self._life.start_s - total(activity.unrecorded)


def _replace(kept: list[Bubble], since_s: float, new: Iterable[Bubble]) -> None:
    """Replace the end of a lane, from a time on. What touches and has the same cause becomes one bubble."""
    while kept and kept[-1].end_s > since_s:
        last = kept.pop()
        if last.start_s < since_s:
            kept.append(last._replace(end_s=since_s))
    for bubble in new:
        if kept and (kept[-1].end_s, kept[-1].cause) == (bubble.start_s, bubble.cause):
            bubble = bubble._replace(start_s=kept.pop().start_s)
        kept.append(bubble)
