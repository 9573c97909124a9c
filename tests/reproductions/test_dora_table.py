"""The set-up of DORA's step times: printed lengths, devices divided as assumed, and nothing fitted."""

from statistics import fmean

import pytest

from reproductions.dora import MEAN, PAPER, ROWS, UPDATES, setup
from tailrace.sim.world import Lengths, SimPrompts
from tailrace.types import Group, Sample, SampleId


def test_the_lengths_have_the_printed_mean() -> None:
    lengths, prompts = Lengths(setup(ROWS[0], 1).lengths, seed=0), SimPrompts(1, None)
    groups = [Group(prompts[number], 1, []) for number in range(4000)]
    samples = [Sample(SampleId(number, 0, 0), group, seed=0) for number, group in enumerate(groups)]
    assert fmean(map(lengths, samples)) == pytest.approx(MEAN, rel=0.1)


def test_a_paradigm_that_generates_on_devices_of_its_own_trains_with_the_others() -> None:
    synchronous, one_off, _, dora, *_ = (setup(row, 1) for row in ROWS)
    assert [sim.engines.count for sim in (synchronous, one_off, dora)] == [16, 8, 8]
    assert dora.trainer.tokens_per_s == synchronous.trainer.tokens_per_s / 2
    assert setup(ROWS[3], UPDATES).trainer.step_s == UPDATES * dora.trainer.step_s
    assert PAPER.num_fitted == 0
