"""The set-up of DORA's step times: printed lengths, devices divided as assumed, fitted training times."""

from statistics import fmean

import pytest

from reproductions.dora import (
    GROUPS,
    MEAN,
    PAPER,
    PROMPT,
    ROWS,
    TRAINED,
    UPDATES,
    K,
    april_and_dora,
    setup,
)
from tailrace.extras.plan.candidates import Workload
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


def test_training_takes_the_printed_times_on_32_64_and_128_devices() -> None:
    """Of the synchronous rows and of DORA: passes over all samples and 16 optimizer steps."""
    lengths, prompts = Lengths(setup(ROWS[0], 1).lengths, seed=0), SimPrompts(1, None)
    groups = [Group(prompts[number], 1, []) for number in range(GROUPS)]
    load = Workload(
        [
            [lengths(Sample(SampleId(n, 0, k), group, seed=0)) for k in range(K)]
            for n, group in enumerate(groups)
        ],
        PROMPT,
    )
    for row in ROWS:
        if row.name in TRAINED and row.rollout_only:
            trainer = setup(row, UPDATES).trainer
            printed = row.minutes * (1 - row.rollout_only)
            ours = (load.passes_s(trainer, GROUPS * K) + trainer.step_s) / 60
            assert ours == pytest.approx(printed, rel=0.03), str(row)
    assert PAPER.num_fitted == 3


def test_the_printed_output_says_which_of_april_and_dora_is_ahead() -> None:
    minutes = {str(row): (row.minutes, 0.0) for row in ROWS}
    assert "ahead of it: 1.18x. The order agrees." in april_and_dora(64, minutes)
    minutes[str(ROWS[2])] = (12.0, 0.0)
    words = april_and_dora(64, minutes)
    assert (
        "in print DORA is ahead of partial rollout, 1.18x; here it is behind it: 0.82x. The order is" in words
    )
