"""Rows of which all responses were right, or all wrong, are drawn less, and every prompt has one fate."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError

from helpers.record_story import make_group
from helpers.virtual import SETTINGS, SIM, Book, Outcome, change, simulate
from tailrace.contracts.data import Epochs, PoolSettings
from tailrace.controller.base import RunComponents
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.drivers.data.settings import ProceduralSettings
from tailrace.errors import ConfigError
from tailrace.ledger.store import read_ledger
from tailrace.record.events import GroupEnded, PoolsFilled
from tailrace.rollout.difficulty import DifficultyPools
from tailrace.schedules import SCHEDULES
from tailrace.sim.world import SimPrompts
from tailrace.types import Group, Prompt, Sample

ROWS = 8
BOTH = PoolSettings(easy_threshold=1.0, hard_threshold=0.0)
SERIAL = partial(SCHEDULES["serial"], groups_per_round=4, groups_per_step=4)
RUN = change(SETTINGS, rounds=6, group_size=2, checkpoint_every=2)


def pools(settings: PoolSettings = BOTH, rewards: dict[int, float] | None = None) -> DifficultyPools:
    """Of eight rows, whose prompts come in the order of their numbers, epoch after epoch."""
    return DifficultyPools(settings, 0, rewards or {}, prompt)


def prompt(index: int) -> Prompt:
    return Prompt(index, [1], row_number=index % ROWS)


def ended(index: int, rewards: list[float], fate: str = "trained") -> Group:
    group = make_group(index, [4] * len(rewards), rewards)
    group.prompt, group.fate = prompt(index), fate
    return group


def test_a_row_is_in_the_pool_of_the_mean_reward_of_its_last_group() -> None:
    known = pools(PoolSettings(easy_threshold=0.75, hard_threshold=0.25))
    for index, rewards in enumerate(([1.0, 0.5], [0.0, 0.5], [1.0, 0.0], [1.0, 1.0])):
        known.observe(ended(index, rewards, "filtered"))
    known.observe(ended(4, [0.0, 0.0], "dropped"))
    passed = [known.passes_over(prompt(ROWS + row)) for row in range(6)]
    assert passed == ["easy pool", "hard pool", "", "easy pool", "", ""]
    assert (known.sizes["easy"], known.sizes["hard"]) == (2, 1)


def test_a_row_leaves_its_pool_with_another_reward_and_an_earlier_epoch_changes_nothing() -> None:
    known = pools()
    known.observe(ended(0, [0.0, 0.0]))
    known.observe(ended(2 * ROWS, [0.0, 1.0]))
    known.observe(ended(ROWS, [1.0, 1.0]))  # ends last
    assert known.passes_over(prompt(3 * ROWS)) == ""
    assert (known.sizes["easy"], known.sizes["hard"]) == (0, 0)


def test_data_without_epochs_have_no_pools() -> None:
    known, group = pools(), ended(0, [0.0, 0.0])
    group.prompt = Prompt(0, [1])
    known.observe(group)
    assert known.passes_over(Prompt(1, [1])) == "" and not known.sizes.total()


def test_a_fraction_of_a_pool_is_drawn_by_the_seed() -> None:
    half = pools(change(BOTH, hard_fraction=0.5), {0: 0.0, 1: 1.0})
    later = range(ROWS, 1000 * ROWS, ROWS)
    drawn = [index for index in later if not half.passes_over(prompt(index))]
    assert abs(len(drawn) - len(later) / 2) < 50
    assert drawn == [index for index in later if not half.passes_over(prompt(index))]
    assert {half.passes_over(prompt(index + 1)) for index in later} == {"easy pool"}


def test_earlier_processes_count() -> None:
    known = pools(rewards={0: 0.0, 1: 1.0, 2: 0.5, ROWS: 1.0})
    assert [known.passes_over(prompt(2 * ROWS + row)) for row in range(3)] == ["easy pool", "easy pool", ""]


class ByRow:
    """Rewards that are a function of the row: rows 0 and 1 are hard, 2 is easy, others are between."""

    async def score(self, sample: Sample) -> float:
        row = sample.prompt.row_number
        return {0: 0.0, 1: 0.0, 2: 1.0}.get(-1 if row is None else row, float(sample.id.number % 2))


def world(settings: PoolSettings) -> RunComponents:
    parts = simulated_parts(SIM, RUN.seed)
    prompts = SimPrompts(100, Epochs(ROWS, RUN.seed))
    return replace(parts, rewards=ByRow(), prompts=prompts, pools=settings)


def play(settings: PoolSettings = BOTH, **how: object) -> Outcome:
    return simulate(SERIAL, RUN, parts=lambda: world(settings), **how)  # type: ignore[arg-type]


def rows_by_fate(outcome: Outcome) -> dict[str, list[int]]:
    order, found = Epochs(ROWS, RUN.seed), dict[str, list[int]]()
    for event in outcome.of(GroupEnded):
        found.setdefault(event.reason, []).append(order.row_at(event.prompt))
    return found


def test_an_epoch_draws_the_rows_of_no_pool_and_each_prompt_has_one_fate() -> None:
    """24 groups of 2 are trained: 8 of the first epoch, then 5 an epoch."""
    outcome = play()
    found, totals = rows_by_fate(outcome), outcome.totals
    assert Counter(found["trained"])[0] == Counter(found["trained"])[2] == 1
    assert {Counter(found["trained"])[row] for row in range(3, ROWS)} <= {4, 5}
    assert set(found["hard pool"]) == {0, 1} and set(found["easy pool"]) == {2}
    assert totals.groups["trained"] == 24 and totals.groups["dropped"] == totals.num_drawn - 24
    prompts = [event.prompt for event in outcome.of(GroupEnded)]
    assert sorted(prompts) == list(range(totals.num_drawn))
    assert outcome.of(PoolsFilled)[-1].rows == {"easy": 1, "hard": 2}


def test_without_thresholds_all_rows_are_drawn_and_nothing_is_counted() -> None:
    outcome = play(PoolSettings())
    assert outcome.totals.groups == {"trained": 24} and not outcome.of(PoolsFilled)


@pytest.mark.parametrize("kill_at_s", [20.0, 45.0, 80.0])
def test_a_killed_run_goes_on_with_the_same_pools(kill_at_s: float, tmp_path: Path) -> None:
    whole, book = play(), Book()
    killed = play(folder=tmp_path, book=book, kill_at_s=kill_at_s)
    assert killed.killed
    resumed = play(folder=tmp_path, book=book)
    tables = read_ledger(book.store)
    fates = {prompt: (row.fate, row.reason) for prompt, row in tables.groups.items()}
    assert fates == {event.prompt: (event.fate, event.reason) for event in whole.of(GroupEnded)}
    assert set(fates) == set(range(tables.run.num_drawn))
    assert resumed.of(PoolsFilled)[-1].rows == whole.of(PoolsFilled)[-1].rows


def test_data_that_pools_pass_over_whole_end_the_run_with_a_remedy() -> None:
    everything = PoolSettings(hard_threshold=0.75, easy_threshold=0.76)
    with pytest.raises(ConfigError, match=r"data.pools.*10000 rows in succession.*easy_fraction"):
        play(everything)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"easy_threshold": 0.5, "hard_threshold": 0.5}, "hard_threshold = 0.5 is not below easy_threshold"),
        ({"easy_fraction": 0.5}, "easy_fraction needs easy_threshold"),
        ({"hard_threshold": 0.0, "hard_fraction": 1.5}, "less than or equal to 1"),
    ],
)
def test_pools_that_cannot_be_are_refused(wrong: dict[str, float], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        PoolSettings.model_validate(wrong)


def test_prompts_that_never_come_again_have_no_pools() -> None:
    with pytest.raises(ValidationError, match="they need size"):
        ProceduralSettings(task="chain_sum", pools=BOTH)
