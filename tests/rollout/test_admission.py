"""Admission: how many requests are in service."""

from functools import partial

from helpers.virtual import SETTINGS, SIM, change, simulate
from tailrace.rollout.admission import AtMost, Frontier, FrontierFirst
from tailrace.schedules import SCHEDULES

ROLLOUTPIPE = partial(SCHEDULES["rolloutpipe"], groups_per_round=16, groups_per_step=4)
ONE_ENGINE = change(SIM, engines=change(SIM.engines, count=1))


def test_frontier_first_is_fifo_with_a_cap_of_as_many_requests_as_its_groups_have() -> None:
    """Three groups of four samples on one engine: the traces are equal event by event."""
    frontier_first = simulate(partial(ROLLOUTPIPE, admission=FrontierFirst(groups=3)), SETTINGS, ONE_ENGINE)
    at_most = simulate(partial(ROLLOUTPIPE, admission=AtMost(requests_per_engine=12)), SETTINGS, ONE_ENGINE)
    assert frontier_first.trace == at_most.trace
    assert len(frontier_first.trace) > 100


def test_a_strict_frontier_leaves_slots_free_that_frontier_first_fills() -> None:
    strict = simulate(partial(ROLLOUTPIPE, admission=Frontier(groups=3)), SETTINGS, ONE_ENGINE)
    first = simulate(partial(ROLLOUTPIPE, admission=FrontierFirst(groups=3)), SETTINGS, ONE_ENGINE)
    assert first.ended_s < strict.ended_s
