"""Running a paper's schedule on its set-up in virtual time."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace import clock
from tailrace.algo.compute_advantages import GRPO
from tailrace.controller.base import Parts, RunSettings
from tailrace.controller.execution import execute
from tailrace.controller.run import Run
from tailrace.controller.simulation import simulated_parts
from tailrace.record.events import Event, Recorder, Sink
from tailrace.record.laps import Lap, LapMeter
from tailrace.record.rows import RoundRow, StepRow
from tailrace.record.steps import StepMeter
from tailrace.rollout.placement import DISAGGREGATED, Shared
from tailrace.rollout.pool import ComputeAdvantages
from tailrace.sim.settings import SimSettings

Schedule = Callable[[Run], Coroutine[Any, Any, None]]
"""A schedule with its parameters."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a run in virtual time gave.

    Args:
        steps: a row for each optimizer step, those of the warm-up included.
        rounds: a row for each round that trained, those of the warm-up included.
        lap: the figures of the rounds after the warm-up.
        seconds: virtual time from the start of the run to its end.
    """

    steps: Sequence[StepRow]
    rounds: Sequence[RoundRow]
    lap: Lap
    seconds: float


class _Rows:
    """Sink: keeps the rows of steps and rounds."""

    def __init__(self) -> None:
        self.steps: list[StepRow] = []
        self.rounds: list[RoundRow] = []

    def on(self, event: Event) -> None:
        match event:
            case StepRow():
                self.steps.append(event)
            case RoundRow():
                self.rounds.append(event)

    def close(self) -> None:
        """Rows are complete when they arrive."""


def simulate(
    schedule: Schedule,
    sim: SimSettings,
    settings: RunSettings,
    *,
    shared: Shared = DISAGGREGATED,
    replicas: int = 1,
    reference: bool = False,
    warm_up_rounds: int = 0,
    sinks: Sequence[Sink] = (),
    parts: Callable[[], Parts] | None = None,
    compute_advantages: ComputeAdvantages = GRPO,
) -> Simulated:
    """Run a schedule to its end in virtual time.

    Args:
        shared: whether engines and trainer have devices in common.
        replicas: replicas of the trainer.
        reference: whether the run has a reference model.
        warm_up_rounds: first rounds that the lap does not count.
        sinks: receive every event and row, too.
        parts: makes the parts inside the virtual loop, where a paper needs other ones than `sim` describes.
            `sim`, `shared`, `replicas` and `reference` are not used then.
        compute_advantages: as `execute`.
    """
    rows, laps = _Rows(), LapMeter(warm_up_rounds=warm_up_rounds)

    def own_parts() -> Parts:
        return simulated_parts(sim, settings.seed, reference=reference, replicas=replicas, shared=shared)

    async def run() -> float:
        made = (parts or own_parts)()
        meter = StepMeter(rows, laps, *sinks, wall_clock=clock.wall_time)
        recorder = Recorder(meter)
        await execute(schedule, made, settings, recorder, compute_advantages=compute_advantages)
        return clock.now()

    seconds = clock.run(run(), virtual=True)
    return Simulated(rows.steps, rows.rounds, laps.lap(), seconds)
