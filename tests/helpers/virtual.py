"""Running schedules in virtual time, for tests: a small world, and everything that happened in it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from signal import SIGINT
from typing import Any, NamedTuple, TypeVar

from helpers.memory_store import MemoryStore, commit_at_once
from tailrace import clock
from tailrace.algo.advantages import ComputeAdvantages
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import config_of
from tailrace.contracts.engine import Usage
from tailrace.contracts.sampling import SamplingSettings
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.execution import RunResult, execute
from tailrace.controller.interruption import Interruption
from tailrace.controller.run import Run
from tailrace.drivers.assembly.schedule import steps_of_a_round
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.ledger.base import RunRow, Transaction
from tailrace.ledger.journal import Journal, StartCommit
from tailrace.ledger.ledger import Totals
from tailrace.ledger.recovery import StartingPoint, first_life, next_life
from tailrace.ledger.store import Store, read_ledger
from tailrace.record.events import Event, Recorder, RequestEnded, RequestStarted, Stepped
from tailrace.rollout.admission import AtMost, Frontier, FrontierFirst
from tailrace.rollout.placement import DISAGGREGATED, DeviceSharing
from tailrace.schedules import SCHEDULES
from tailrace.settings import Settings
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import (
    DEFAULT_MAX_TOKENS,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)
from tailrace.types import Sample, SampleId

E = TypeVar("E")
S = TypeVar("S", bound=Settings)

SETTINGS = RunSettings(rounds=3, group_size=4)

ZERO_VARIANCE = AlgorithmSettings(filter="zero_variance")

SIM = SimSettings(
    engines=SimEngineSettings(count=2, slots=24, versions=3),
    trainer=SimTrainerSettings(tokens_per_s=15_000.0, drift=0.5),
    lengths=SimLengthSettings(max_tokens=6000),
)
"""Two engines that one round of 16 groups of 4 overfills."""

EXACT = SimSettings(
    engines=SimEngineSettings(
        slots=1000, base_s=1.0, slope_s=0.0, prefill_tokens_per_s=1e30, abort_s=0.0, load_s=0.0, versions=3
    ),
    trainer=SimTrainerSettings(tokens_per_s=1.0, step_s=0.0, drift=0.5),
    lengths=SimLengthSettings(median_tokens=10, sigma=0.0, prompt_tokens=1),
    rewards=SimRewardSettings(workers=1000, median_s=0.0),
)
"""A world for sums by hand: a token is a second whatever runs beside it, a trained position is a second,
all responses have 10 tokens and all else takes no time."""

SCHEDULES_BY_NAME: dict[str, Callable[[Run], Awaitable[None]]] = {
    "serial": partial(SCHEDULES["serial"], groups_per_round=16, groups_per_step=8),
    "rolloutpipe": partial(SCHEDULES["rolloutpipe"], groups_per_round=16, groups_per_step=4),
    "rolloutpipe_frontier": partial(
        SCHEDULES["rolloutpipe"], groups_per_round=16, groups_per_step=4, admission=Frontier(groups=3)
    ),
    "rolloutpipe_frontier_first": partial(
        SCHEDULES["rolloutpipe"], groups_per_round=16, groups_per_step=4, admission=FrontierFirst(groups=3)
    ),
    "rolloutpipe_at_most": partial(
        SCHEDULES["rolloutpipe"],
        groups_per_round=16,
        groups_per_step=4,
        admission=AtMost(requests_per_engine=5),
    ),
    "rolloutpipe_eager": partial(
        SCHEDULES["rolloutpipe_eager"], groups_per_round=16, groups_per_step=4, max_tokens_per_batch=20_000
    ),
    "april": partial(SCHEDULES["april"], groups_per_round=8, groups_launched=16),
    "april_dapo": partial(SCHEDULES["april_dapo"], groups_per_round=8, groups_per_draw=12),
    "april_bounded": partial(SCHEDULES["april"], groups_per_round=8, groups_launched=16, staleness=2),
    "tailbatch": partial(SCHEDULES["tailbatch"], groups_per_round=8),
    "tailbatch_prompts": partial(SCHEDULES["tailbatch"], groups_per_round=8, response_speculation=1.0),
    "tailbatch_dapo": partial(SCHEDULES["tailbatch_dapo"], groups_per_round=8, requests_per_engine=22),
    "tailbatch_async": partial(SCHEDULES["tailbatch_async"], groups_per_round=8),
    "rollpacker": partial(SCHEDULES["rollpacker"], groups_per_round=8),
    "conventional": partial(SCHEDULES["conventional"], groups_per_step=4, steps_per_round=4),
    "pipelinerl": partial(
        SCHEDULES["pipelinerl"], groups_per_step=8, in_flight_per_engine=20, ring_groups=16
    ),
    "pipelinerl_hold": partial(
        SCHEDULES["pipelinerl"],
        groups_per_step=8,
        in_flight_per_engine=20,
        ring_groups=16,
        ring_full="block",
        kv="recompute",
    ),
    "pipelinerl_ess": partial(
        SCHEDULES["pipelinerl"], groups_per_step=8, in_flight_per_engine=20, ring_groups=24, min_ess=0.8
    ),
    "pipelinerl_masked": partial(
        SCHEDULES["pipelinerl"], groups_per_step=8, in_flight_per_engine=24, ring_groups=16, staleness=1
    ),
    "one_step_off": partial(SCHEDULES["one_step_off"], groups_per_round=8, groups_per_step=4),
    "periodic_asynchrony": partial(SCHEDULES["periodic_asynchrony"], groups_per_round=8),
    "streamrl": partial(SCHEDULES["streamrl"], groups_per_round=14),
    "streamrl_async": partial(SCHEDULES["streamrl_async"], groups_per_round=8),
    "seer": partial(SCHEDULES["seer"], groups_per_round=14, groups_per_step=7),
    "sortedrl": partial(SCHEDULES["sortedrl"], groups_per_round=16, groups_per_step=8),
    "sortedrl_on_policy": partial(SCHEDULES["sortedrl_on_policy"], groups_per_round=16, groups_per_step=8),
    "bubblespec": partial(SCHEDULES["bubblespec"], groups_per_round=16, groups_per_step=8),
    "windowed_fifo": partial(SCHEDULES["windowed_fifo"], groups_per_step=8, groups_in_flight=20, window=6),
    "dora": partial(SCHEDULES["dora"], groups_per_step=8, groups_in_flight=16, staleness=2),
    "laminar": partial(SCHEDULES["laminar"], groups_per_step=8, groups_in_flight=16, staleness=2),
    "laminar_unbounded": partial(SCHEDULES["laminar"], groups_per_step=8, groups_in_flight=16),
    "trl_async": partial(SCHEDULES["trl_async"], groups_per_step=8, groups_in_flight=16, staleness=2),
    "tinker_async": partial(SCHEDULES["tinker_async"], groups_per_step=8, steps_off_policy=1),
    "tailrace": partial(SCHEDULES["tailrace"], groups_per_step=8, groups_in_flight=16, staleness=2),
    "tailrace_masked": partial(
        SCHEDULES["tailrace"], groups_per_step=8, groups_in_flight=24, staleness=1, stale="mask"
    ),
    "tailrace_on_policy": partial(SCHEDULES["tailrace_on_policy"], groups_per_round=8, rounds_sorted=3),
}
"""Every schedule of the package, with parameters for the small world."""

FLUSHING = (
    "tailbatch",
    "tailbatch_prompts",
    "tailbatch_dapo",
    "tailbatch_async",
    "rollpacker",
    "sortedrl",
    "sortedrl_on_policy",
    "tailrace_on_policy",
)
"""Those that bring what is parked to its end in rounds beyond the last."""

NEVER_STOP = (
    "pipelinerl",
    "pipelinerl_hold",
    "pipelinerl_ess",
    "pipelinerl_masked",
    "one_step_off",
    "streamrl_async",
    "windowed_fifo",
    "dora",
    "laminar",
    "laminar_unbounded",
    "trl_async",
    "tinker_async",
    "tailrace",
    "tailrace_masked",
)
"""Those that generate while they publish: their trainer needs devices of its own."""

PINNED = ("dora", "laminar", "trl_async")
"""Those whose samples have one version each."""

MASKED = ("pipelinerl_masked", "tailrace_masked")
"""Those that train a sample when it ends and mask its tokens that are older than one publication."""

ON_POLICY = (
    "serial",
    "rolloutpipe",
    "rolloutpipe_frontier",
    "rolloutpipe_frontier_first",
    "rolloutpipe_at_most",
    "rolloutpipe_eager",
    "tailbatch",
    "tailbatch_prompts",
    "tailbatch_dapo",
    "rollpacker",
    "conventional",
    "periodic_asynchrony",
    "streamrl",
    "seer",
    "sortedrl_on_policy",
    "bubblespec",
    "tailrace_on_policy",
)


@dataclass
class Outcome:
    """What a simulated run did. Also the sink that writes it down."""

    events: list[Event] = field(default_factory=list)
    run: Run = field(init=False)
    parts: RunComponents = field(init=False)
    ended_s: float = field(init=False)
    usages: list[Usage] = field(default_factory=list)
    """Of the engines, at the end."""
    killed: bool = False
    ended: RunResult = field(init=False)

    def on(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.ended_s = clock.now()
        self.usages = [engine.usage() for engine in self.parts.engines]

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def trace(self) -> list[str]:
        return [repr(event) for event in self.events]

    @property
    def trained(self) -> list[int]:
        """The prompt of each trained group, in the order of training."""
        prompts = [sample.prompt.index for step in self.of(Stepped) for sample in step.samples]
        return list(dict.fromkeys(prompts))

    @property
    def totals(self) -> Totals:
        return self.run._ledger.totals


@dataclass
class Book:
    """What outlives a killed run: the store, and the engines' own count."""

    store: Store = field(default_factory=MemoryStore)
    num_generated: int = 0
    commit_s: float = 0.0
    """How long a commit takes; a kill meanwhile loses it."""
    flush_s: float = 1.0

    def starting_point(self, parts: RunComponents, checkpoints: Path, seed: int) -> StartingPoint:
        if not self.store.rows(RunRow):
            return first_life()
        return next_life(
            read_ledger(self.store),
            checkpoints=checkpoints,
            num_generated=self.num_generated,
            prompt_of=parts.prompts.__getitem__,
            seed=seed,
        )

    def open(self, starting_point: StartingPoint) -> Journal:
        self.store.commit(starting_point.opening)
        start_commit: StartCommit = (
            self._commit_slowly if self.commit_s else partial(commit_at_once, self.store)
        )
        return Journal(start_commit, starting_point, flush_s=self.flush_s)

    def _commit_slowly(self, cut: Transaction) -> asyncio.Future[None]:
        """What a thread does, in virtual time."""

        async def commit() -> None:
            await asyncio.sleep(self.commit_s)
            self.store.commit(cut)

        return asyncio.ensure_future(commit())


Beside = Callable[[RunComponents, Run], Coroutine[Any, Any, None]]


class Death(NamedTuple):
    """An engine dies at a moment and is back some time later."""

    at_s: float
    engine: int
    down_s: float


def dying(*deaths: Death) -> Beside:
    """Engines that die and come back with the weights of the day."""

    async def one(death: Death, parts: RunComponents, run: Run) -> None:
        await asyncio.sleep(death.at_s)
        engine = parts.engines[death.engine]
        assert isinstance(engine, SimEngine)
        if engine.state != "open":
            return
        engine.die()
        await asyncio.sleep(death.down_s)
        engine.revive()

    async def all_of_them(parts: RunComponents, run: Run) -> None:
        await asyncio.gather(*(one(death, parts, run) for death in deaths))

    return all_of_them


def regenerated(events: list[Event], *, verifies: bool = False) -> list[RequestStarted]:
    """Requests that did not go on from the last token of their sample, or whose sample had ended and is not
    verified."""
    known: dict[SampleId, int] = {}
    wrong = []
    for event in events:
        if isinstance(event, RequestStarted) and event.num_tokens != known.get(
            event.sample, event.num_tokens
        ):
            wrong.append(event)
        elif isinstance(event, RequestEnded):
            ended = event.outcome in ("stop", "length") and not verifies
            known[event.sample] = -1 if ended else event.num_tokens
    return wrong


async def reporting(parts: RunComponents, run: Run) -> None:
    """Engines that bring their samples up to date, as live ones do."""
    while True:
        await asyncio.sleep(0.1)
        for engine in parts.engines:
            assert isinstance(engine, SimEngine)
            engine.report()


def beside_each_other(*all_of_them: Beside) -> Beside:
    async def together(parts: RunComponents, run: Run) -> None:
        await asyncio.gather(*(one(parts, run) for one in all_of_them))

    return together


def simulate(
    schedule: Callable[[Run], Awaitable[None]],
    settings: RunSettings = SETTINGS,
    sim: SimSettings = SIM,
    *,
    folder: Path | None = None,
    book: Book | None = None,
    kill_at_s: float | None = None,
    interrupt_at_s: float | None = None,
    beside: Beside | None = None,
    parts: Callable[[], RunComponents] | None = None,
    algorithm: AlgorithmSettings | None = None,
    sharing: DeviceSharing = DISAGGREGATED,
    into: Outcome | None = None,
) -> Outcome:
    """Run a schedule in virtual time to its end, or to a moment at which it is killed or interrupted.

    folder: for checkpoints. book: what is written down, and gone on from if there is something. beside: runs
    next to the schedule, and does what the world does to it. parts: others than the simulated ones. sharing:
    the placement; elastic has two replicas of the trainer. into: what to fill, for a run that ends with an
    error.
    """
    outcome = into or Outcome()
    steps_per_round = steps_of_round(schedule) if book and book.store.rows(RunRow) else None
    algorithm = algorithm or AlgorithmSettings()
    sampling = SamplingSettings(max_completion_tokens=sim.lengths.max_tokens or DEFAULT_MAX_TOKENS)
    compute_advantages = ComputeAdvantages(algorithm, sampling)

    async def main() -> None:
        reference = algorithm.needs_reference
        replicas = 2 if sharing.kind == "elastic" else 1
        outcome.parts = simulated_parts(
            sim, settings.seed, reference=reference, replicas=replicas, sharing=sharing
        )
        outcome.parts = replace(parts() if parts else outcome.parts, sharing=sharing)
        starting_point, journal = StartingPoint(), None
        if book and folder:
            starting_point = book.starting_point(outcome.parts, folder, settings.seed)
            starting_point.steps_per_round = steps_per_round
            base = starting_point.base
            if base.checkpoint:
                await rewind(outcome.parts, folder / base.checkpoint, base.version)
            journal = book.open(starting_point)

        begun = asyncio.get_running_loop().create_future()

        async def watched(run: Run) -> None:
            outcome.run = run
            if not begun.done():  # it begins again after a round that was cut
                begun.set_result(run)
            await schedule(run)

        async def world(beside: Beside) -> None:
            """Until the books are closed."""
            await beside(outcome.parts, await begun)

        interruption = Interruption()
        if interrupt_at_s is not None:
            asyncio.get_running_loop().call_at(interrupt_at_s, interruption.request, SIGINT)
        try:
            async with asyncio.timeout(kill_at_s):
                outcome.ended = await execute(
                    watched,
                    outcome.parts,
                    settings,
                    Recorder(outcome),
                    compute_advantages=compute_advantages,
                    folder=folder,
                    starting_point=starting_point,
                    journal=journal,
                    interruption=interruption,
                    beside=[world(beside)] if beside else [],
                )
        except TimeoutError:
            outcome.killed = True
        if book:
            book.num_generated += sum(usage.num_generated for usage in outcome.usages)

    clock.run(main(), virtual=True)
    return outcome


@cache
def steps_of_round(schedule: Any) -> int | None:
    """What a resumed run knows of its schedule."""
    run = {"rounds": 2, "group_size": SETTINGS.group_size}
    sim = {"engines": {"count": SIM.engines.count, "versions": SIM.engines.versions}}
    bound = schedule if isinstance(schedule, partial) else partial(schedule)
    return steps_of_a_round(config_of({"run": run, "schedule": {"name": "serial"}, "sim": sim}), bound)


async def rewind(parts: RunComponents, checkpoint: Path, version: int) -> None:
    """What a resumed run does first: the trainer from the checkpoint, its weights to the engines."""
    await parts.trainer.restore(checkpoint)
    weights = await parts.trainer.publish(version)
    for engine in parts.engines:
        await engine.load(weights, kv="keep")


def worlds(
    sim: SimSettings,
    length_of: Callable[[Sample], int],
    count: int = 1,
    replicas: int = 1,
    sharing: DeviceSharing = DISAGGREGATED,
) -> Callable[[], RunComponents]:
    """Parts whose responses have the lengths of a table."""

    def parts() -> RunComponents:
        engines = [SimEngine(f"engine-{number}", sim.engines, length_of) for number in range(count)]
        return replace(simulated_parts(sim, seed=0, replicas=replicas, sharing=sharing), engines=engines)

    return parts


def change(settings: S, **changes: Any) -> S:
    """The same settings, but for these, checked."""
    return type(settings).model_validate({**settings.model_dump(), **changes})


def in_service(events: list[Event]) -> list[list[SampleId]]:
    """Who is on an engine after each event that changes it."""
    serving: list[SampleId] = []
    history = []
    for event in events:
        if isinstance(event, RequestStarted):
            serving.append(event.sample)
        elif isinstance(event, RequestEnded):
            serving.remove(event.sample)
        else:
            continue
        history.append(list(serving))
    return history
