"""A placement that cannot work is refused before anything starts, with the numbers."""

from pathlib import Path

import msgspec
import pytest

from tailrace.config import load_config
from tailrace.drivers.assembly.placement import check_placement, device_sharing, prices_of
from tailrace.drivers.assembly.simulation import sim_settings
from tailrace.errors import ConfigError
from tailrace.rollout.placement import DeviceSharing
from tailrace.rollout.profile import ProfileRow

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "quickstart.toml"
NCCL = "{ transport = 'process_group', backend = 'nccl' }"
ELASTIC_GPUS = "{ kind = 'elastic', devices = 'gpus', engines = [[0], [1]], trainer = [[1], [2]] }"


def test_nccl_between_different_gpus_is_not_refused() -> None:
    overrides = {"weights": NCCL, "trainer.device": "cuda:0", "engine.device": "cuda:1"}
    check_placement(load_config(QUICKSTART, overrides))


def test_simulated_engines_may_be_joined() -> None:
    overrides = {"sim.engines.count": "4", "placement.max_tensor_parallel_size": "4"}
    config = load_config(QUICKSTART, overrides)
    assert device_sharing(config, config.sim) == DeviceSharing(max_width=4)


ELASTIC = {"placement": "{kind = 'elastic', lend_after = 'prompts'}", "trainer.replicas": "2"}


def test_the_limit_of_a_response_is_known_where_devices_are_lent_after_prompts() -> None:
    config = load_config(QUICKSTART, {**ELASTIC, "sim.engines.count": "4", "sim.lengths.max_tokens": "77"})
    assert device_sharing(config, config.sim).longest == 77
    live = load_config(QUICKSTART, {**ELASTIC, "engine.replicas": "2"})
    assert live.sampling and device_sharing(live).longest == live.sampling.max_completion_tokens


PLANNED = {"sim.engines.count": "4", "placement.max_tensor_parallel_size": "4"}


def test_simulated_engines_begin_with_the_size_that_the_computed_profile_says_is_fastest() -> None:
    """Long responses that fill the cache favour large groups; steps that mostly communicate small ones."""
    full = {"sim.engines.kv_tokens": "4000", "sim.engines.weight_tokens": "4000"}
    slow = {"sim.engines.communication_s": "1.0"}
    lengths = {"sim.lengths.max_tokens": "2000", "sim.lengths.median_tokens": "1000.0"}
    started = []
    for extra in (full, slow):
        config = load_config(QUICKSTART, PLANNED | lengths | extra)
        started.append(device_sharing(config, sim_settings(config)).start_width(64))
    assert started == [4, 1]


def test_the_size_of_the_first_rounds_can_be_set_or_taken_from_a_file(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, PLANNED | {"placement.start_tensor_parallel_size": "2"})
    assert device_sharing(config, config.sim).start_width(64) == 2
    path = tmp_path / "profile.json"
    rows = [ProfileRow(size, 16, 100, abs(size - 2) + 1.0, 0) for size in (1, 2, 4)]
    path.write_bytes(msgspec.json.encode(rows))
    config = load_config(QUICKSTART, PLANNED | {"placement.profile": f"'{path}'"})
    assert device_sharing(config, config.sim).start_width(4) == 2
    path.write_bytes(msgspec.json.encode(rows[:-1]))
    with pytest.raises(ConfigError, match=r"^placement.profile = .*no measurement of tensor-parallel size 4"):
        device_sharing(config, config.sim)


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ({}, (1, 1)),
        ({"engine.replicas": "3", "trainer.ranks": "2", "trainer.replicas": "2"}, (3, 4)),
        ({"engine.kind": "vllm", "engine.replicas": "2", "engine.tensor_parallel_size": "4"}, (8, 1)),
        ({"placement.kind": "colocated", "engine.replicas": "2", "trainer.ranks": "2"}, (2, 0)),
        ({"placement.kind": "colocated", "trainer.ranks": "4"}, (1, 3)),
        ({"placement": ELASTIC_GPUS} | {"engine.replicas": "2", "trainer.replicas": "2"}, (2, 1)),
    ],
)
def test_each_device_of_a_run_is_paid_once(overrides: dict[str, str], devices: tuple[int, int]) -> None:
    prices = prices_of(load_config(QUICKSTART, overrides | {"prices.engine_hour": "1.0"}))
    assert prices and (prices.engine_devices, prices.trainer_devices) == devices
    assert prices_of(load_config(QUICKSTART, overrides)) is None


@pytest.mark.parametrize(("rollout_devices", "devices"), [(6, (6, 2)), (None, (8, 0))])
def test_each_device_of_a_cluster_is_paid_once(rollout_devices: int | None, devices: tuple[int, int]) -> None:
    cluster = {
        "sim.cluster.devices": "8",
        "sim.cluster.model": "Qwen3-4B",
        "sim.cluster.tensor_parallel": "2",
    }
    if rollout_devices:
        cluster["sim.cluster.rollout_devices"] = str(rollout_devices)
    else:
        cluster["placement.kind"] = "colocated"
    config = load_config(QUICKSTART, cluster | {"prices.engine_hour": "1.0"})
    prices = prices_of(config, sim_settings(config))
    assert prices and (prices.engine_devices, prices.trainer_devices) == devices


def test_the_engines_of_a_simulation_without_a_cluster_are_paid() -> None:
    config = load_config(QUICKSTART, {"sim.engines.count": "5", "prices.sampling": "1.0"})
    prices = prices_of(config, sim_settings(config))
    assert prices and (prices.engine_devices, prices.trainer_devices) == (5, 1)
