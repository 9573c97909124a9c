"""Cost of a run: the totals of its ledger times the prices of [prices].

This is the only place that defines the figure. Metrics, `tailrace inspect` and the budget follow from it.

Tokens that a kill lost, and tokens that were trained again after it, were paid for, and count each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field, model_validator

from tailrace.ledger.ledger import Totals
from tailrace.settings import Settings, Shared

MILLION = 1_000_000


class PriceSettings(Settings):
    """Prices of devices and tokens, and a budget."""

    currency: Shared[str] = Field(default="USD", min_length=1)
    """Its name, for what is printed."""
    engine_hour: float = Field(default=0.0, ge=0)
    """An hour of one device that generates, whether or not it trains, too."""
    trainer_hour: float = Field(default=0.0, ge=0)
    """An hour of one device that only trains."""
    prefill: float = Field(default=0.0, ge=0)
    """A million context positions that engines compute."""
    sampling: float = Field(default=0.0, ge=0)
    """A million generated tokens, evaluations included."""
    training: float = Field(default=0.0, ge=0)
    """A million completion tokens of trained samples."""
    budget: float | None = Field(default=None, gt=0)
    """Cost after which a run or a simulation makes no more steps. `tailrace compare` and `tailrace plan` do
    not use it."""

    @model_validator(mode="after")
    def _check_that_something_costs(self) -> "PriceSettings":
        prices = self.engine_hour, self.trainer_hour, self.prefill, self.sampling, self.training
        if self.budget and not any(prices):
            raise ValueError(f"budget = {self.budget:g} is never spent, because no price is set; set one")
        return self

    @property
    def unlimited(self) -> "PriceSettings":
        """Return these prices without the budget."""
        return self.changed(budget=None)

    def words(self, cost: float) -> str:
        """A cost with its currency, and what is left of the budget."""
        if self.budget is None:
            return f"{cost:,.4f} {self.currency}"
        left = f"{max(0.0, self.budget - cost):,.4f} left of {self.budget:,.4f}"
        return f"{cost:,.4f} {self.currency}, {left}"

    def overrun(self, cost: float) -> str:
        """Say that a cost has reached the budget; empty: it has not."""
        if self.budget is None or cost < self.budget:
            return ""
        return f"the budget of {self.budget:g} {self.currency} is spent: the run has cost {cost:,.4f}"


class BillItem(NamedTuple):
    """Something that is paid for."""

    what: str
    amount: float
    price: float
    """Price of a unit of the amount."""


def total_cost(bill: Sequence[BillItem]) -> float:
    """Return what a bill comes to."""
    return sum(item.amount * item.price for item in bill)


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a run, and the devices that they count for.

    Args:
        engine_devices: devices that generate. An hour of one that also trains is paid once.
        trainer_devices: devices that only train.
    """

    settings: PriceSettings
    engine_devices: int
    trainer_devices: int

    def bill(self, totals: Totals, num_generated: int) -> list[BillItem]:
        """All that is paid for. `num_generated`: tokens that samples gained, as `Ledger.check` takes them."""
        prices, hours = self.settings, totals.seconds / 3600
        trained = totals.trained_tokens + totals.masked_tokens + totals.undone_tokens
        return [
            BillItem("hours of the engines' devices", hours * self.engine_devices, prices.engine_hour),
            BillItem("hours of the trainer's devices", hours * self.trainer_devices, prices.trainer_hour),
            BillItem("million tokens prefilled", totals.prefilled_tokens / MILLION, prices.prefill),
            BillItem("million tokens sampled", num_generated / MILLION, prices.sampling),
            BillItem("million tokens trained", trained / MILLION, prices.training),
        ]

    def cost(self, totals: Totals, num_generated: int) -> float:
        """Return the sum of the bill."""
        return total_cost(self.bill(totals, num_generated))
