"""`tailrace simulate`: the same schedule in virtual time, on the set-up of the [sim] section."""

from dataclasses import fields
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column, Table

from tailrace import clock
from tailrace.algo.compute_advantages import ComputeAdvantages
from tailrace.config import RunConfig
from tailrace.controller.execution import execute
from tailrace.record.events import Recorder, Sink
from tailrace.record.summary import RunSummary, Summary
from tailrace.record.timeline import Timeline, draw
from tailrace.record.trace import TraceWriter
from tailrace.schedules.resolve import BoundSchedule, resolve
from tailrace.controller.simulation import simulated_parts


def simulate(config: RunConfig, *, folder: Path | None = None, json_path: Path | None = None) -> None:
    """Run the schedule on simulated parts; print what came of it.

    Raises:
        ConfigError: the schedule or its parameters cannot work.
    """
    schedule = resolve(config)
    timeline, summary = Timeline(), Summary()
    sinks: list[Sink] = [timeline, summary]
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        sinks.append(TraceWriter(folder / "trace.json"))
    seconds = clock.run(_simulate(config, schedule, Recorder(*sinks)), virtual=True)
    name = str(config.schedule["name"])
    Console().print(_table(name, seconds, summary.summary()))
    if folder:
        draw({name: timeline}, folder / "timeline.png")
    if json_path:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(summary.summary()), indent=2) + b"\n")


async def _simulate(config: RunConfig, schedule: BoundSchedule, recorder: Recorder) -> float:
    parts = simulated_parts(config.sim, config.run.seed, reference=config.algorithm.needs_reference)
    compute_advantages = ComputeAdvantages(config.algorithm, config.sim.lengths.max_tokens)
    await execute(schedule, parts, config.run, recorder, compute_advantages=compute_advantages)
    return clock.now()


def _table(name: str, seconds: float, summary: RunSummary) -> Table:
    """Medians over the rounds, in virtual seconds."""
    table = Table("figure", Column(name, justify="right"), title="virtual time, medians over rounds")
    table.add_row("whole run", f"{seconds:.1f} s, {summary.rounds} rounds, {summary.steps} steps")
    for figure in fields(summary.round):
        value = getattr(summary.round, figure.name)
        table.add_row(figure.name, "-" if value is None else f"{value:.3f}")
    table.add_row("tokens trained", f"{summary.tokens.trained}")
    for reason, tokens in summary.tokens.wasted.items():
        table.add_row(f"tokens wasted, {reason}", f"{tokens}")
    return table
