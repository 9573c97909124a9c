"""A simulated run: its parts, and the run of a schedule to its end in virtual time."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace import clock
from tailrace.algo.advantages import GRPO
from tailrace.controller.base import Parts, RunSettings
from tailrace.controller.execution import execute
from tailrace.controller.run import Run
from tailrace.data.base import Epochs
from tailrace.record.events import Recorder, Sink
from tailrace.record.figures import Row, rounds_of, steps_of
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary
from tailrace.reward.timeout import Anchors
from tailrace.rollout.placement import DISAGGREGATED, Shared
from tailrace.rollout.pool import ComputeAdvantages
from tailrace.sim.cluster import rates
from tailrace.sim.engine import SimEngine, let_die
from tailrace.sim.host import Host
from tailrace.sim.judge import SimJudges, forward_pass
from tailrace.sim.reference import SimReference
from tailrace.sim.reward import rewards_of
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, SimEngineSettings, SimSettings
from tailrace.sim.trainer import SimTrainer
from tailrace.sim.world import Lengths, SimPrompts

Schedule = Callable[[Run], Coroutine[Any, Any, None]]
"""A schedule with its parameters."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a run in virtual time gave.

    Args:
        steps: a row for each optimizer step, those of the warm-up included.
        rounds: a row for each round that trained, those of the warm-up included.
        lap: the figures of the rounds after the warm-up.
        over_bound: time of the whole run over its lower bound (record/bounds.py), minus 1.
        seconds: virtual time from the start of the run to its end.
    """

    steps: Sequence[Row]
    rounds: Sequence[Row]
    lap: Row
    over_bound: float
    seconds: float


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
    summary = Summary()

    def own_parts() -> Parts:
        return simulated_parts(sim, settings.seed, reference=reference, replicas=replicas, shared=shared)

    async def run() -> float:
        made = (parts or own_parts)()
        meter = StepMeter(summary, *sinks, wall_clock=clock.wall_time)
        recorder = Recorder(meter)
        await execute(schedule, made, settings, recorder, compute_advantages=compute_advantages)
        return clock.now()

    seconds = clock.run(run(), virtual=True)
    _, bound = summary.bounds[-1]
    over_bound = bound.run_time_s / bound.run_bound_s - 1.0 if bound.run_bound_s else 0.0
    lap = summary.lap(warm_up_rounds)
    return Simulated(steps_of(summary.rows), rounds_of(summary.rows), lap, over_bound, seconds)


def simulated_parts(
    settings: SimSettings,
    seed: int,
    *,
    reference: bool = False,
    replicas: int = 1,
    shared: Shared = DISAGGREGATED,
) -> Parts:
    """Engines, trainer and rewards that only take virtual time. Call it inside the virtual loop.

    Args:
        reference: whether the run has a reference model.
        replicas: replicas of the trainer, which divide its speed.
        shared: whether engines and trainer have devices in common.

    Raises:
        ConfigError: [sim.cluster] cannot work.
    """
    settings = rates(settings)
    lengths = Lengths(settings.lengths, seed)
    epochs = Epochs(settings.lengths.rows, seed) if settings.lengths.rows else None
    prompts = SimPrompts(settings.lengths.prompt_tokens, epochs)
    max_tokens = settings.lengths.max_tokens or DEFAULT_MAX_TOKENS
    hosts = _hosts(settings)
    engines = [
        _engine(f"engine-{number}", settings.engines, lengths, max_tokens, host)
        for number, host in enumerate(hosts)
    ]
    if settings.faults:
        for number, engine in enumerate(engines):
            let_die(engine, number, settings.faults, seed)
    anchors, judges, host = Anchors(), _judges(settings, hosts), None if settings.rewards.judge else hosts[0]
    return Parts(
        engines=engines,
        trainer=SimTrainer(settings.trainer, replicas, host),
        rewards=rewards_of(settings.rewards, seed, anchors, host, judges),
        prompts=prompts,
        held_out=prompts,
        reference=SimReference(settings.reference) if reference else None,
        shared=shared,
        anchors=anchors,
        synchronous_rewards=settings.rewards.synchronous,
    )


def _hosts(settings: SimSettings) -> list[Host | None]:
    """Return the host of each engine: one that all share, or the devices that each shares with judges."""
    count = settings.engines.count or 1
    if settings.host is None:
        return [None] * count
    return (
        [Host(settings.host) for _ in range(count)]
        if settings.rewards.judge
        else [Host(settings.host)] * count
    )


def _judges(settings: SimSettings, hosts: Sequence[Host | None]) -> SimJudges | None:
    if settings.rewards.judge is None or settings.cluster is None:
        return None
    size = settings.cluster.tensor_parallel
    return SimJudges(forward_pass(settings), [host for host in hosts for _ in range(size)])


def _engine(
    name: str, cost: SimEngineSettings, lengths: Lengths, max_tokens: int, host: Host | None
) -> SimEngine:
    engine = SimEngine(name, cost, lambda sample: lengths(sample, engine.version), max_tokens, host)
    return engine
