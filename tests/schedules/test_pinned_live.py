"""Schedules that serve several versions at a time, on two embedded engines. Every fourth group has long
responses."""

from contextlib import closing
from pathlib import Path

import pytest

from helpers.small_run import train_here, write_small_run
from tailrace.assembly.folder import RunFolder
from tailrace.config import load_config
from tailrace.ledger.recovery import read_ledger
from tailrace.ledger.store import open_store
from tailrace.record.events import Published, RequestEnded
from tailrace.record.run_log import LogReader

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


@pytest.mark.parametrize("name", ["dora", "laminar"])
def test_samples_move_and_each_has_one_version(name: str, tmp_path: Path) -> None:
    config = write_small_run(tmp_path)
    before, _, after = config.read_text().partition("[schedule]")
    (tmp_path / "uneven.py").write_text(UNEVEN)
    section = f'[schedule]\nname = "uneven.py:uneven"\nschedule = "{name}"\n'
    config.write_text(before + section + after[after.index("[model]") :])
    assert train_here(config, *WORDS) == 0
    folder = tmp_path / "out"
    events = [*LogReader(RunFolder(folder).events).read()]
    moved = {event.sample for event in events if isinstance(event, RequestEnded) and event.outcome == "moved"}
    assert moved, "some had to leave their engine"
    assert sum(isinstance(event, Published) for event in events) == 12
    with closing(open_store(load_config(config).ledger, folder, only_read=True)) as store:
        samples = read_ledger(store, tokens=False).samples
    trained = {id: each for id, each in samples.items() if each.fate == "trained"}
    assert len(trained) == 12 * 2
    assert {len(each.spans) for each in trained.values()} == {1}
    assert moved & trained.keys(), "a sample that moved was trained"
