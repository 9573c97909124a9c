"""A cluster with the efficiencies of a run."""

from typing import Any

import pytest

from tailrace.config import RunConfig, config_of
from tailrace.drivers.assembly.simulation import without_rates
from tailrace.errors import ConfigError
from tailrace.extras.plan.calibrate import NUM_STEPS, calibrated
from tailrace.extras.plan.candidates import Workload, response_lengths
from tailrace.extras.plan.plan import generation_seconds
from tailrace.sim.cluster import rates
from tailrace.sim.settings import SimSettings

GROUPS, SIZE, PROMPT = 4, 8, 200
LENGTHS = {"median_tokens": 500.0, "sigma": 0.8, "max_tokens": 4096, "prompt_tokens": PROMPT}
FITTED = SimSettings.model_validate(
    {
        "engines": {"count": 1, "slots": 32, "base_s": 0.03, "slope_s": 1e-4, "kv_tokens": 10**6},
        "trainer": {"tokens_per_s": 4000.0, "step_s": 1.0},
        "lengths": LENGTHS,
        "rewards": {"median_s": 0.7, "sigma": 0.0},
    }
)


def config(**cluster: Any) -> RunConfig:
    sim = {"cluster": {"device": "H100", "devices": 8, "model": "Qwen2.5-7B"} | cluster}
    run = {"rounds": 1, "group_size": SIZE}
    return config_of({"run": run, "schedule": {"name": "serial", "groups_per_step": GROUPS}, "sim": sim})


def workload(sim: SimSettings) -> Workload:
    return Workload(response_lengths(sim, SIZE, range(NUM_STEPS * GROUPS), 0), PROMPT)


@pytest.mark.parametrize("cluster", [{}, {"rollout_devices": 4}, {"tensor_parallel": 2}])
@pytest.mark.parametrize("streams", [False, True])
def test_engines_and_trainer_take_as_long_as_in_the_run(cluster: dict[str, int], streams: bool) -> None:
    found = calibrated(config(**cluster), FITTED, GROUPS, None, streams)
    assert found.sim.cluster
    assert found.sim.lengths == FITTED.lengths and found.sim.rewards == FITTED.rewards
    assert not found.sim.cluster.model_fields_set & {"rollout_devices", "tensor_parallel"}
    divided = found.sim.changed(cluster=cluster)
    sim = rates(without_rates(found.changed(sim=divided)))
    load, samples = workload(sim), GROUPS * SIZE
    steps = load.mean_tokens if streams else load.longest(GROUPS)
    expected_s = generation_seconds(FITTED.engines, load, samples, steps)
    assert generation_seconds(sim.engines, load, samples, steps) == pytest.approx(expected_s, rel=0.05)
    assert load.passes_s(sim.trainer, samples) == pytest.approx(load.passes_s(FITTED.trainer, samples))
    assert sim.trainer.step_s == pytest.approx(1.0), "the constant of an update is that of the run"


def test_a_measured_time_of_the_training_counts_instead_of_its_costs() -> None:
    sim = rates(without_rates(calibrated(config(), FITTED, GROUPS, 7.0, False)))
    assert sim.trainer.step_s == pytest.approx(1.0)
    assert workload(sim).passes_s(sim.trainer, GROUPS * SIZE) == pytest.approx(6.0)


def test_a_run_whose_updates_are_alike_has_the_constant_of_the_cluster() -> None:
    trainer = FITTED.trainer.changed(step_s=0.5)
    found = calibrated(config(), FITTED.changed(trainer=trainer), GROUPS, 7.0, False, 0.5)
    assert found.sim.cluster and found.sim.cluster.update_s is None


def test_costs_of_the_config_give_way_to_those_of_the_run() -> None:
    """A run's config.toml has every default written out."""
    given = config()
    engines = given.sim.engines.changed(base_s=9.0, slots=16)
    given = given.changed(sim={"engines": engines})
    found = calibrated(given, FITTED, GROUPS, None, False).sim
    assert found.engines.model_fields_set == {"slots"} and found.engines.slots == 16


def test_a_run_that_its_devices_cannot_make_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sim.cluster.training_efficiency = .* faster than these devices"):
        calibrated(config(device="RTX 4090", devices=64), FITTED, GROUPS, 0.02, False)
    with pytest.raises(ConfigError, match=r"sim.cluster = None: the planner needs .* the model of the run"):
        calibrated(config().changed(sim=SimSettings()), FITTED, GROUPS, None, False)
