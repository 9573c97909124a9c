"""The cost of a run, over all of its processes."""

from tailrace import clock
from tailrace.ledger.ledger import Ledger
from tailrace.ledger.prices import Prices
from tailrace.ledger.recovery import StartingPoint
from tailrace.record.events import Recorder, Spent
from tailrace.rollout.router import Router


class Cost:
    """Tokens and seconds that the run has used so far, and their price. `prices`: None: it is not known."""

    def __init__(
        self, prices: Prices | None, ledger: Ledger, router: Router, recorder: Recorder, start: StartingPoint
    ) -> None:
        self._prices, self._ledger, self._router, self._recorder = prices, ledger, router, recorder
        self._generated_before = start.num_generated - router.num_generated
        self._prefilled_before = start.totals.prefilled_tokens - router.num_prefilled
        self._began_s = (clock.now() if start.began_s is None else start.began_s) - start.totals.seconds
        self.record()  # for the earlier processes
        ledger.measure = self._measure

    @property
    def num_generated(self) -> int:
        """Tokens that samples have gained."""
        return self._router.num_generated + self._generated_before

    def record(self) -> str:
        """Record the cost so far. Return a message if the budget is spent, else an empty one."""
        if self._prices is None:
            return ""
        self._ledger.measure()
        cost = self._prices.cost(self._ledger.totals, self.num_generated)
        self._recorder.emit(Spent(clock.now(), cost))
        return self._prices.settings.overrun(cost)

    def _measure(self) -> None:
        totals = self._ledger.totals
        totals.seconds = clock.now() - self._began_s
        totals.prefilled_tokens = self._router.num_prefilled + self._prefilled_before
