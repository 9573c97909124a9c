"""A run from its first round to its closed ledger."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tailrace.algo.advantages import GRPO, ComputeAdvantages
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.checkpoints import Checkpoints, Evaluations
from tailrace.controller.cost import Cost
from tailrace.controller.interruption import Interruption
from tailrace.controller.run import PromptSource, Run, RunParts, WeightUpdate
from tailrace.controller.state import RunState
from tailrace.controller.watchdog import Watchdog
from tailrace.errors import first_cause
from tailrace.ledger.ledger import Ledger, NullJournal
from tailrace.ledger.recovery import StartingPoint
from tailrace.record.events import Recorder
from tailrace.rollout.difficulty import DifficultyPools
from tailrace.rollout.history import MAX_TOKENS, History, saved_responses
from tailrace.rollout.placement import make_placement
from tailrace.rollout.pool import PartialRolloutBuffer, Pool
from tailrace.rollout.rewards import SynchronousRewards, chain_of_rewards
from tailrace.rollout.router import Router


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run that no error ended."""

    interrupted: bool
    """An interruption was requested, or the budget was spent, before the schedule had ended."""
    checkpoint: Path | None
    """The newest checkpoint, which has all optimizer steps; None: there was no step, or no folder."""


async def execute(
    schedule: Callable[[Run], Coroutine[Any, Any, None]],
    parts: RunComponents,
    settings: RunSettings,
    recorder: Recorder,
    *,
    compute_advantages: ComputeAdvantages = GRPO,
    folder: Path | None = None,
    starting_point: StartingPoint | None = None,
    journal: NullJournal | None = None,
    interruption: Interruption | None = None,
    beside: Sequence[Coroutine[Any, Any, None]] = (),
) -> RunResult:
    """Run a schedule to its end and check the ledger. The first error of any task or callback ends the run.

    Args:
        compute_advantages: sets the advantages of a complete group, or returns why it is filtered.
        folder: where checkpoints go; None: none are written.
        starting_point: what earlier processes of this run left.
        journal: writes the ledger down; None: it stays in memory.
        interruption: ends the run before its last round, with a checkpoint. So does a spent budget.
        beside: more tasks of the run; they are cancelled at its end.
    """
    interruption = interruption or Interruption()
    loop, errors = asyncio.get_running_loop(), asyncio.Queue[Exception]()
    loop.set_exception_handler(partial(_take_error, errors))
    try:
        async with asyncio.TaskGroup() as tasks:
            start, journal = starting_point or StartingPoint(), journal or NullJournal()
            others = [tasks.create_task(each) for each in (_raise_first(errors), *beside)]
            common = (settings, recorder, tasks, compute_advantages, journal, interruption)
            run = Run(joined(parts, *common, folder=folder, start=start), start)
            try:
                interrupted = await _interrupted(schedule(run), interruption)
                while interrupted and interruption.is_complete:
                    await run.complete_round()
                    interrupted = await _interrupted(schedule(run), interruption)
                await (run.interrupt() if interrupted else run.finish())
            finally:
                run.shut()
                for each in others:
                    each.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    finally:
        loop.set_exception_handler(None)
        recorder.close()
    return RunResult(interrupted, run.checkpoints.newest)


def joined(
    components: RunComponents,
    settings: RunSettings,
    recorder: Recorder,
    tasks: asyncio.TaskGroup,
    compute_advantages: ComputeAdvantages,
    journal: NullJournal,
    interruption: Interruption,
    *,
    folder: Path | None,
    start: StartingPoint,
) -> RunParts:
    """Join the components of a run, in the state that earlier processes left it. Arguments: as `execute`."""
    engines, trainer = components.engines, components.trainer
    state, ledger = RunState(start), Ledger(recorder, start.totals, journal)
    journal.follow(ledger)
    for engine in engines:
        engine.on_arrival = partial(ledger.probe, engine.name)
    components.anchors.restore(start.base.anchors)
    max_tokens = MAX_TOKENS if any(engine.capabilities.references for engine in engines) else 0
    responses: dict[int, list[list[int]]] = {}
    if max_tokens and folder and start.base.checkpoint:
        responses = saved_responses(folder / start.base.checkpoint)
    history = History(start.base.longest, responses, max_tokens)
    parked, prompts = PartialRolloutBuffer(start.partial_rollouts), components.prompts
    pools = DifficultyPools(components.pools, settings.seed, start.rewards, prompts.__getitem__)
    ledger.on_end = pools.observe
    prompt_source = PromptSource(prompts, pools, settings, ledger, recorder)
    prompt_source.recall([*start.partial_rollouts, *start.interrupted])
    router = Router(engines, recorder, components.run_episode, journal.written, state.version)
    cost = Cost(components.prices, ledger, router, recorder, start)
    rewards = chain_of_rewards(
        components.rewards,
        max_failures=components.max_failures,
        reference=components.reference,
        recorder=recorder,
    )
    pool = Pool(
        *(tasks, router, rewards, ledger, parked, recorder, history, compute_advantages),
        another=prompt_source.another,
        deadline_s=settings.groups.deadline_s,
    )
    if components.synchronous_rewards:
        pool.rewards = SynchronousRewards(rewards, pool)
    update = WeightUpdate(tasks, router, pool.ages)
    placement = make_placement(components.sharing, engines, trainer, pool, tasks)
    checkpoints = Checkpoints(
        *(components, settings, ledger, journal, recorder, tasks, placement, state, history),
        folder=folder,
        start=start,
    )
    evaluations = Evaluations(
        *(components, settings, router, ledger, recorder, checkpoints, update.arrived, state, tasks)
    )
    if settings.eval_beside:
        router.versions.kept = min(engine.versions for engine in engines)
    return RunParts(
        components,
        settings,
        recorder,
        tasks,
        compute_advantages,
        journal,
        interruption,
        state,
        ledger,
        history,
        parked,
        prompt_source,
        router,
        cost,
        pool,
        update,
        placement,
        checkpoints,
        evaluations,
        Watchdog(recorder, settings.step_warning_timeout_s, settings.step_timeout_s),
    )


def _take_error(
    errors: asyncio.Queue[Exception], loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """Keep what a callback raises. asyncio would only log it, and the run would wait for ever."""
    if "handle" in context:
        errors.put_nowait(context["exception"])
    else:
        loop.default_exception_handler(context)


async def _raise_first(errors: asyncio.Queue[Exception]) -> None:
    raise await errors.get()


async def _interrupted(schedule: Coroutine[Any, Any, None], interruption: Interruption) -> bool:
    """Run a schedule to its end or to an interruption. Returns whether it was interrupted."""
    interruption.begin()
    task, has_ended = asyncio.current_task(), False
    try:
        await schedule
        has_ended = True
        if task and task.cancelling():  # at the end of the last protected part: it must not end what follows
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        is_wanted = interruption.is_complete or interruption.reason or interruption.signal is not None
        if not is_wanted or task is None or task.uncancel():
            raise  # another task of the run has failed
        return not has_ended
    finally:
        interruption.end()
    return False
