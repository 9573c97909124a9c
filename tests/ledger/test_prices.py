"""The bill of a run, by hand, and the prices that are refused."""

import pytest

from tailrace.ledger.ledger import Totals
from tailrace.ledger.prices import Prices, PriceSettings, total_cost

SETTINGS = PriceSettings(engine_hour=2.0, trainer_hour=3.0, prefill=0.1, sampling=0.4, training=1.5)
TOTALS = Totals(
    trained_tokens=4_000_000, undone_tokens=2_000_000, prefilled_tokens=30_000_000, seconds=1800.0
)


def test_a_bill_has_half_an_hour_of_each_device_and_all_tokens_trained_again_ones_included() -> None:
    prices = Prices(SETTINGS, engine_devices=4, trainer_devices=2)
    bill = prices.bill(TOTALS, num_generated=10_000_000)
    assert [(item.amount, item.price) for item in bill] == [
        (0.5 * 4, 2.0),
        (0.5 * 2, 3.0),
        (30.0, 0.1),
        (10.0, 0.4),
        (6.0, 1.5),
    ]
    assert total_cost(bill) == pytest.approx(4.0 + 3.0 + 3.0 + 4.0 + 9.0)
    assert prices.cost(TOTALS, 10_000_000) == total_cost(bill)


def test_a_cost_is_told_with_what_is_left_of_the_budget() -> None:
    assert SETTINGS.words(1234.5) == "1,234.5000 USD"
    limited = PriceSettings(currency="EUR", sampling=1.0, budget=20.0)
    assert limited.words(12.5) == "12.5000 EUR, 7.5000 left of 20.0000"
    assert limited.words(20.5) == "20.5000 EUR, 0.0000 left of 20.0000"


def test_a_budget_is_spent_once_the_cost_has_reached_it() -> None:
    limited = PriceSettings(sampling=1.0, budget=20.0)
    assert limited.overrun(19.99) == ""
    assert limited.overrun(20.0) == "the budget of 20 USD is spent: the run has cost 20.0000"
    assert limited.unlimited.overrun(1e9) == SETTINGS.overrun(1e9) == ""
