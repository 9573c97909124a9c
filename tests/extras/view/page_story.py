"""Run folders made by hand."""

import shutil
from pathlib import Path

from helpers.record_story import Story, pipelined_round, play
from tailrace.record.events import Event, Sink, time_of
from tailrace.record.metrics import MetricsWriter
from tailrace.record.run_log import LogWriter
from tailrace.record.samples import SamplesWriter


def sinks_of(folder: Path) -> list[Sink]:
    folder.mkdir(parents=True, exist_ok=True)
    return [
        MetricsWriter(folder / "metrics.jsonl"),
        SamplesWriter(folder / "samples", token_samples=16),
        LogWriter(folder / "events.jsonl"),
    ]


def write_run(folder: Path, story: Story | None = None) -> Path:
    """The round of `record_story.pipelined_round` as the files of a run."""
    play((story or pipelined_round()).events, *sinks_of(folder))
    return folder


def write_killed_run(folder: Path, events: list[Event]) -> Path:
    """The files of a run that was killed after some events."""
    begun = folder.with_name(folder.name + "-begun")
    sinks = sinks_of(begun)
    play(events, *sinks, close=False)
    shutil.copytree(begun, folder)
    for sink in sinks:
        sink.close()
    return folder


def until(time_s: float) -> list[Event]:
    """What happens in the round up to a time."""
    return [event for event in pipelined_round().events if time_of(event) <= time_s]
