"""What a run costs in virtual time, its ledger times the prices, over its lives; a budget that ends it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, SIM, Book, Outcome, change, simulate
from tailrace.controller.base import RunComponents
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.ledger.prices import Prices, PriceSettings
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import read_ledger
from tailrace.record.events import BooksClosed, RoundStarted, Spent, Stepped
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary

PRICES = Prices(
    PriceSettings(engine_hour=2.0, trainer_hour=3.0, prefill=0.1, sampling=0.4, training=1.5),
    engine_devices=2,
    trainer_devices=4,
)
EVERY_ROUND = change(SETTINGS, checkpoint_every=1)
SCHEDULES = pytest.mark.parametrize("name", ["serial", "pipelinerl", "april"])


def paying(prices: Prices) -> Callable[[], RunComponents]:
    return lambda: replace(simulated_parts(SIM, 0), prices=prices)


def with_budget(budget: float) -> Callable[[], RunComponents]:
    return paying(replace(PRICES, settings=change(PRICES.settings, budget=budget)))


def costs_of(outcome: Outcome) -> list[float]:
    return [event.cost for event in outcome.of(Spent)]


def costs_at_steps(outcome: Outcome) -> list[float]:
    pairs = pairwise(outcome.events)
    return [one.cost for one, other in pairs if isinstance(one, Spent) and isinstance(other, Stepped)]


def cost_of_store(book: Book) -> float:
    return PRICES.cost(totals_of(read_ledger(book.store)), book.num_generated)


@SCHEDULES
def test_the_total_of_a_run_is_its_ledger_times_the_prices(name: str, tmp_path: Path) -> None:
    book = Book()
    run = simulate(SCHEDULES_BY_NAME[name], EVERY_ROUND, folder=tmp_path, book=book, parts=paying(PRICES))
    trained = sum(sample.num_tokens for step in run.of(Stepped) for sample in step.samples)
    (end_s,) = (event.time_s for event in run.of(BooksClosed))
    hours = end_s / 3600 * (2 * 2.0 + 4 * 3.0)
    prefill = 0.1 * sum(usage.num_prefilled for usage in run.usages)
    sampling = 0.4 * sum(usage.num_generated for usage in run.usages)
    assert trained > 0 and prefill > 0 and end_s > 0
    assert costs_of(run)[-1] == pytest.approx(hours + (prefill + sampling + 1.5 * trained) / 1e6, rel=1e-12)
    assert costs_of(run)[-1] == cost_of_store(book)
    assert costs_of(run) == sorted(costs_of(run))


def test_the_rows_of_a_run_add_up_to_its_total() -> None:
    run, summary = simulate(SCHEDULES_BY_NAME["serial"], parts=paying(PRICES)), Summary()
    meter = StepMeter(summary, wall_clock=lambda: 0.0)
    for event in run.events:
        meter.on(event)
    meter.close()
    rows, costs = summary.rows, costs_of(run)
    assert [row["cost/total"] for row in rows if "loss" in row] == costs_at_steps(run)
    assert sum(row.get("cost/step", 0.0) for row in rows) == pytest.approx(costs[-1])
    of_rounds = costs[-2]  # the run ends when the last weights have arrived
    assert sum(row.get("round/cost", 0.0) for row in rows) == pytest.approx(of_rounds)
    assert of_rounds < costs[-1]
    assert summary.summary().cost == costs[-1]
    figures = summary.figures()
    assert figures["round_cost"] == pytest.approx(of_rounds / 3)
    assert figures["cost_per_1000_samples"] == pytest.approx(1000 * of_rounds / (3 * 16 * 4))


def test_a_run_without_prices_has_no_costs() -> None:
    run, summary = simulate(SCHEDULES_BY_NAME["serial"]), Summary()
    meter = StepMeter(summary, wall_clock=lambda: 0.0)
    for event in run.events:
        meter.on(event)
    meter.close()
    assert run.of(Spent) == [] and summary.summary().cost is None
    assert not [name for row in [*summary.rows, summary.figures()] for name in row if "cost" in name]


@SCHEDULES
def test_a_budget_ends_a_run_with_the_step_in_which_it_is_spent(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES_BY_NAME[name]
    steps = costs_at_steps(simulate(schedule, parts=paying(PRICES)))
    num = len(steps) - 1
    budget = (steps[num - 2] + steps[num - 1]) / 2
    book = Book()
    run = simulate(schedule, EVERY_ROUND, folder=tmp_path, book=book, parts=with_budget(budget))
    assert run.ended.interrupted and len(run.of(Stepped)) == num
    assert costs_at_steps(run)[-2] < budget <= costs_at_steps(run)[-1]
    assert run.ended.checkpoint and run.ended.checkpoint.is_dir()
    assert read_ledger(book.store).checkpoints[-1].step == num
    assert costs_of(run)[-1] == cost_of_store(book)


def test_a_run_that_its_budget_ended_goes_on_with_a_larger_one_to_the_same_number_of_steps(
    tmp_path: Path,
) -> None:
    schedule, book = SCHEDULES_BY_NAME["serial"], Book()
    steps = costs_at_steps(simulate(schedule, parts=paying(PRICES)))
    first = simulate(schedule, folder=tmp_path, book=book, parts=with_budget(steps[2]))
    assert [len(first.of(Stepped)), len(first.of(RoundStarted))] == [3, 2]
    second = simulate(schedule, folder=tmp_path, book=book, parts=with_budget(10 * steps[-1]))
    assert not second.ended.interrupted and second.of(Stepped)[-1].stats.num_steps == len(steps)
    assert costs_of(second)[0] == costs_of(first)[-1] > 0
    assert costs_of(second)[-1] == cost_of_store(book)


def test_what_a_kill_undid_was_paid_for(tmp_path: Path) -> None:
    """Killed after its second step, before the first checkpoint that has one."""
    schedule, book = SCHEDULES_BY_NAME["serial"], Book(flush_s=0.01)
    whole = simulate(schedule, parts=paying(PRICES))
    killed_s = whole.of(Stepped)[1].end_s + 0.05
    killed = simulate(schedule, folder=tmp_path, book=book, parts=paying(PRICES), kill_at_s=killed_s)
    undone = sum(sample.num_tokens for step in killed.of(Stepped) for sample in step.samples)
    assert len(killed.of(Stepped)) == 2 and undone > 0
    resumed = simulate(schedule, folder=tmp_path, book=book, parts=paying(PRICES))
    totals = totals_of(read_ledger(book.store))
    assert totals.undone_tokens == undone
    assert totals.seconds == pytest.approx(killed_s + resumed.ended_s, abs=0.02)
    assert totals.prefilled_tokens > sum(usage.num_prefilled for usage in resumed.usages)
    assert costs_of(resumed)[0] >= costs_at_steps(killed)[-1]
    assert costs_of(resumed)[-1] == cost_of_store(book)
