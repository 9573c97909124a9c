"""A placement that cannot work is refused before anything starts, with the numbers."""

from pathlib import Path

import msgspec
import pytest

from tailrace.config import load_config
from tailrace.drivers.assembly.placement import check_placement, device_sharing, prices_of
from tailrace.drivers.assembly.schedule import resolve
from tailrace.drivers.assembly.simulation import sim_settings
from tailrace.errors import ConfigError
from tailrace.rollout.placement import DeviceSharing
from tailrace.rollout.profile import ProfileRow

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "quickstart.toml"
NCCL = "{ transport = 'process_group', backend = 'nccl' }"
ELASTIC_GPUS = "{ kind = 'elastic', devices = 'gpus', engines = [[0], [1]], trainer = [[1], [2]] }"
ONE_GPU = "{ devices = 'gpus', engines = [[0]], trainer = [[0]] }"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"placement.engines": "[[0], [1]]"}, r"placement.engines = .* lists devices of 2, for 1 engines"),
        (
            {"trainer.ranks": "2", "trainer.device": "cuda"},
            r"placement.trainer = .* the 2 processes of the trainer would all use cuda; set placement",
        ),
        (
            {"trainer.device": "cuda:1", "placement.devices": "gpus", "placement.trainer": "[[1]]"},
            r"trainer.device = 'cuda:1': placement gives the process its GPUs, .*; write \"cuda\"",
        ),
        (
            {"trainer.ranks": "2", "placement.trainer": "[[0]]"},
            r"placement.trainer = .* number 0 .* has 1 devices for 2 ranks",
        ),
        ({"placement.kind": "elastic", "engine.replicas": "2"}, r"trainer.replicas = 1: .*set it to 2"),
        (
            {"placement.kind": "colocated", "trainer.lora.rank": "4", "algorithm.kl_coef": "0.1"}
            | {"trainer.offload.weights": "disk"},
            r"trainer.offload.weights = 'disk': the reference is the trainer .*; set it to \"device\"",
        ),
        (
            {"engine.kind": "vllm", "engine.tensor_parallel_size": "3"},
            r"engine.tensor_parallel_size = 3: the 3 devices .* cannot share 4 .* choose a divisor of 4",
        ),
        (
            {"engine.kind": "vllm", "engine.replicas": "4", "placement.max_tensor_parallel_size": "8"},
            r"placement.max_tensor_parallel_size = 8: the 8 devices of an engine cannot share 4 ",
        ),
        (
            {"engine.kind": "vllm", "engine.replicas": "3", "placement.max_tensor_parallel_size": "2"},
            r"3 engines of 1 devices cannot be joined to groups of 2",
        ),
        (
            {"engine.replicas": "2", "placement.max_tensor_parallel_size": "2"},
            r"only vLLM servers that the run starts",
        ),
        (
            {"weights": NCCL, "trainer.device": "cuda"},
            r"weights.backend = 'nccl': trainer and engines must have GPUs, .*; write \"gloo\"",
        ),
        (
            {"weights": NCCL, "trainer.device": "cuda:0", "engine.device": "cuda"},
            r"weights.backend = 'nccl': trainer and engines must have GPUs, and different ones",
        ),
        (
            {"weights": NCCL, "placement": ONE_GPU, "trainer.device": "cuda", "engine.device": "cuda"},
            r"weights.backend = 'nccl': trainer and engines must have GPUs, and different ones",
        ),
    ],
)
def test_a_placement_without_enough_devices_is_refused(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_placement(load_config(QUICKSTART, overrides))


def test_nccl_between_different_gpus_is_not_refused() -> None:
    overrides = {"weights": NCCL, "trainer.device": "cuda:0", "engine.device": "cuda:1"}
    check_placement(load_config(QUICKSTART, overrides))


def test_a_schedule_that_never_stops_generating_is_refused_on_shared_devices() -> None:
    overrides = {
        "schedule": "{name = 'tailrace', groups_per_step = 4, groups_in_flight = 8, staleness = 2}",
        "placement.kind": "colocated",
    }
    with pytest.raises(ConfigError, match=r"a rehearsal failed: .* never stop generating"):
        resolve(load_config(QUICKSTART, overrides))
    assert resolve(load_config(QUICKSTART, {"placement.kind": "colocated"}))


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
    with pytest.raises(ConfigError, match=r"placement.lend_after = 'prompts': placement.kind = colocated"):
        device_sharing(load_config(QUICKSTART, {**ELASTIC, "placement.kind": "colocated"}))


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
    ("overrides", "problem"),
    [
        ({"placement.start_tensor_parallel_size": "3"}, r"start_tensor_parallel_size = 3: .* from 1, 2, 4"),
        ({"placement.start_tensor_parallel_size": "8"}, r"start_tensor_parallel_size = 8: .* from 1, 2, 4"),
        (
            {"sim.cluster": "{devices = 4, devices_per_node = 2, model = 'Qwen3-1.7B'}"},
            r"max_tensor_parallel_size = 4: a node has 2 devices",
        ),
    ],
)
def test_a_size_that_engines_never_have_is_refused(overrides: dict[str, str], problem: str) -> None:
    config = load_config(QUICKSTART, PLANNED | overrides)
    with pytest.raises(ConfigError, match=problem):
        device_sharing(config, config.sim)


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ({}, (1, 1)),
        ({"engine.replicas": "3", "trainer.ranks": "2", "trainer.replicas": "2"}, (3, 4)),
        ({"engine.kind": "vllm", "engine.replicas": "2", "engine.tensor_parallel_size": "4"}, (8, 1)),
        ({"placement.kind": "colocated", "engine.replicas": "2", "trainer.ranks": "2"}, (2, 0)),
        ({"placement.kind": "colocated", "trainer.ranks": "4"}, (1, 3)),
        (
            {"placement": ELASTIC_GPUS} | {"engine.replicas": "2", "trainer.replicas": "2"},
            (2, 1),
        ),
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
