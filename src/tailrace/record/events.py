"""The events of a run, live or simulated, and the sinks that read them.

The controller emits events in the order in which they happen; sinks (run log, metrics, display, samples,
your own) read them. A sink returns nothing, so recording cannot change a run. Times are seconds on the run's
clock. Most events are msgspec structs: there are several a sample, a frozen dataclass takes nine times as
long to make, and events.jsonl has them with their names as tags (`run_log.py`).
"""

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from tailrace.contracts.engine import Arrival, DecodeSums
from tailrace.contracts.trainer import StepStats
from tailrace.record.lags import Lags
from tailrace.types import KV, FinishReason, Group, Sample, SampleId

Row: TypeAlias = dict[str, float]
"""Figures by name (`figures.py`). A step's row has "loss", a round's "round/time_s", an evaluation's
"eval/reward". A figure that is not known is left out; one that is not finite is NaN, and null in
metrics.jsonl."""


class Moment(msgspec.Struct, frozen=True, tag_field="event", tag=True):
    """Something that happened at one time."""

    time_s: float


class Interval(msgspec.Struct, frozen=True, tag_field="event", tag=True):
    """Work that took time; its event comes at the end."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class RunStarted(Moment, frozen=True):
    """A process begins the run, or goes on with it from a checkpoint: the first event of the process in the
    run log. What the log has of later rounds and steps before it is undone."""

    life: int
    """The number of the process in the run, from 1, as in the ledger."""
    round: int
    """The round in which the run goes on, the published version, and the optimizer steps so far."""
    version: int
    step: int
    format: int
    """Version of what the events of the run log mean."""


class RoundStarted(Moment, frozen=True):
    round: int
    version: int
    """The published version of the weights."""


class RequestStarted(Moment, frozen=True):
    """A sample was sent to an engine, for the first time or again."""

    sample: SampleId
    engine: str
    num_tokens: int
    """Completion tokens that the sample had already."""


class RequestEnded(Moment, frozen=True):
    """A sample left an engine: its turn ended, or was interrupted."""

    sample: SampleId
    engine: str
    num_tokens: int
    num_gained: int
    """Tokens that this request added."""
    outcome: str
    """'stop', 'length', 'cancelled', 'moved', 'evicted'; 'refused': the engine lacks the sample's version."""


class Decoded(Interval, frozen=True):
    """An engine had requests all the time. Its decode steps since its last event of this kind; engines that
    count none have no such event."""

    engine: str
    sums: DecodeSums
    drafts: bool = False
    """Whether it drafts tokens."""


class SampleScored(Moment, frozen=True):
    """The reward of a sample is known, or is known to have failed."""

    sample: SampleId
    reward: float | None
    failure: str | None
    """The reason why the reward failed or timed out."""
    num_tokens: int
    detail: str = ""
    """Message of the reward function about the failure."""


class ReferenceScored(Interval, frozen=True):
    """A sample waited for its log-probs under the reference model or a teacher, and got them."""

    sample: SampleId
    num_tokens: int
    """Completion tokens."""


class GroupDrawn(Moment, frozen=True):
    """A group was drawn, or taken up by a process that goes on with the run. The run log does not have it."""

    group: Group


class GroupReady(Moment, frozen=True):
    """A group is complete and not filtered, and its advantages are set: it can be trained."""

    prompt: int
    num_tokens: int


class StagesFilled(Moment, frozen=True):
    """How full the stages between the engines and the trainer were since the last optimizer step, by their
    names: "generated", "scoring", "ready" (rollout/pool.py)."""

    stages: dict[str, tuple[int, float]]
    """The most groups at a time, and the seconds for which the stage was full and took no group."""


class PoolsFilled(Moment, frozen=True):
    """How many rows each difficulty pool has, by its name. The run log does not have it."""

    rows: dict[str, int]


class GroupEnded(Moment, frozen=True):
    """A group was trained, filtered or dropped."""

    prompt: int
    fate: str
    reason: str


class TokensWasted(Moment, frozen=True):
    """Tokens of a sample will never be trained."""

    sample: SampleId
    num_tokens: int
    reason: str


class RowSkipped(Moment, frozen=True):
    """A row of the data could not become a prompt."""

    prompt: int
    reason: str
    detail: str = ""


class Accumulated(Interval, frozen=True):
    """The trainer computed gradients of samples."""

    samples: tuple[SampleId, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """The trainer made an optimizer step. A dataclass: a struct cannot leave fields out of comparison."""

    start_s: float
    end_s: float
    stats: StepStats
    lags: Lags
    samples: tuple[Sample, ...] = field(repr=False, compare=False)


class OptimizerStep(Interval, frozen=True):
    """A `Stepped` as the run log keeps it. Its figures are in metrics.jsonl, its tokens in samples/."""

    number: int
    """Optimizer steps so far, this one included."""
    samples: tuple[SampleId, ...]
    num_tokens: int
    """Completion tokens of the samples."""
    loss: float | None
    """Loss of the step; None: it is not finite."""

    @classmethod
    def of(cls, event: Stepped) -> "OptimizerStep":
        stats = event.stats
        return cls(event.start_s, event.end_s, stats.num_steps, stats.samples, stats.num_tokens, stats.loss)


class EssTaken(Moment, frozen=True):
    """A schedule asked for the effective sample size of groups that it may train next."""

    ess: float


class Spent(Moment, frozen=True):
    """Cost of the run so far, over all its processes (ledger/prices.py). Only a run with prices emits it: at
    its beginning, before a `Stepped`, before a `RoundEnded`, and at its end."""

    cost: float


class Published(Interval, frozen=True):
    """A new version of the weights was published."""

    version: int
    changed_weights: float | None = None
    """Share of the weights whose bfloat16 value is not that of the version before; None in a simulation."""
    kv: KV = "keep"
    """Whether engines keep or recompute the KV cache of requests in flight."""


class WeightsProbed(Interval, frozen=True):
    """An engine answered the probe of a publication that it had loaded; `arrival` says how."""

    engine: str
    arrival: Arrival


class RoundEnded(Moment, frozen=True):
    """All steps of a round are done and its weights are published."""

    round: int


class BooksClosed(Moment, frozen=True):
    """The run is over. The counts are what it drew and generated and neither trained nor gave up."""

    num_parked_groups: int
    num_parked_tokens: int
    num_drafted_tokens: int = 0
    """Tokens that could not be trained as they are (`Group.is_drafted`); not among the parked ones."""


class EvaluatedSample(msgspec.Struct, frozen=True):
    """One held-out sample of an evaluation, with its reward."""

    id: SampleId
    prompt: str
    text: str
    reward: float
    """0 where the reward failed."""
    failure: str | None
    finish_reason: FinishReason | None
    num_tokens: int
    source: str = ""
    columns: dict[str, object] = {}
    """`Prompt.shown_columns`."""
    asked: str = ""
    """`Prompt.asked`."""

    @classmethod
    def of(cls, sample: Sample, reward: float, failure: str | None = None) -> "EvaluatedSample":
        return cls(
            id=sample.id,
            prompt=sample.prompt.text,
            text=sample.text,
            reward=reward,
            failure=failure or ("reward timeout" if sample.timed_out else None),
            finish_reason=sample.finish_reason,
            num_tokens=sample.num_tokens,
            source=sample.prompt.source,
            columns=sample.prompt.shown_columns,
            asked=sample.prompt.asked,
        )


class Evaluated(Moment, frozen=True):
    """Held-out prompts were sampled and scored."""

    round: int
    """The round that is about to start."""
    num_samples: int
    reward: float = msgspec.field(name="accuracy")
    """Mean over the samples. Files have it under the name of earlier releases."""
    mean_tokens: float
    samples: tuple[EvaluatedSample, ...] = ()
    sets: dict[str, float] = {}
    """avg@n and pass@k of each named data source, for instance `gsm8k/pass@4`; of `all` where a prompt has
    several samples."""
    version: int | None = None
    """Version of the weights, and the optimizer steps when it was published. None: a log of an earlier
    release."""
    step: int | None = None
    solved: float | None = None
    """Share of the samples whose reward is at least `run.eval_solved_at`. None: a log of an earlier
    release."""


class Saved(Moment, frozen=True):
    """A checkpoint is complete. It began before a round, or in it."""

    round: int
    path: str
    version: int
    num_drawn: int
    """Prompts drawn so far, which is also the index of the next one."""
    duration_s: float = 0.0
    """Seconds since it began; 0 in a log of an earlier version."""


class Waiting(Moment, frozen=True):
    """There was no optimizer step for a long time."""

    quiet_s: float
    what: str
    """Event or object that each waiting task waits for."""


class OpenWaits(Moment, frozen=True):
    """Open waits of a live run's tasks. Only the run log has it."""

    since_s: dict[str, float]
    """Start of the wait, by what is awaited."""


class EngineStateChanged(Moment, frozen=True):
    """An engine opened, fell asleep or died."""

    engine: str
    state: str
    why: str


class Preempted(Moment, frozen=True):
    """An engine preempted requests since the last optimizer step, because its KV cache was full."""

    engine: str
    num_requests: int


class ControllerLag(Moment, frozen=True):
    """The controller's event loop ran a timer, later than it was due."""

    lag_s: float


Event = Moment | Interval | Stepped | Row
"""Everything that a sink receives. The rows are measured from the other events by `steps.StepMeter`."""

LoggedEvent: TypeAlias = (
    RunStarted
    | RoundStarted
    | RequestStarted
    | RequestEnded
    | Decoded
    | SampleScored
    | ReferenceScored
    | GroupReady
    | StagesFilled
    | GroupEnded
    | TokensWasted
    | RowSkipped
    | Accumulated
    | OptimizerStep
    | Published
    | WeightsProbed
    | RoundEnded
    | BooksClosed
    | Evaluated
    | Saved
    | Waiting
    | OpenWaits
    | EngineStateChanged
    | Preempted
    | ControllerLag
)
"""Events in the run log. Rows, costs and effective sample sizes are in metrics.jsonl only."""


def logged(event: Event) -> LoggedEvent | None:
    """The event as the run log has it; None if it has none of this type."""
    match event:
        case Stepped():
            return OptimizerStep.of(event)
        case Evaluated(samples=(_, *_)):
            return msgspec.structs.replace(event, samples=())  # they are in samples/eval
        case _:
            return event if isinstance(event, LoggedEvent) else None


def time_of(event: Event) -> float:
    """Return the time of an event; for an interval, its end."""
    if isinstance(event, dict):
        return event["round/end_s"] if "round/time_s" in event else event["time"]
    return event.end_s if isinstance(event, Interval | Stepped) else event.time_s


class Sink(Protocol):
    """Reads events as they happen."""

    def on(self, event: Event) -> None: ...

    def close(self) -> None:
        """The run ended, with or without an error."""


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
