"""Schedules that serve several versions at a time, on two embedded engines. Every fourth group has long
responses."""

from contextlib import closing
from pathlib import Path

import pytest

from helpers.small_run import train_here, write_small_run
from tailrace.config import load_config
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.ledger.base import SampleRow
from tailrace.ledger.store import open_store, read_ledger
from tailrace.record.events import Event, Published, RequestEnded, RequestStarted, WeightsProbed
from tailrace.record.run_log import LogReader
from tailrace.types import SampleId

UNEVEN = """
from tailrace.schedules import SCHEDULES
from tailrace.types import SamplingParams


async def uneven(run, schedule: str):
    prompts = run.prompts

    def drawn(count):
        groups = prompts(count)
        for group in groups:
            for sample in group.samples:
                length = 3 if group.prompt.index % 4 else 400
                sample.sampling = SamplingParams(length, ignore_end_of_text=True)
        return groups

    run.prompts = drawn
    await SCHEDULES[schedule](run, groups_per_step=1, groups_in_flight=4, staleness=3)
"""
WORDS = [
    *("--engine.replicas", "2", "--engine.max_num_seqs", "4", "--run.rounds", "12", "--run.eval_every", "0"),
    *("--sampling.max_completion_tokens", "400"),
]
ADAPTERS = [
    *("--trainer.lora.rank", "4", "--trainer.lora.publish", "adapter", "--trainer.lora.versions", "4"),
    *("--trainer.learning_rate", "1e-2"),
]


def trained_by(name: str, folder: Path, *words: str) -> tuple[list[Event], dict[SampleId, SampleRow]]:
    """The events of a run of twelve rounds, and the trained samples by their ids in events."""
    config = write_small_run(folder)
    before, _, after = config.read_text().partition("[schedule]")
    (folder / "uneven.py").write_text(UNEVEN)
    section = f'[schedule]\nname = "uneven.py:uneven"\nschedule = "{name}"\n'
    config.write_text(before + section + after[after.index("[model]") :])
    assert train_here(config, *WORDS, *words) == 0
    events = [*LogReader(RunFolder(folder / "out").events).read()]
    assert sum(isinstance(event, Published) for event in events) == 12
    with closing(open_store(load_config(config).ledger, folder / "out", only_read=True)) as store:
        samples = read_ledger(store, tokens=False).samples
    trained = {id: each for id, each in samples.items() if each.fate == "trained"}
    assert len(trained) == 12 * 2
    assert {len(each.spans) for each in trained.values()} == {1}
    return events, trained


@pytest.mark.slow
def test_laminar_trains_samples_of_one_version_each(tmp_path: Path) -> None:
    """Two engines rarely serve an older version together, so that none may be emptied."""
    events, trained = trained_by("laminar", tmp_path)
    started = [event for event in events if isinstance(event, RequestStarted)]
    assert {event.sample for event in started} >= trained.keys()


def test_samples_move_and_each_has_one_version(tmp_path: Path) -> None:
    events, trained = trained_by("dora", tmp_path)
    moved = {event.sample for event in events if isinstance(event, RequestEnded) and event.outcome == "moved"}
    assert moved, "some had to leave their engine"
    assert moved & trained.keys(), "a sample that moved was trained"


@pytest.mark.slow
def test_an_engine_with_four_adapters_ends_a_sample_under_an_older_one(tmp_path: Path) -> None:
    events, trained = trained_by("trl_async", tmp_path, *ADAPTERS)
    loaded_s = {(e.engine, e.arrival.version): e.end_s for e in events if isinstance(e, WeightsProbed)}
    started_s = {e.sample: e.time_s for e in events if isinstance(e, RequestStarted)}
    overtaken = [
        event.sample
        for event in events
        if isinstance(event, RequestEnded) and event.outcome == "length" and event.sample in trained
        for newer in [loaded_s.get((event.engine, trained[event.sample].spans[0].version + 1), event.time_s)]
        if started_s[event.sample] < newer < event.time_s
    ]
    assert overtaken, "its engine had loaded the next version before it ended"
    assert not any(isinstance(event, WeightsProbed) and event.arrival.cause for event in events)
