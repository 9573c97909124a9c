"""`tailrace train`: one live run, and everything about it in its output directory.

config.toml      resolved: every default written out
metrics.jsonl    one object an optimizer step
summary.json     what came of it
samples/         what was trained on, a file a round
trace.json       for Perfetto: a lane an engine slot, a lane the trainer
timeline.png     the same at one glance
checkpoints/     round_000010/: a Hugging Face folder, the optimizer, and where the run stood
logs/            what the worker processes printed
"""

from pathlib import Path

from rich.console import Console

from tailrace import clock
from tailrace.commands.live import check_live, live_materialise, open_parts, rewind
from tailrace.config import RunConfig
from tailrace.errors import CheckpointError, ConfigError
from tailrace.ledger.state import RunState
from tailrace.record.display import open_display
from tailrace.record.events import FromRound, Recorder
from tailrace.record.metrics import MetricsWriter, read_rows
from tailrace.record.samples import SamplesWriter
from tailrace.record.summary import RunSummary, Summary
from tailrace.record.timeline import Timeline, draw
from tailrace.record.trace import TraceWriter
from tailrace.run import drive
from tailrace.schedules.resolve import BoundSchedule, resolve

CONFIG_FILE = "config.toml"
PICTURED_ROUNDS = 3
"""The last rounds, in timeline.png; trace.json has them all."""


def train(config: RunConfig, folder: Path, *, resume: bool = False, dry_run: bool = False) -> None:
    """Train to the last round, from the start or from the last checkpoint.

    Raises:
        ConfigError: the config cannot work, or the folder is used and `resume` was not asked for.
        CheckpointError: the checkpoint cannot be resumed with this config.
        TailraceError: whatever ended the run.
    """
    schedule = resolve(config)
    check_live(config)
    if dry_run:
        Console().print(config.toml(), highlight=False, markup=False)
        return
    checkpoint = _last_checkpoint(folder) if resume else None
    if not resume and (folder / CONFIG_FILE).exists():
        raise ConfigError(
            "--output-dir", str(folder), "it holds a run already", "add --resume, or choose another"
        )
    state = RunState.load(checkpoint, config.digest()) if checkpoint else RunState(config.digest())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config.toml())
    clock.run(_train(config, schedule, folder, checkpoint, state), virtual=False)


async def _train(
    config: RunConfig, schedule: BoundSchedule, folder: Path, checkpoint: Path | None, state: RunState
) -> None:
    timeline, metrics = Timeline(), folder / "metrics.jsonl"
    summary = Summary(folder / "summary.json", earlier=read_rows(metrics, before_round=state.round))
    recorder = Recorder(
        MetricsWriter(metrics, first_round=state.round),
        SamplesWriter(folder / "samples", first_round=state.round),
        TraceWriter(folder / "trace.json"),
        FromRound(config.run.rounds - PICTURED_ROUNDS, timeline),
        summary,
        open_display(rounds=config.run.rounds, waits=clock.who_waits),
    )
    async with open_parts(config, folder) as parts:
        if checkpoint:
            await rewind(parts, checkpoint, state.version)
        checkpoints = folder / "checkpoints"
        materialise = live_materialise(config)
        await drive(
            schedule, parts, config.run, recorder, materialise=materialise, folder=checkpoints, state=state
        )
    draw({str(config.schedule["name"]): timeline}, folder / "timeline.png")
    _report(summary.summary(), folder)


def _report(summary: RunSummary, folder: Path) -> None:
    console = Console()
    if summary.eval:
        first, last = summary.eval.first, summary.eval.last
        console.print(f"held-out accuracy {first:.3f} -> {last:.3f} in {summary.steps} steps")
    console.print(f"timeline  {folder / 'timeline.png'}")
    console.print(f"trace     {folder / 'trace.json'}  (open it at ui.perfetto.dev)")
    console.print(f"model     {folder / 'checkpoints'}")


def _last_checkpoint(folder: Path) -> Path:
    checkpoints = sorted((folder / "checkpoints").glob("round_??????"))
    if not checkpoints:
        raise CheckpointError(f"{folder / 'checkpoints'} holds no checkpoint; start without --resume")
    return checkpoints[-1]
