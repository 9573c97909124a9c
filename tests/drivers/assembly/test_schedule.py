"""From the [schedule] section to a schedule that can run, or to one message before anything starts."""

import inspect
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.virtual import SIM, change, simulate
from tailrace.config import RunConfig, shared_parameters
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.schedule import (
    bind,
    check_parameter_names,
    resolve,
    with_decay_steps,
    with_published_defaults,
)
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.errors import ConfigError
from tailrace.record.events import Stepped
from tailrace.rollout.admission import FrontierFirst
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import SimEngineSettings, SimSettings

SETTINGS = RunSettings(rounds=2, group_size=4)


def config(name: str, **parameters: Any) -> RunConfig:
    return RunConfig(run=SETTINGS, schedule={"name": name, **parameters})


def message(name: str, **parameters: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(config(name, **parameters))
    return str(caught.value)


def test_a_schedule_is_found_by_its_name_and_its_parameters_are_typed() -> None:
    admission = {"kind": "frontier_first", "groups": 2}
    bound = resolve(config("rolloutpipe", groups_per_round=8, groups_per_step=2, admission=admission))
    assert bound.func is SCHEDULES["rolloutpipe"]
    assert bound.keywords == {
        "groups_per_round": 8,
        "groups_per_step": 2,
        "admission": FrontierFirst(groups=2),
    }


def test_a_schedule_of_its_own_in_a_race_wins_over_the_shared_section() -> None:
    race = RunConfig(
        run=SETTINGS,
        schedule={"name": "serial", "groups_per_round": 8, "groups_per_step": 4},
        schedules={"serial": {"groups_per_step": 2}, "april": {"groups_per_round": 4, "groups_launched": 8}},
    )
    assert resolve(race).keywords == {"groups_per_round": 8, "groups_per_step": 2}
    assert shared_parameters(race, "april") == {"name": "april", "groups_per_round": 8}
    assert shared_parameters(race, "rolloutpipe") == {
        "name": "rolloutpipe",
        "groups_per_round": 8,
        "groups_per_step": 4,
    }


def test_a_key_that_none_of_the_compared_schedules_has_is_refused() -> None:
    shared = config("serial", groups_per_round=8, groups_per_step=4, groups_launched=16)
    check_parameter_names(shared, ["rolloutpipe", "april"])
    with pytest.raises(ConfigError) as caught:
        check_parameter_names(shared, ["rolloutpipe"])
    assert str(caught.value) == (
        "schedule.groups_launched = 16: the schedule has no such parameter; it has: groups_per_round, "
        "groups_per_step, order, max_tokens_per_batch, admission"
    )


@pytest.mark.parametrize("kv", [0, -0.1, math.nan, math.inf, True, "0.1", "maybe", [1]])
def test_a_rule_for_the_kv_cache_that_is_none_is_refused_by_its_key(kv: object) -> None:
    said = message("tailrace", groups_per_step=2, groups_in_flight=4, staleness=1, kv=kv)
    assert (
        said == f"schedule.kv = {kv!r}: it must be 'keep', 'recompute' or a finite number above 0; correct it"
    )


@pytest.mark.parametrize("kv", ["keep", "recompute", 1, 0.25])
def test_a_rule_for_the_kv_cache_is_a_word_or_a_number(kv: object) -> None:
    bound = resolve(config("tailrace", groups_per_step=2, groups_in_flight=4, staleness=1, kv=kv))
    assert bound.keywords["kv"] == kv


OUTSIDE = '''
"""A sixth schedule, which the package does not know."""


async def one_step_off(run, U: int):
    """Train on the last batch while the next one is generated."""
    run.declare(staleness=1)
    run.pool.launch(run.prompts(U))
    async for _ in run.rounds():
        groups = await run.pool.take(U)
        run.pool.launch(run.prompts(U))
        await run.train(groups)
        await run.publish()


async def liar(run, U: int):
    run.declare(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.parked.pop(2 * U) + run.prompts(2 * U - len(run.parked)))
        groups = await run.pool.take(U)
        await run.pool.park()
        await run.train(groups)
        await run.publish()


async def greedy(run, U: int):
    async for _ in run.rounds():
        run.pool.launch(run.prompts(U))
        await run.pool.take(U + 1)


async def silent(run, U: int):
    async for _ in run.rounds():
        run.pool.launch(run.prompts(U))
        await run.train(await run.pool.take(U))
        await run.publish()


async def forgetful(run, U: int):
    run.declare(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(U))
        await run.train((await run.pool.take(U))[1:])
        await run.publish()


async def sleeper(run, U: int):
    import asyncio
    async for _ in run.rounds():
        await asyncio.Event().wait()


async def stepless(run, U: int):
    async for _ in run.rounds():
        run.pool.launch(run.prompts(U))
        await run.accumulate(await run.pool.take(U))
        await run.publish()


async def headstrong(run, U: int):
    run.declare(staleness=0)
    run.pool.order = lambda sample: (-sample.group.order,)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(U))
        await run.train(await run.pool.take(U))
        await run.publish()


async def nobody(run, U: int):
    run.declare(staleness=1)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(U))
        await run.train(await run.pool.take(U))
        await run.publish(to=[])


async def astray(run, U: int):
    run.declare(staleness=1, pinned=1)
    first, second = run.engines
    async for _ in run.rounds():
        run.pool.launch(run.prompts(2 * U))
        await run.train(await run.pool.take(U))
        await run.publish(to=[second])
        for sample in run.serving(first):
            run.move(sample, second)
        await run.train(await run.pool.take(U))
'''


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(OUTSIDE)
    return file


def test_a_schedule_from_outside_runs_by_its_path(outside: Path) -> None:
    outcome = simulate(resolve(config(f"{outside}:one_step_off", U=4)))
    assert len(outcome.trained) == 12
    assert {lag for step in outcome.of(Stepped) for lag in step.lags.publications} == {0, 1}


def test_a_schedule_from_outside_runs_by_its_module(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(outside.parent))
    assert resolve(config("mine:one_step_off", U=4)).func.__module__ == "mine"


@pytest.mark.parametrize(
    ("preset", "name", "order"),
    [("seer", "serial", "probe_first"), ("streamrl", "periodic_asynchrony", "longest_first")],
)
def test_a_preset_is_another_schedule_with_an_order_of_the_queue(preset: str, name: str, order: str) -> None:
    sim = change(SIM, engines=change(SIM.engines, slots=6), lengths=change(SIM.lengths, rows=9))

    def trace(name: str, **parameters: str) -> list[str]:
        step = {"groups_per_step": 8} if name in ("serial", "seer") else {}
        return simulate(resolve(config(name, groups_per_round=8, **step, **parameters)), sim=sim).trace

    assert trace(preset) == trace(name, order=order) != trace(name)
    assert trace(preset, order="launched") == trace(name)


def test_an_order_of_the_queue_is_refused_if_the_schedule_sets_one(outside: Path) -> None:
    sizes = {"groups_per_round": 4, "groups_per_step": 4}
    frontier = {"kind": "frontier", "groups": 1}
    assert message("rolloutpipe", order="probe_first", admission=frontier, **sizes) == (
        "schedule.order = 'probe_first': a frontier waits for the other samples of its groups, and they come "
        "after all probes; remove it, or choose admission.kind = frontier_first"
    )
    resolve(config(f"{outside}:headstrong", U=4))
    assert message(f"{outside}:headstrong", U=4, order="launched") == (
        "schedule.order = 'launched': the schedule sets an order of its own; remove it"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("liar", r"1 publications old and the schedule declared at most 0"),
        (
            "greedy",
            r"the pool: 4 groups are wanted, 3 are ready|4 groups are wanted, 0 are ready and 3 in flight",
        ),
        ("forgetful", r"prompts \[\d+, \d+\] were taken and neither trained, dropped nor parked"),
        ("silent", r"the schedule declares nothing; it must say run.declare"),
        ("sleeper", r"no optimizer step for 3600 s"),
        ("stepless", r"samples accumulated and no step"),
        ("nobody", r"publish\(to=\.\.\.\) names no engine"),
        ("astray", r"sample .* cannot move to engine-1, which serves \(\) and not version \(0,\)"),
    ],
)
def test_a_rehearsal_catches_what_a_schedule_from_outside_gets_wrong(
    outside: Path, name: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        resolve(change(config(f"{outside}:{name}", U=3), engine=NativeEngineSettings(replicas=2)))
    assert str(caught.value).startswith("schedule = 'these parameters': a rehearsal failed: ")


def test_a_simulation_says_how_many_versions_its_engines_serve() -> None:
    pinned = config("trl_async", groups_per_step=2, groups_in_flight=4, staleness=1)
    simulated = change(pinned, sim=SimSettings(engines=SimEngineSettings(versions=2)))
    assert resolve(simulated).func is SCHEDULES["trl_async"]
    assert bind(SCHEDULES["trl_async"], resolve(simulated).keywords, simulated).keywords["staleness"] == 1


def test_synchronous_rewards_work_with_a_schedule_that_pauses() -> None:
    def resolved(name: str, **parameters: Any) -> None:
        reward = RewardSettings(synchronous=True)
        resolve(RunConfig(run=SETTINGS, schedule={"name": name, **parameters}, reward=reward))

    resolved("serial", groups_per_round=4, groups_per_step=2)
    resolved("tailbatch", groups_per_round=4)


def test_the_same_objects_run_live_and_simulated() -> None:
    """A schedule knows no world: it is resolved before one is chosen."""
    assert all(inspect.iscoroutinefunction(schedule) for schedule in SCHEDULES.values())
    assert resolve(config("serial", groups_per_round=4, groups_per_step=2)).func is SCHEDULES["serial"]


@pytest.mark.parametrize(
    ("name", "algorithm", "old_policy"),
    [
        ("april", {}, "recomputed"),
        ("april", {"old_policy": "recorded"}, "recorded"),
        ("april", {"name": "reinforce"}, "recorded"),
        ("serial", {}, "recorded"),
        ("serial", {"old_policy": "recomputed"}, "recomputed"),
    ],
)
def test_the_old_policy_is_that_of_the_schedules_paper_unless_the_config_sets_it(
    name: str, algorithm: dict[str, Any], old_policy: str
) -> None:
    given = RunConfig(run=SETTINGS, schedule={"name": name}, algorithm=algorithm)
    assert with_published_defaults(given).algorithm.old_policy == old_policy
    assert given.algorithm.old_policy == algorithm.get("old_policy")


def test_a_correction_of_recorded_log_probs_is_taken_from_a_schedule_that_recomputes_them() -> None:
    truncated = {"correction": "truncate"}
    april = RunConfig(run=SETTINGS, schedule={"name": "april"}, algorithm=truncated)
    assert with_published_defaults(april).algorithm.correction == "truncate"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("serial", {"groups_per_round": 10**18, "groups_per_step": 10**18}),
        ("conventional", {"groups_per_step": 60_000, "steps_per_round": 60_000}),
        ("april", {"groups_per_round": 8, "groups_launched": 10**18}),
    ],
)
def test_a_schedule_of_endless_rounds_is_refused_with_its_numbers(
    name: str, parameters: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.drivers.assembly.schedule.MAX_REHEARSED", 5_000)
    said = message(name, **parameters)
    assert "a rehearsal of two rounds draws more than 5000 prompts" in said
    assert all(f"'{key}': {value}" in said for key, value in parameters.items())


@pytest.mark.parametrize(("value", "said"), [(True, "it is no whole number"), (10**30, "at most 64 bits")])
def test_a_parameter_is_not_turned_into_one_of_another_type(value: object, said: str) -> None:
    assert said in message("serial", groups_per_round=value, groups_per_step=1)


def test_a_decay_lasts_as_long_as_the_run_unless_the_config_sets_its_steps() -> None:
    given = config("rolloutpipe", groups_per_round=4, groups_per_step=2)
    assert with_decay_steps(given) is given
    linear = given.changed(trainer={"learning_rate_decay": "linear"})
    assert with_decay_steps(linear).trainer.decay_steps == SETTINGS.rounds * 2
    assert with_decay_steps(linear.changed(trainer={"decay_steps": 7})).trainer.decay_steps == 7


def test_a_decay_needs_its_steps_where_those_of_rounds_differ(tmp_path: Path) -> None:
    async def growing(run: Any) -> None:
        run.declare(staleness=0)
        async for number in run.rounds():
            for _ in range(1 + number):
                run.pool.launch(run.prompts(1))
                await run.train(await run.pool.take(1))
            await run.publish()

    linear = config("serial").changed(trainer={"learning_rate_decay": "linear"})
    with pytest.raises(
        ConfigError, match=r"trainer\.decay_steps = None: the optimizer steps of a round differ"
    ):
        with_decay_steps(linear, bind(growing, {}, linear))
