"""The first of what must always hold, for worlds that nobody thought of.

Every run ends with its books checked by `Run.finish`; here hypothesis draws the schedule, the lengths, the
failures, the filter, the engines that die, and the moments at which the whole run is killed and resumed.
"""

import tempfile
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.algo.base import AlgorithmSettings
from tailrace.rollout.admission import AtMost, Frontier, FrontierFirst
from tailrace.run import RunSettings
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)
from virtual import Death, dying, newest, simulate

ADMISSIONS = st.one_of(
    st.builds(AtMost, requests=st.sampled_from([None, 1, 5])),
    st.builds(Frontier, groups=st.integers(1, 4)),
    st.builds(FrontierFirst, groups=st.integers(1, 4)),
)
KVS = st.sampled_from(["keep", "recompute"])
FACTORS = st.sampled_from([1.0, 1.25, 2.0])


@st.composite
def schedules(draw: st.DrawFn) -> partial:  # type: ignore[type-arg]
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    U = draw(st.integers(1, 3))
    match name:
        case "serial":
            parameters = {"R": U * draw(st.integers(1, 3)), "U": U}
        case "rolloutpipe" | "rolloutpipe_eager":
            parameters = {"R": U * draw(st.integers(1, 3)), "U": U, "admission": draw(ADMISSIONS)}
            parameters["tokens"] = draw(st.sampled_from([50, 5000]))
        case "april":
            parameters = {"N": U, "N_launched": U + draw(st.integers(0, 4))}
            bound = draw(st.sampled_from([None, 4]))  # with U = 1 and 5 launched, 4 is the least
            parameters |= {"staleness": bound, "kv": draw(KVS)}
        case "tailbatch" | "rollpacker" | "tailbatch_async":
            parameters = {"P0": U, "eta_prompts": draw(FACTORS), "eta_responses": draw(FACTORS)}
        case "tailbatch_dapo":
            parameters = {"P0": U, "requests": draw(st.integers(1, 12)), "eta_responses": draw(FACTORS)}
        case "conventional":
            parameters = {"U": U, "G": draw(st.integers(1, 3))}
        case "tailrace":
            bound = draw(st.integers(0, 3))
            in_flight = draw(st.integers(U, (bound + 1) * U))
            parameters = {"U": U, "in_flight": in_flight, "staleness": bound, "kv": draw(KVS)}
        case "tailrace_on_policy":
            parameters = {"N": U, "eta": draw(FACTORS), "long_share": draw(st.sampled_from([0.0, 0.25, 1.0]))}
        case "pipelinerl":
            parameters = {"U": U, "H": draw(st.integers(1, 12)), "room": U + draw(st.integers(0, 4))}
            parameters["full"] = draw(st.sampled_from(["hold", "drop"]))
            parameters["kv"] = draw(KVS)
        case _:
            raise AssertionError(f"{name} is not drawn")
    return partial(SCHEDULES[name], **parameters)


RUNS = st.builds(
    RunSettings,
    rounds=st.integers(1, 3),
    group_size=st.integers(2, 3),
    seed=st.integers(0, 1000),
    checkpoint_every=st.integers(1, 2),
    eval_every=st.integers(0, 2),
    eval_prompts=st.just(3),
)
ALGORITHMS = st.builds(
    AlgorithmSettings,
    filter=st.sampled_from(["none", "zero_variance"]),
    kl_coef=st.sampled_from([0.0, 0.1]),
    kl_in=st.sampled_from(["loss", "reward"]),
)
WORLDS = st.builds(
    SimSettings,
    engines=st.builds(
        SimEngineSettings,
        count=st.just(2),
        slots=st.sampled_from([1, 3, 16]),
        kv_tokens=st.sampled_from([320, 10_000]),
        abort_s=st.sampled_from([0.0, 0.05, 1.0]),
        load_s=st.sampled_from([0.0, 0.5]),
    ),
    trainer=st.builds(SimTrainerSettings, tokens_per_s=st.sampled_from([500.0, 50_000.0])),
    lengths=st.builds(
        SimLengthSettings,
        median_tokens=st.just(40),
        sigma=st.sampled_from([0.0, 1.3]),
        correlation=st.sampled_from([0.0, 0.7, 1.0]),
        max_tokens=st.just(300),
        prompt_tokens=st.just(10),
        rows=st.sampled_from([None, 5]),
    ),
    rewards=st.builds(
        SimRewardSettings,
        median_s=st.sampled_from([0.0, 0.3]),
        failing=st.sampled_from([0.0, 0.3]),
        hanging=st.sampled_from([0.0, 0.1]),
        timeout_s=st.just(2.0),
    ),
)
DEATHS = st.lists(st.builds(Death, st.floats(0, 8), st.integers(0, 1), st.floats(0, 4)), max_size=3)
KILLS = st.lists(st.floats(0, 12), max_size=2)


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(schedules(), RUNS, ALGORITHMS, WORLDS, DEATHS, KILLS)
def test_the_books_close_in_every_world(
    schedule: partial,
    run: RunSettings,
    algorithm: AlgorithmSettings,
    world: SimSettings,
    deaths: list[Death],
    kills: list[float],  # type: ignore[type-arg]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kill_at_s in [*kills, None]:
            outcome = simulate(
                schedule,
                run,
                world,
                folder=folder,
                resume=newest(folder),
                kill_at_s=kill_at_s,
                beside=dying(*deaths) if deaths else None,
                algorithm=algorithm,
            )
            if not outcome.killed:
                break
        assert outcome.run.overtime
        totals = outcome.totals
        living = len(outcome.run.state().parked) + len(outcome.run.state().in_flight)
        assert totals.num_drawn == totals.groups.total() + living
