"""A run from its first round to its closed ledger."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tailrace.algo.compute_advantages import GRPO
from tailrace.controller.base import Parts, RunSettings
from tailrace.controller.run import Run
from tailrace.errors import first_cause
from tailrace.ledger.journal import Journal, NullJournal
from tailrace.ledger.recovery import StartingPoint
from tailrace.record.events import Recorder
from tailrace.rollout.pool import ComputeAdvantages


async def execute(
    schedule: Callable[[Run], Coroutine[Any, Any, None]],
    parts: Parts,
    settings: RunSettings,
    recorder: Recorder,
    *,
    compute_advantages: ComputeAdvantages = GRPO,
    folder: Path | None = None,
    starting_point: StartingPoint | None = None,
    journal: Journal | NullJournal | None = None,
) -> None:
    """Run a schedule to its end and check the ledger. The first error of any task ends the run.

    Args:
        compute_advantages: sets the advantages of a complete group, or returns why it is filtered.
        folder: where checkpoints go; None: none are written.
        starting_point: what earlier processes of this run left.
        journal: writes the ledger down; None: it stays in memory.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            beginning = starting_point or StartingPoint()
            journal = journal or NullJournal()
            run = Run(parts, settings, recorder, tasks, compute_advantages, folder, beginning, journal)
            try:
                await schedule(run)
                await run.finish()
            finally:
                run.shut()
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    finally:
        recorder.close()
