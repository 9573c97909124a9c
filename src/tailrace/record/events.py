"""What happens in a run, as values: the same live and simulated.

`run` and the pool emit events in order; sinks (trace, metrics, display, samples) read them. No sink is
asked anything back, so recording cannot change a run. Times are seconds on the run's clock.
"""

from dataclasses import dataclass, field
from typing import Protocol

from tailrace.record.lags import Lags
from tailrace.trainer.base import StepStats
from tailrace.types import Sample, SampleId


@dataclass(frozen=True, slots=True)
class RoundStarted:
    time_s: float
    round: int
    version: int


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A sample went to an engine, for the first time or again."""

    time_s: float
    sample: SampleId
    engine: str
    num_tokens: int
    """What it already had."""


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A sample left an engine."""

    time_s: float
    sample: SampleId
    engine: str
    num_tokens: int
    num_gained: int
    """Of these, what the engine added since the request started."""
    outcome: str
    """'stop', 'length', 'cancelled' or 'evicted'."""


@dataclass(frozen=True, slots=True)
class SampleScored:
    time_s: float
    sample: SampleId
    reward: float | None
    failure: str | None
    num_tokens: int
    detail: str = ""
    """Of the failure: what the reward function said."""


@dataclass(frozen=True, slots=True)
class GroupReady:
    """A group is materialised: generated, judged, not filtered, advantages set."""

    time_s: float
    prompt: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """A group was trained, filtered or dropped."""

    time_s: float
    prompt: int
    fate: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokensWasted:
    time_s: float
    sample: SampleId
    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class RowSkipped:
    """A row of the data could not become a prompt."""

    time_s: float
    prompt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Accumulated:
    start_s: float
    end_s: float
    samples: tuple[SampleId, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Stepped:
    start_s: float
    end_s: float
    stats: StepStats
    lags: Lags
    samples: tuple[Sample, ...] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class EssTaken:
    """A guard asked for the effective sample size of what may be trained next."""

    time_s: float
    ess: float


@dataclass(frozen=True, slots=True)
class Published:
    start_s: float
    end_s: float
    version: int


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """All steps of a round are done and its weights published."""

    time_s: float
    round: int


@dataclass(frozen=True, slots=True)
class BooksClosed:
    """The run is over: what it drew and generated, and neither trained nor threw away."""

    time_s: float
    num_parked_groups: int
    num_parked_tokens: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out prompts were sampled and scored."""

    time_s: float
    round: int
    num_samples: int
    accuracy: float
    """Mean reward."""
    mean_tokens: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, at the top of a round."""

    time_s: float
    round: int
    path: str
    version: int
    num_drawn: int
    """Prompts drawn so far: the number of the next."""


@dataclass(frozen=True, slots=True)
class Waiting:
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
