"""Bounds and candidates, computed by hand on a small cluster."""

from collections import Counter
from math import inf

import pytest

from helpers import virtual
from helpers.virtual import change, simulate
from tailrace.extras.plan.candidates import (
    LEFT_OUT,
    Candidate,
    Work,
    Workload,
    candidates,
    divisions,
    response_lengths,
)
from tailrace.extras.plan.plan import floor
from tailrace.record.events import RequestEnded, RequestStarted, RoundEnded, Stepped
from tailrace.rollout.placement import Kind
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import (
    SimClusterSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)

LOAD = Workload([[100, 300], [200, 200]], prompt_tokens=100)
"""800 tokens in two groups. The longest of a group has 250 tokens on average, the longest of all has 300."""
SIM = SimSettings(
    engines=SimEngineSettings(count=2, slots=4, base_s=0.01, slope_s=0.001, load_s=1.0),
    trainer=SimTrainerSettings(tokens_per_s=1000.0, step_s=0.5),
    rewards=SimRewardSettings(median_s=0.3),
)


def waiting(kind: Kind, stops: bool = True) -> Candidate:
    """Both groups in each rollout, of which the longest response is waited for."""
    work = Work("serial", {}, alive=2, waited_tokens=lambda load: load.longest(2), stops=stops)
    return Candidate(work, kind, None, 1)


def test_a_schedule_that_waits_takes_the_longest_response_and_trains_after_it() -> None:
    """Each engine has 400 of the 800 tokens: 300 steps of 10 ms, and 400 tokens of 1 ms. The trainer computes
    800 + 4 * 100 tokens in 1.2 s and steps in 0.5 s. A reward takes 0.3 s; sleep and wake 0.5 and 1 s."""
    found = floor(waiting("colocated"), SIM, LOAD, groups_per_step=2)
    assert found.generation_s == pytest.approx(300 * 0.01 + 400 * 0.001)
    assert found.training_s == pytest.approx(1.2 + 0.5)
    assert found.step_s == pytest.approx(3.4 + 0.3 + 1.2 + 0.5 + 0.5 + 1.0)


def test_on_separate_devices_training_is_hidden_but_for_the_optimizer_step_and_the_load() -> None:
    found = floor(waiting("disaggregated"), SIM, LOAD, groups_per_step=2)
    assert found.step_s == pytest.approx(3.4 + 0.3 + 0.5 + 1.0)


def test_elastic_devices_train_in_the_tail() -> None:
    """Without the tail, generation takes 250 steps (Little's law): 2.9 s, and with training 4.1 s."""
    found = floor(waiting("elastic"), SIM, LOAD, groups_per_step=2)
    assert found.step_s == pytest.approx(2.5 + 0.4 + 1.2 + 0.5 + 0.5 + 1.0)


def test_a_schedule_that_never_stops_takes_the_longer_side() -> None:
    """With four groups alive, a step needs 2 * 250 / 4 = 125 decode steps, in which 4 slots hold 500."""
    work = Work("tailrace", {}, alive=4, stops=False)
    found = floor(Candidate(work, "disaggregated", 1, 1), SIM, LOAD, groups_per_step=2)
    assert found.step_s == pytest.approx(125 * 0.01 + 400 * 0.001 + 1.0)


def test_the_batch_is_limited_by_slots_and_by_the_kv_cache() -> None:
    """One slot: 400 decode steps of an engine. A mean context of 100 + 45,000 / 200 / 2 positions is 212.5:
    a cache of 425 holds two, so that 200 are needed."""
    work = Work("tailrace", {}, stops=False)
    for limit, steps in (({"slots": 1}, 400), ({"kv_tokens": 425}, 200)):
        sim = SIM.changed(engines=limit)
        found = floor(Candidate(work, "disaggregated", 1, 1), sim, LOAD, groups_per_step=2)
        assert found.generation_s == pytest.approx(steps * 0.01 + 400 * 0.001)


def test_drafts_share_what_is_paid_by_the_step_and_rows_are_paid_by_the_token() -> None:
    """At best a step gives 2 tokens: its fixed part is halved, and a row costs what it costs alone."""
    sim = SIM.changed(engines={"acceptance": (0.75, 0.25)})
    found = floor(waiting("colocated"), sim, LOAD, groups_per_step=2)
    assert found.generation_s == pytest.approx(300 * 0.01 / 2 + 400 * 0.001)


def test_passes_of_a_workload_take_time_by_its_tokens_and_by_their_squares() -> None:
    """With their prompts sequences have 200, 400, 300, 300 tokens."""
    trainer = SimTrainerSettings(tokens_per_s=100.0, attention_s=1e-4)
    assert LOAD.passes_s(trainer, 4) == pytest.approx(1200 / 100 + 1e-4 * (4 + 16 + 9 + 9) * 1e4)


def test_losers_of_a_race_have_a_round_of_their_own() -> None:
    """Of 1, 9, 2 the two shortest win; of 8, 3, 4, too; then 9 and 8 have a round."""
    load = Workload([[tokens] for tokens in (1, 9, 2, 8, 3, 4)], prompt_tokens=1)
    assert load.longest_of_race(wanted=2, launched=3) == pytest.approx((2 + 4 + 9) / 3)


def test_a_sorted_rollout_waits_for_the_longest_of_each_step() -> None:
    load = Workload([[tokens] for tokens in (1, 9, 2, 8, 3, 4)], prompt_tokens=1)
    assert load.longest_of_step(6, 2) == pytest.approx((2 + 4 + 9) / 3)
    assert load.longest_of_step(4, 2) == pytest.approx((2 + 9) / 2)  # what is left has no rollout


def test_lengths_are_those_of_the_simulation() -> None:
    sim = SimSettings(lengths=SimLengthSettings(sigma=0.0, median_tokens=50, max_tokens=100))
    assert response_lengths(sim, 2, range(3), seed=0) == [[50, 50]] * 3


def test_divisions_are_whole_engines() -> None:
    assert list(divisions(SimClusterSettings(devices=4))) == [
        *(("disaggregated", number, 1) for number in (1, 2, 3)),
        ("colocated", None, 1),
        ("elastic", None, 1),
        ("disaggregated", 2, 2),
        ("colocated", None, 2),
        ("elastic", None, 2),
        ("colocated", None, 4),
    ]


def test_many_devices_are_divided_in_sixteenths() -> None:
    found = list(divisions(SimClusterSettings(devices=128, tensor_parallel=8)))
    assert [number for kind, number, _ in found if kind == "disaggregated"] == list(range(8, 128, 8))


def test_what_the_cluster_sets_stays() -> None:
    cluster = SimClusterSettings(devices=8, rollout_devices=6, tensor_parallel=2)
    assert list(divisions(cluster)) == [("disaggregated", 6, 2)]
    cluster = SimClusterSettings(devices=8, rollout_devices=2)  # no engine has more devices than generate
    assert list(divisions(cluster)) == [("disaggregated", 2, 1), ("disaggregated", 2, 2)]


def test_schedules_whose_times_cannot_differ_are_represented_by_one() -> None:
    cluster, engines = SimClusterSettings(devices=2), SimEngineSettings(slots=64)
    sim = SimSettings(cluster=cluster, engines=engines)

    def names(sim: SimSettings, group_size: int) -> set[str]:
        return {each.work.schedule for each in candidates(sim, 4, group_size)}

    few = names(sim, 2)
    assert not few & {"seer", "streamrl", "conventional", "rolloutpipe"}
    assert names(sim, 64) - few == {"seer"}  # 256 requests wait for 128 slots
    repeated = sim.changed(lengths=SimLengthSettings(rows=8))
    assert names(repeated, 2) - few == {"streamrl"}


ALL = SimSettings(
    cluster=SimClusterSettings(devices=2),
    engines=SimEngineSettings(slots=6, versions=4),
    lengths=SimLengthSettings(rows=8),
)
WORKS = {each.work.name: each.work for each in candidates(ALL, 4, 4)}
"""Every candidate, once for all divisions of the devices."""


def test_every_schedule_is_a_candidate_or_left_out_with_one_that_represents_it() -> None:
    planned = {work.schedule for work in WORKS.values()}
    assert planned | LEFT_OUT.keys() == SCHEDULES.keys()
    assert not planned & LEFT_OUT.keys()
    assert {*LEFT_OUT.values()} <= planned


@pytest.mark.parametrize("name", WORKS)
def test_what_the_planner_knows_of_a_schedule_is_what_the_schedule_does(name: str) -> None:
    work, served, most = WORKS[name], Counter[int](), 0
    sim = change(virtual.SIM, engines=change(virtual.SIM.engines, count=1, slots=200, versions=4))
    outcome = simulate(work.ready(), change(virtual.SETTINGS, rounds=4), sim)
    for event in outcome.events:
        if isinstance(event, RequestStarted):
            served[event.sample.prompt] += 1
            most = max(most, len(+served))
        elif isinstance(event, RequestEnded):
            served[event.sample.prompt] -= 1
    assert most == work.alive or work.alive == inf
    assert outcome.run.declared is not None
    assert len(outcome.of(Stepped)) == work.steps * len(outcome.of(RoundEnded))
    assert work.lag == (outcome.run.declared + 1) * work.steps - 1


def test_every_bound_of_lag_is_tried_and_also_the_limit() -> None:
    sim = SimSettings(cluster=SimClusterSettings(devices=2), engines=SimEngineSettings(slots=64))
    assert {each.work.lag for each in candidates(sim, 4, 2, max_lag=2)} == {0, 1, 2, 3, inf}


@pytest.mark.parametrize(("slope_s", "expected"), [(0.001, 1), (0.0, 8)])
def test_a_frontier_is_narrow_only_where_a_decode_step_grows_with_its_requests(
    slope_s: float, expected: int
) -> None:
    """Eight groups of two responses of 100 tokens, trained in 4 s. With steps of 1 ms a request a group takes
    0.2 s alone and 1.6 s among eight; with constant steps it takes as long."""
    load = Workload([[100, 100]] * 8, prompt_tokens=100)
    engines = SimEngineSettings(count=1, slots=16, base_s=1e-6 if slope_s else 0.01, slope_s=slope_s)
    sim = SimSettings(engines=engines, trainer=SimTrainerSettings(tokens_per_s=800.0, step_s=0.0))
    assert load.frontier_width(sim, groups_per_round=8, groups_per_step=1) == expected
