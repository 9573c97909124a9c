"""The search on a cluster of two devices, and its reasons in words."""

from dataclasses import replace
from itertools import count
from math import inf
from types import SimpleNamespace

import pytest

from tailrace.controller.base import RunSettings
from tailrace.errors import ConfigError
from tailrace.extras.plan.candidates import Candidate, Work, candidates
from tailrace.extras.plan.plan import Floor, Measured, Problem
from tailrace.extras.plan.search import Plan, reasons, search
from tailrace.sim.settings import (
    SimClusterSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
)

PROBLEM = Problem(
    sim=SimSettings(
        cluster=SimClusterSettings(device="H100", devices=2, model="Qwen3-1.7B", tensor_parallel=1),
        engines=SimEngineSettings(slots=16),
        lengths=SimLengthSettings(median_tokens=300, sigma=1.0, max_tokens=4096),
        rewards=SimRewardSettings(median_s=0.1),
    ),
    run=RunSettings(rounds=1, group_size=2),
    groups_per_step=2,
    steps=16,
    max_lag=1,
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(PROBLEM)


def test_the_choice_is_the_fastest_of_all_candidates_and_nothing_is_lost_from_the_count(plan: Plan) -> None:
    sims, excluded = PROBLEM.candidates()
    measured = [PROBLEM.measure(candidate, sim, PROBLEM.steps) for candidate, sim in sims.items()]
    fair = [each for each in measured if abs(each.figures["length_bias"]) <= 0.02]
    assert plan.best.step_s == min(each.step_s for each in fair)
    assert plan.best.figures["samples_per_s"] == pytest.approx(4 / plan.best.step_s)
    assert plan.best.figures["lag_max"] <= 1
    ranked = sum(1 + len(each.variants) for each in plan.ranking)
    assert ranked + plan.pruned + sum(plan.excluded.values()) == plan.candidates
    too_old = "train tokens that are older than plan.max_lag = 1 steps"
    assert excluded[too_old] == plan.excluded[too_old] > 0
    # Races for responses favour short ones, on each division.
    biased = "prefer short or long responses: their bias is above plan.max_length_bias = 0.02"
    assert plan.excluded[biased] == 2
    assert {each.steps for each in plan.ranking} == {PROBLEM.steps}
    times = [each.step_s for each in plan.ranking]
    assert times == sorted(set(times))


def test_a_cluster_that_no_candidate_fits_is_refused_with_the_numbers() -> None:
    cluster = SimClusterSettings(device="RTX 4090", devices=2, model="Qwen2.5-32B")
    problem = replace(PROBLEM, sim=PROBLEM.sim.model_copy(update={"cluster": cluster}))
    with pytest.raises(ConfigError, match=r"its weights take 61\.0 GiB, but an engine on 2 x RTX 4090 has"):
        search(problem)


def test_a_limit_that_no_candidate_meets_says_how_many_it_excludes() -> None:
    problem = replace(PROBLEM, max_length_bias=-1.0)
    number = len(problem.candidates()[0])
    with pytest.raises(ConfigError, match=f"it excludes all {number} candidates that fit the devices"):
        search(problem)


def test_the_whole_search_measures_every_candidate_over_all_steps(plan: Plan) -> None:
    told: list[str] = []
    whole = search(replace(PROBLEM, progress=told.append), whole=True)
    assert whole.pruned == 0 and len(told) == len(PROBLEM.candidates()[0])
    assert whole.best.step_s == plan.best.step_s
    assert "1 measured, best so far" in told[1] and told[1].endswith(" s left")


@pytest.mark.parametrize(
    ("limit", "figure", "least"),
    [({"max_mean_lag": 0.3}, "lag_mean", -0.3), ({"min_ess": 0.9999}, "ess_mean", 0.9999)],
)
def test_a_limit_on_what_was_learnt_from_excludes_the_faster_candidates_above_it(
    plan: Plan, limit: dict[str, float], figure: str, least: float
) -> None:
    free, limited = plan.best, search(replace(PROBLEM, **limit))  # type: ignore[arg-type]
    sign = -1 if least < 0 else 1
    assert sign * free.figures[figure] < least <= min(sign * each.figures[figure] for each in limited.ranking)
    assert free.step_s < limited.best.step_s
    assert any(f"plan.{next(iter(limit))} = " in words for words in limited.excluded)


def test_candidates_with_the_same_figures_are_one_row() -> None:
    """With slots for a step only, no more requests can be in flight."""
    engines = SimEngineSettings(slots=4)
    problem = replace(PROBLEM, sim=PROBLEM.sim.model_copy(update={"engines": engines}), max_lag=inf)
    names = {each.work.name for each in problem.candidates()[0] if each.work.schedule == "pipelinerl"}
    assert names == {"pipelinerl, 1 steps in flight"}
    plan = search(problem, whole=True)
    assert any(each.variants for each in plan.ranking)
    keys = [(each.step_s, each.figures["lag_mean"], each.figures["waste_share"]) for each in plan.ranking]
    assert len(set(keys)) == len(keys)


def test_the_memory_of_a_candidate() -> None:
    """16 bytes for each of 1.72e9 parameters on one device of 80e9 bytes."""
    sims, _ = PROBLEM.candidates()
    separate = next(each for each in sims if each.rollout_devices == 1)
    measured = PROBLEM.measure(separate, sims[separate], 4)
    assert measured.figures["trainer_share"] == pytest.approx(16 * 1_720_574_976 / 80e9)
    assert measured.figures["device_share"] == pytest.approx(0.9), "of the engine, which has its own"
    engines = sims[separate].engines
    assert measured.figures["kv_share"] == pytest.approx(
        4 * PROBLEM.load(16).mean_context / engines.kv_tokens
    )


def measured(schedule: str, lag: int, rollout_devices: int | None, floor: Floor, step_s: float) -> Measured:
    kind = "disaggregated" if rollout_devices else "colocated"
    candidate = Candidate(Work(schedule, {}, lag=lag), kind, rollout_devices, 1)
    return Measured(candidate, floor, 16, {"step_s": step_s})


def words(*ranking: Measured) -> list[str]:
    return reasons(PROBLEM, {each.candidate: each.floor.step_s for each in ranking}, ranking)


def test_the_words_name_the_longer_side_the_largest_gain_and_what_helps() -> None:
    """One device generates for 8.2 s and one trains for 2 s, in a step of 9 s."""
    best = measured("tailrace", 1, 1, Floor(8.2, 2.0, 7.5), 9.0)
    other = measured("serial", 0, None, Floor(8.0, 2.0, 10.0), 18.0)
    found = words(best, other)
    generation, training = PROBLEM.device_seconds
    assert found[0].endswith(
        f": of 2 devices, a step needs at least {generation:.3g} device seconds for generation and "
        f"{training:.3g} for training"
    )
    assert found[1] == (
        "no candidate has a bound below 7.5 s a step: no schedule gains more than 1.2x over the best, which "
        "takes 9 s"
    )
    assert found[2] == (
        "its engines are needed for 91% of a step and its trainer for 22%: generation limits it; add rollout "
        "devices"
    )
    assert found[4:] == [
        "in turn the best is serial, with 2.00x the time",
        "on-policy the best is serial, with 2.00x the time",
    ]


def test_the_device_seconds_that_a_step_needs_at_least_depend_on_no_limit_and_bound_each_candidate() -> None:
    limited = replace(PROBLEM, max_lag=0)
    assert limited.device_seconds == PROBLEM.device_seconds
    generation, training = PROBLEM.device_seconds
    for candidate, sim in PROBLEM.candidates()[0].items():
        floor = PROBLEM.floor(candidate, sim, PROBLEM.steps)
        rollout = candidate.rollout_devices
        assert generation <= floor.generation_s * (rollout or 2) * (1 + 1e-12)
        assert training <= floor.training_s * (2 - (rollout or 0)) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("devices", "floor", "end"),
    [
        (1, Floor(2.0, 8.0, 8.0), "training limits it; add devices to the trainer"),
        (1, Floor(4.0, 4.0, 4.0), "the rest are waits for long responses, rewards and new weights"),
        (
            None,
            Floor(6.0, 2.0, 8.0),
            "one after the other on the same devices: generation takes more of them",
        ),
    ],
)
def test_the_words_of_other_bottlenecks(devices: int | None, floor: Floor, end: str) -> None:
    assert words(measured("serial", 0, devices, floor, 9.0))[2].endswith(end)


def cluster_of(devices: int, groups: int) -> Problem:
    """Devices that generate as much for each group, whatever their number."""
    changes = {
        "cluster": SimClusterSettings(device="H100", devices=devices, model="Qwen3-1.7B", tensor_parallel=1),
        "rewards": SimRewardSettings(median_s=0.1, workers=groups),
    }
    return replace(PROBLEM, sim=PROBLEM.sim.model_copy(update=changes), groups_per_step=groups)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 16 devices and 32 samples, so that a run of the whole takes a second."""
    monkeypatch.setattr("tailrace.extras.plan.candidates.SLICE", 32)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("serial", "colocated"),
        ("april", "colocated"),
        ("rolloutpipe_eager", "disaggregated"),
        ("windowed_fifo", "disaggregated"),
        ("pipelinerl", "disaggregated"),
    ],
)
def test_a_slice_of_a_cluster_predicts_the_whole(schedule: str, kind: str, small_slices: None) -> None:
    problem = replace(cluster_of(64, 64), max_lag=inf)
    sims, _ = problem.candidates()
    found = [each for each in sims if (each.work.schedule, each.kind) == (schedule, kind)]
    candidate = found[len(found) // 2]
    assert candidate.slices == 4
    whole = problem.measure(replace(candidate, slices=1), sims[candidate], 16)
    predicted = problem.measure(candidate, sims[candidate], 16)
    assert predicted.step_s == pytest.approx(whole.step_s, rel=0.15)
    assert predicted.figures["lag_mean"] == pytest.approx(whole.figures["lag_mean"], abs=0.3)
    assert predicted.figures["kv_share"] == pytest.approx(whole.figures["kv_share"], rel=0.1)
    assert predicted.floor == whole.floor and predicted.candidate is candidate


def test_schedules_that_move_requests_are_left_out_of_slices_and_measured_whole(small_slices: None) -> None:
    problem = cluster_of(64, 64)
    (sliced, excluded), (whole, none) = problem.candidates(), problem.candidates(whole=True)
    moving = [each for each in whole if each.work.schedule in ("dora", "laminar")]
    (words,) = excluded.keys() - none.keys()
    assert "--whole measures them" in words and excluded[words] == len(moving) == len(whole) - len(sliced) > 0
    assert {each.slices for each in whole} == {1} and min(each.slices for each in sliced) > 1


@pytest.mark.slow
def test_the_best_of_a_large_cluster_was_measured_whole_and_the_others_on_slices(small_slices: None) -> None:
    problem = cluster_of(32, 32)
    cluster = problem.sim.cluster.model_copy(update={"rollout_devices": 24})  # type: ignore[union-attr]
    problem = replace(problem, sim=problem.sim.model_copy(update={"cluster": cluster}), max_lag=0)
    plan = search(problem)
    slices = [each.candidate.slices for each in plan.ranking]
    assert slices[0] == 1 and set(slices) == {1, 2} and slices == sorted(slices)
    sims = {replace(each, slices=1): sim for each, sim in problem.candidates()[0].items()}
    whole = [problem.measure(each, sim, plan.best.steps) for each, sim in sims.items()]
    assert plan.best.step_s == min(each.step_s for each in whole if not problem.exceeded(each))
    assert (
        plan.candidates
        == len(sims) + plan.excluded["train tokens that are older than plan.max_lag = 0 steps"]
    )


def test_devices_are_divided_so_that_each_slice_has_its_share_of_engines_groups_and_workers() -> None:
    for devices, groups, workers, found in [
        (1024, 1024, 64, {8: 8, 1: 16}),  # with 8 devices an engine, 16 slices would have 8 engines each
        (1000, 1000, 100, {8: 5, 1: 10}),
        (1024, 1024, 9, {8: 1, 1: 1}),
        (8, 1024, 64, {8: 1, 1: 1}),
    ]:
        cluster = SimClusterSettings(device="H100", devices=devices, model="Qwen3-1.7B")
        sim = SimSettings(cluster=cluster, rewards=SimRewardSettings(workers=workers))
        for candidate in candidates(sim, groups, 8, 3):
            engines = (candidate.rollout_devices or devices) // candidate.tensor_parallel
            assert engines % candidate.slices == groups % candidate.slices == workers % candidate.slices == 0
            if candidate.kind == "disaggregated" and candidate.tensor_parallel in found:
                assert candidate.slices >= found[candidate.tensor_parallel]


def test_the_time_left_is_that_of_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock shows a second more each time, so the first run, of 8 steps, took one. Up to 16 finalists
    take as long as two each."""
    seconds, told = count(), list[str]()
    clock = SimpleNamespace(wall_time=lambda: float(next(seconds)))
    monkeypatch.setattr("tailrace.extras.plan.search.clock", clock)
    search(replace(PROBLEM, max_length_bias=1.0, progress=told.append))
    waiting = len(PROBLEM.candidates()[0]) - 1
    assert told[1].endswith(f"; about {waiting + 32} s left")
