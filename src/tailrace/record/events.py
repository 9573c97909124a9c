"""What happens in a run, as values: the same live and simulated.

`run` and the pool emit events in order; sinks (trace, metrics, display, samples) read them. No sink is
asked anything back, so recording cannot change a run. Times are seconds on the run's clock. Structs of
msgspec, because there are a few for each sample, and a frozen dataclass takes nine times as long to make.
"""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tailrace.record.lags import Lags
from tailrace.trainer.base import StepStats
from tailrace.types import Sample, SampleId


class RoundStarted(msgspec.Struct, frozen=True):
    time_s: float
    round: int
    version: int


class RequestStarted(msgspec.Struct, frozen=True):
    """A sample went to an engine, for the first time or again."""

    time_s: float
    sample: SampleId
    engine: str
    num_tokens: int
    """What it already had."""


class RequestEnded(msgspec.Struct, frozen=True):
    """A sample left an engine."""

    time_s: float
    sample: SampleId
    engine: str
    num_tokens: int
    num_gained: int
    """Of these, what the engine added since the request started."""
    outcome: str
    """'stop', 'length', 'cancelled' or 'evicted'."""


class SampleScored(msgspec.Struct, frozen=True):
    time_s: float
    sample: SampleId
    reward: float | None
    failure: str | None
    num_tokens: int
    detail: str = ""
    """Of the failure: what the reward function said."""


class GroupReady(msgspec.Struct, frozen=True):
    """A group is materialised: generated, judged, not filtered, advantages set."""

    time_s: float
    prompt: int
    num_tokens: int


class GroupEnded(msgspec.Struct, frozen=True):
    """A group was trained, filtered or dropped."""

    time_s: float
    prompt: int
    fate: str
    reason: str


class TokensWasted(msgspec.Struct, frozen=True):
    time_s: float
    sample: SampleId
    num_tokens: int
    reason: str


class RowSkipped(msgspec.Struct, frozen=True):
    """A row of the data could not become a prompt."""

    time_s: float
    prompt: int
    reason: str


class Accumulated(msgspec.Struct, frozen=True):
    start_s: float
    end_s: float
    samples: tuple[SampleId, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """One a step, so it may take its time: what is not compared or printed, a struct cannot say."""

    start_s: float
    end_s: float
    stats: StepStats
    lags: Lags
    samples: tuple[Sample, ...] = field(repr=False, compare=False)


class EssTaken(msgspec.Struct, frozen=True):
    """A guard asked for the effective sample size of what may be trained next."""

    time_s: float
    ess: float


class Published(msgspec.Struct, frozen=True):
    start_s: float
    end_s: float
    version: int


class RoundEnded(msgspec.Struct, frozen=True):
    """All steps of a round are done and its weights published."""

    time_s: float
    round: int


class BooksClosed(msgspec.Struct, frozen=True):
    """The run is over: what it drew and generated, and neither trained nor threw away."""

    time_s: float
    num_parked_groups: int
    num_parked_tokens: int


class Evaluated(msgspec.Struct, frozen=True):
    """Held-out prompts were sampled and scored."""

    time_s: float
    round: int
    num_samples: int
    accuracy: float
    """Mean reward."""
    mean_tokens: float


class Saved(msgspec.Struct, frozen=True):
    """A checkpoint, at the top of a round."""

    time_s: float
    round: int
    path: str
    version: int
    num_drawn: int
    """Prompts drawn so far: the number of the next."""


class Waiting(msgspec.Struct, frozen=True):
    """No optimizer step for so long; who waits for what."""

    time_s: float
    quiet_s: float
    what: str


Event = (
    RoundStarted
    | RequestStarted
    | RequestEnded
    | SampleScored
    | GroupReady
    | GroupEnded
    | TokensWasted
    | RowSkipped
    | Accumulated
    | Stepped
    | EssTaken
    | Published
    | RoundEnded
    | BooksClosed
    | Evaluated
    | Saved
    | Waiting
)


def time_of(event: Event) -> float:
    """When it happened; the end of what took time."""
    return event.end_s if isinstance(event, Accumulated | Stepped | Published) else event.time_s


class Sink(Protocol):
    """Reads events as they happen."""

    def on(self, event: Event) -> None: ...

    def close(self) -> None:
        """The run is over, well or not."""


class FromRound:
    """Sink: passes on what happens from a round on; for pictures of a run too long for one."""

    def __init__(self, first_round: int, sink: Sink) -> None:
        self._first_round, self._sink = first_round, sink
        self._open = False

    def on(self, event: Event) -> None:
        self._open = self._open or (isinstance(event, RoundStarted) and event.round >= self._first_round)
        if self._open:
            self._sink.on(event)

    def close(self) -> None:
        self._sink.close()


class Recorder:
    """Passes each event to every sink, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = sinks

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            sink.on(event)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
