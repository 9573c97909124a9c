"""An error ends the run with that error, also one in a callback, which asyncio only logs."""

import asyncio
import errno
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, SIM, Outcome, change, simulate
from tailrace.algo.base import AlgorithmSettings
from tailrace.controller.base import RunComponents
from tailrace.controller.run import Run
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.errors import AllDropped, AllFiltered, LedgerError, RewardFailed
from tailrace.record.events import Event, RequestEnded
from tailrace.rollout import pool
from tailrace.schedules import SCHEDULES
from tailrace.sim.engine import SimEngine
from tailrace.types import Group, Prompt, Sample

IN_TIME = change(SETTINGS, step_timeout_s=3600.0, step_warning_timeout_s=60.0)
"""A run that only waits ends with another error."""


class BrokenRow:
    """A row of the data raises what no row should."""

    def __getitem__(self, index: int) -> Prompt:
        if index == 20:
            raise TypeError("row 20")
        return Prompt(index, [1])


def broken_row() -> RunComponents:
    return replace(simulated_parts(SIM, seed=0), prompts=BrokenRow())


async def defect_in_the_pool(parts: RunComponents, run: Run) -> None:
    finished = run.pool.progress.keep_finished

    def keep_finished(group: Group, waits: Callable[[Sample], bool]) -> None:
        finished(group, waits)
        if asyncio.current_task() is None and group.kept:  # in a callback
            raise LedgerError("a response")

    run.pool.progress.keep_finished = keep_finished  # type: ignore[method-assign]


async def defect_when_an_engine_dies(parts: RunComponents, run: Run) -> None:
    def changed() -> None:
        raise KeyError("engine1")

    run.router.on_changed = changed
    engine = parts.engines[1]
    assert isinstance(engine, SimEngine)
    asyncio.get_running_loop().call_later(5.0, engine.die)


class FullDisk(Outcome):
    """From the sixtieth response on nothing can be written."""

    def on(self, event: Event) -> None:
        super().on(event)
        if len(self.of(RequestEnded)) >= 60:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_every_schedule_is_meant() -> None:
    named = {schedule.func for schedule in SCHEDULES_BY_NAME.values() if isinstance(schedule, partial)}
    assert named == set(SCHEDULES.values())


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_a_broken_row_a_defect_and_a_full_disk_end_the_run_with_their_error_and_in_silence(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = partial(simulate, SCHEDULES_BY_NAME[name], IN_TIME)
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        with pytest.raises(TypeError, match="row 20"):
            run(parts=broken_row)
        with pytest.raises(LedgerError, match="a response"):
            run(beside=defect_in_the_pool)
        with pytest.raises(KeyError, match="engine1"):
            run(beside=defect_when_an_engine_dies)
        with pytest.raises(OSError, match="No space left"):
            run(into=FullDisk())
    assert caplog.records == []


class OneReward:
    async def score(self, sample: Sample) -> float:
        return 0.0


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_a_run_ends_when_all_groups_are_filtered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = pool.LOSS_LIMITS["filtered"]._replace(num_groups=40)
    monkeypatch.setitem(pool.LOSS_LIMITS, "filtered", limit)
    outcome = Outcome()
    with pytest.raises(AllFiltered, match="the last 40 groups were filtered: zero variance"):
        simulate(
            SCHEDULES_BY_NAME[name],
            algorithm=AlgorithmSettings(filter="zero_variance"),
            parts=lambda: replace(simulated_parts(SIM, seed=0), rewards=OneReward()),
            into=outcome,
        )
    assert outcome.totals.groups["filtered"] == 40


class NoReward:
    async def score(self, sample: Sample) -> float:
        raise RewardFailed("down")


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_a_run_ends_when_no_group_has_a_reward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = pool.LOSS_LIMITS["dropped"]._replace(num_groups=40)
    monkeypatch.setitem(pool.LOSS_LIMITS, "dropped", limit)
    with pytest.raises(AllDropped, match="the last 40 groups had no sample with a reward: reward down"):
        simulate(
            SCHEDULES_BY_NAME[name],
            parts=lambda: replace(simulated_parts(SIM, seed=0), rewards=NoReward()),
        )
