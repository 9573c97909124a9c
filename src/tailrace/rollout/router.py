"""Router: the engines, and which of them gets a request."""

from collections.abc import Callable, Sequence

from tailrace.clock import Signal, now
from tailrace.engine.base import Engine
from tailrace.errors import Evicted
from tailrace.record.events import Recorder, RequestEnded, RequestStarted
from tailrace.types import Sample

SLACK = 1 / 8
"""Of an engine's slots: by so much it may be ahead of the least loaded one and still get back what it served,
because it may have kept the keys and values, which another would compute anew."""


class Router:
    """Serves a sample on the least loaded engine, or on the one that served it last if that has room; and on
    another one if that gives it back."""

    def __init__(self, engines: Sequence[Engine], recorder: Recorder) -> None:
        self.engines = engines
        self.changed = Signal()
        self.on_changed: Callable[[], None] = lambda: None
        self._recorder = recorder
        self._load = {engine.name: 0 for engine in engines}

    @property
    def slots(self) -> int:
        """Requests that all open engines serve at once."""
        return sum(engine.slots for engine in self.engines if engine.open)

    async def serve(self, sample: Sample) -> None:
        """Extend the sample until it ends. May be cancelled at any token."""
        while sample.finish_reason is None:
            engine = await self._pick(sample)
            sample.engine = engine.name
            self._load[engine.name] += 1
            had = sample.num_tokens
            self._recorder.emit(RequestStarted(now(), sample.id, engine.name, had))
            outcome = "cancelled"
            try:
                await engine.generate(sample)
                outcome = str(sample.finish_reason)
            except Evicted:
                outcome, sample.engine = "evicted", None
            finally:
                self._load[engine.name] -= 1
                gained = sample.num_tokens - had
                self._recorder.emit(
                    RequestEnded(now(), sample.id, engine.name, sample.num_tokens, gained, outcome)
                )

    def engines_changed(self) -> None:
        """An engine opened or closed."""
        self.changed.fire()
        self.on_changed()

    async def _pick(self, sample: Sample) -> Engine:
        while not (candidates := [engine for engine in self.engines if engine.open]):
            await self.changed.wait("an engine that is awake")
        least = min(candidates, key=self._share)
        last = next((engine for engine in candidates if engine.name == sample.engine), least)
        return last if self._share(last) < min(1.0, self._share(least) + SLACK) else least

    def _share(self, engine: Engine) -> float:
        """Of its slots that are taken."""
        return self._load[engine.name] / engine.slots
