"""The rates that follow from devices and a model, by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tailrace.config import RunConfig
from tailrace.contracts.memory import ModelShape
from tailrace.contracts.trainer import OffloadSettings
from tailrace.drivers.assembly.simulation import sim_settings
from tailrace.errors import ConfigError
from tailrace.sim.cluster import MODELS, memory_shares, multiplied_parameters, rates
from tailrace.sim.engine import Steps
from tailrace.sim.settings import (
    SimClusterSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimSettings,
    SimTrainerSettings,
)

RUN = {"run": {"rounds": 1, "group_size": 4}, "schedule": {"name": "serial", "groups_per_round": 4}}
PEAK = {f"{name}_efficiency": 1.0 for name in ("bandwidth", "decode", "prefill", "training", "link")} | {
    **dict.fromkeys(("overhead_s", "overhead_per_request_s", "update_s"), 0.0),
    "memory_share": 1.0,
}


def on(device: str = "H100", model: str = "Qwen2.5-7B", **cluster: Any) -> SimSettings:
    return SimSettings(cluster=SimClusterSettings(device=device, model=model, **(PEAK | cluster)))


TIED = ("0.5B", "0.6B", "1.5B", "1.7B", "3B", "4B")


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_of_a_known_model_are_those_of_its_shape(name: str) -> None:
    """Qwen2.5 has biases of queries, keys and values; Qwen3 norms of queries and keys instead. Of experts a
    shape has those that a token reaches: 8 of 128, and the router has a row for each."""
    model = MODELS[name]
    query, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    own = {"Qwen2": query + 2 * kv, "Qwen3": 2 * model.head_size, "Llama": 0}[name[:5]]
    if name in ("Qwen3-30B-A3B", "Qwen3-235B-A22B"):
        own += model.hidden_size * (3 * 15 * model.mlp_size + 128)
    norms = 2 * model.hidden_size + own
    is_tied = name.removeprefix("Qwen3-").removeprefix("Qwen2.5-") in TIED
    embedding = 0 if is_tied else model.hidden_size * model.vocabulary
    others = model.num_layers * norms + model.hidden_size
    matrices = model.num_layers * multiplied_parameters(model) + model.hidden_size * model.vocabulary
    assert model.num_parameters == matrices + embedding + others


def test_the_rates_of_a_seven_billion_model_on_eight_devices() -> None:
    """Qwen2.5-7B on H100, peaks: 15.23 GB of weights at 3350 GB/s are 4.547 ms. A position of the KV cache
    has 2 * 28 layers * 4 heads * 128 * 2 bytes = 57,344 bytes, 17.1 ns. 2 * 7.070 G FLOPs at 989.4 T are
    14.29 us. 80 - 15.23 GB hold 1,129,477 positions."""
    filled = rates(on(devices=8, rollout_devices=4))
    engines, trainer = filled.engines, filled.trainer
    weights, used = 15_231_233_024, 7_070_285_824
    assert (engines.count, engines.kv_tokens, engines.weight_tokens) == (4, 1_129_477, 265_611)
    assert engines.base_s == pytest.approx(weights / 3350e9) == pytest.approx(4.547e-3, rel=1e-3)
    assert engines.context_s == pytest.approx(57_344 / 3350e9)
    assert engines.compute_s == pytest.approx(2 * used / 989.4e12)
    assert (engines.slope_s, engines.overhead_s) == (0.0, 0.0)
    assert engines.prefill_tokens_per_s == pytest.approx(989.4e12 / (2 * used))
    assert engines.load_s == pytest.approx(weights / 450e9)
    assert trainer.tokens_per_s == pytest.approx(4 * 989.4e12 / (8 * used))
    # Adam over a quarter of the parameters; float32 gradients and bfloat16 weights over the links
    assert trainer.step_s == pytest.approx(30 * weights / 2 / (4 * 3350e9) + 3 * weights / 450e9)
    assert trainer.publish_s == pytest.approx(weights / 450e9)
    # forward, backward and forward again: 4 passes of 2 FLOPs a layer and dimension of the queries
    assert trainer.attention_s == pytest.approx(4 * 2 * 28 * 28 * 128 / (4 * 989.4e12))


def test_a_verification_costs_the_projection_of_the_prefill_and_a_draw_that_memory_bounds() -> None:
    """Qwen2.5-7B on H100, peaks: 152,064 logits of 20 bytes at 3350 GB/s are 0.908 us; a position of a
    prefill takes 14.29 us, with the 1.10 us of 2 * 3584 * 152,064 FLOPs. Two devices divide both."""
    one, two = (rates(on(rollout_devices=4, tensor_parallel=size)).engines for size in (1, 2))
    draw_s, position_s = 152_064 * 20 / 3350e9, 2 * (6_525_288_448 + 3584 * 152_064) / 989.4e12
    assert one.verify_positions == pytest.approx(draw_s / position_s) == pytest.approx(0.0635, rel=1e-2)
    assert two.verify_positions == pytest.approx(one.verify_positions)


def test_an_optimizer_step_takes_the_given_seconds_more_or_those_of_its_parameters() -> None:
    """0.19 s for each 1e9 parameters, whatever the devices."""
    none, given, default = (
        rates(on(devices=8, update_s=update_s)).trainer.step_s for update_s in (0.0, 3.0, None)
    )
    assert given == pytest.approx(none + 3.0)
    assert default == pytest.approx(none + 0.19 * 7.615616512)


def test_the_host_takes_time_for_each_running_request_however_many_devices_an_engine_has() -> None:
    engines = rates(on(overhead_per_request_s=1e-4, tensor_parallel=2)).engines
    without = rates(on(tensor_parallel=2)).engines
    for width in (1, 4):
        with_host_s, without_s = (Steps.of(each, 300, 0, width).first_s for each in (engines, without))
        assert with_host_s == pytest.approx(without_s + 300 * 1e-4)


def test_two_devices_an_engine_divide_the_work_and_all_reduce_twice_a_layer() -> None:
    """56 all-reduces of 3584 * 2 bytes for each request, and 56 latencies of 10 us for each step."""
    one, two = (rates(on(rollout_devices=4, tensor_parallel=size)).engines for size in (1, 2))
    assert (one.count, two.count) == (4, 2)
    for name in ("base_s", "compute_s", "context_s"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2)
    assert two.slope_s == pytest.approx(56 * 3584 * 2 / 450e9)
    assert two.overhead_s == pytest.approx(56 * 10e-6)
    assert two.kv_tokens == int((160e9 - 15_231_233_024) / 57_344)


@pytest.mark.parametrize("width", [2, 4])
def test_engines_that_are_joined_cost_what_an_engine_of_that_size_costs(width: int) -> None:
    one, joined = rates(on(tensor_parallel=1)).engines, rates(on(tensor_parallel=width)).engines
    for num_running, kv_positions in ((1, 1_000), (400, 400_000)):
        together = Steps.of(one, num_running, kv_positions, width)
        assert together == pytest.approx(Steps.of(joined, num_running, kv_positions))
    assert joined.prefill_tokens_per_s == pytest.approx(width * one.prefill_tokens_per_s)


def test_more_devices_than_key_heads_keep_copies() -> None:
    """8 heads on 16 devices: each has a whole one."""
    eight = rates(
        on(model="Qwen3-8B", devices=32, rollout_devices=16, tensor_parallel=16, devices_per_node=16)
    )
    assert eight.engines.kv_tokens == int((16 * 80e9 - 16_381_470_720) / (2 * 147_456))


def test_devices_in_turn_serve_both_sides_at_the_cost_of_a_switch() -> None:
    """16 bytes a parameter over 8 devices are 15.2 GB, 0.238 s at 64 GB/s; the weights take 0.034 s."""
    apart, in_turn = rates(on(rollout_devices=4)), rates(on())
    assert (apart.engines.count, in_turn.engines.count) == (4, 8)
    assert in_turn.trainer.tokens_per_s == pytest.approx(2 * apart.trainer.tokens_per_s)
    assert (in_turn.engines.sleep_s, apart.trainer.swap_s) == (0.0, 0.0)
    assert in_turn.engines.wake_s == pytest.approx(0.034, abs=5e-4)
    assert in_turn.trainer.swap_s == pytest.approx(0.238, abs=5e-4)
    assert in_turn.trainer.early_swap_s == pytest.approx(0.238 / 4, abs=5e-4), "the weights alone"
    assert in_turn.trainer.publish_s == 0.0


@pytest.mark.parametrize(
    ("offload", "quarters", "early"),
    [
        ({}, 4, 1),
        ({"optimizer": "device"}, 2, 1),
        ({"weights": "device", "gradients": "device", "optimizer": "device"}, 0, 0),
    ],
)
def test_only_the_parts_that_leave_the_device_take_time(
    offload: dict[str, Any], quarters: int, early: int
) -> None:
    """The moments are half of the state."""
    trainer = rates(on("H200", memory_share=0.5, offload=OffloadSettings(**offload))).trainer
    quarter_s = 16 * 15_231_233_024 / 2 / 8 / 64e9 / 4
    assert trainer.swap_s == pytest.approx(quarters * quarter_s)
    assert trainer.early_swap_s == pytest.approx(early * quarter_s)


def test_each_replica_of_the_trainer_has_the_whole_state() -> None:
    one, two = (rates(on(trainer_replicas=num)).trainer for num in (1, 2))
    assert two.swap_s == pytest.approx(2 * one.swap_s)


def test_a_trainer_that_divides_layers_all_reduces_them_and_gathers_less() -> None:
    """In pairs, a token's hidden state of 7,168 bytes is reduced in 28 layers twice, forward, again
    and backward: 1.204 MB at 450 GB/s, on two pairs at a time; and a half of each layer is gathered."""
    one, two = (rates(on(rollout_devices=4, trainer_tensor_parallel=size)).trainer for size in (1, 2))
    reduced_s = 28 * 2 * 3 * 2 * 3584 / 450e9
    assert 1 / two.tokens_per_s - 1 / one.tokens_per_s == pytest.approx(reduced_s / 2, rel=1e-6)
    assert one.step_s - two.step_s == pytest.approx(3 * 15_231_233_024 / 450e9 / 2)
    assert two.attention_s == one.attention_s
    four = rates(on(rollout_devices=4, trainer_tensor_parallel=4, recompute_activations=False)).trainer
    kept = rates(on(rollout_devices=4, recompute_activations=False)).trainer
    reduced_s = 28 * 2 * 2 * 2 * 3584 * 2 * (3 / 4) / 450e9
    assert 1 / four.tokens_per_s - 1 / kept.tokens_per_s == pytest.approx(reduced_s, rel=1e-6)
    assert kept.step_s - four.step_s == pytest.approx(3 * 15_231_233_024 / 450e9), "nothing is gathered"


def test_the_tensor_parallel_size_of_the_trainer_is_that_of_the_config() -> None:
    cluster = {"model": "Qwen2.5-7B", "rollout_devices": 4}
    tree = RUN | {"sim": {"cluster": cluster}}
    found = [
        sim_settings(RunConfig.model_validate(tree | {"trainer": {"tensor_parallel": size}})).trainer
        for size in (1, 2)
    ]
    assert found[0].tokens_per_s > found[1].tokens_per_s


def test_what_the_trainer_keeps_and_an_engine_takes_must_fit_one_device() -> None:
    """A device of 40 GB has 15.2 GB of the state: 7.6 GB of moments, beside 36 GB of the engine."""
    cluster = on("A100-40G", memory_share=0.9)
    assert memory_shares(cluster.cluster)[1] == pytest.approx(0.9)
    kept = on("A100-40G", memory_share=0.9, offload=OffloadSettings(optimizer="device"))
    assert memory_shares(kept.cluster)[1] == pytest.approx((36e9 + 15_231_233_024 / 2) / 40e9)
    held = "while generating, a device holds engine 33.5 GiB and trainer 7.1 GiB, and has 37.3 GiB; write"
    with pytest.raises(ConfigError, match=held):
        rates(kept)


def test_a_value_of_the_config_wins_and_filling_twice_changes_nothing() -> None:
    settings = on(rollout_devices=4).changed(
        engines=SimEngineSettings(base_s=0.5), trainer=SimTrainerSettings(tokens_per_s=7.0)
    )
    filled = rates(settings)
    assert (filled.engines.base_s, filled.trainer.tokens_per_s) == (0.5, 7.0)
    assert filled.engines.compute_s > 0
    assert rates(filled) == filled
    assert rates(SimSettings()) == SimSettings()


def test_a_resolved_config_leaves_open_what_follows_from_the_cluster() -> None:
    config = RunConfig.model_validate(
        RUN | {"sim": {"cluster": {"model": "Qwen3-4B", "rollout_devices": 4}, "engines": {"base_s": 0.5}}}
    )
    again = RunConfig.model_validate_json(config.to_json())
    assert sim_settings(again) == sim_settings(config)
    assert again.sim.engines.model_fields_set == {"base_s"}


def test_a_model_folder_is_read(tmp_path: Path) -> None:
    """The numbers of Qwen3-1.7B, from a folder with an empty weight file."""
    known = MODELS["Qwen3-1.7B"]
    config = {
        "hidden_size": known.hidden_size,
        "intermediate_size": known.mlp_size,
        "num_hidden_layers": known.num_layers,
        "num_attention_heads": known.num_heads,
        "num_key_value_heads": known.num_kv_heads,
        "head_dim": known.head_size,
        "vocab_size": known.vocabulary,
        "max_position_embeddings": known.context_tokens,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.zeros(8, np.float16)}, tmp_path / "model.safetensors")
    read = replace(known, num_parameters=8, block_parameters=0, outside_parameters=8)
    assert ModelShape.read(tmp_path) == read
    cluster = on(device="CPU", model=str(tmp_path), rollout_devices=4)
    assert rates(cluster).engines.base_s == 16 / 307.2e9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            on(device="H10"),
            "sim.cluster.device = 'H10': there is no profile of this name; choose from A100-40G",
        ),
        (
            on(model="Qwen"),
            "sim.cluster.model = 'Qwen': it is neither the name of a known model nor a folder",
        ),
        (on(rollout_devices=8), "all 8 devices would generate, and none would train"),
        (
            on(rollout_devices=4, tensor_parallel=3),
            "4 devices that generate cannot form engines of 3 devices each; choose a divisor of 4",
        ),
        (
            on(devices=12, tensor_parallel=3),
            "the 3 devices of an engine cannot share 28 attention heads equally",
        ),
        (on(devices=32, tensor_parallel=14, devices_per_node=8), "cannot form engines of 14 devices each"),
        (on(devices=28, tensor_parallel=14), "a node has 8 devices"),
        (
            on(rollout_devices=4, trainer_replicas=2, trainer_tensor_parallel=4),
            "sim.cluster.trainer_tensor_parallel = 4: 4 devices cannot divide the layers of a replica of 2",
        ),
        (
            on(devices=12, rollout_devices=4, trainer_tensor_parallel=8),
            "the 8 devices cannot share 28 attention heads equally; choose a divisor of 28",
        ),
        (
            on("RTX 4090", "Qwen2.5-14B", rollout_devices=4),
            "its weights take 27.5 GiB, but an engine on 1 x RTX 4090 has 22.4 GiB; raise tensor_parallel",
        ),
        (
            on("A100-40G", rollout_devices=6),
            "the trainer holds 113.5 GiB, but 2 x A100-40G have 74.5 GiB; give the trainer more devices",
        ),
        (
            on(model="Qwen3-4B").changed(lengths=SimLengthSettings(max_tokens=50_000)),
            "a sequence has up to 50100 tokens, but the model's context has 40960",
        ),
        (
            on("RTX 4090", memory_share=0.65).changed(lengths=SimLengthSettings(max_tokens=10_000)),
            "a sequence has up to 10100 tokens, but the KV cache of one engine has 6430 positions",
        ),
        (
            on("RTX 4090", memory_share=0.65).changed(
                lengths=SimLengthSettings(max_tokens=100), engines=SimEngineSettings(slots=100)
            ),
            "so many requests have at least 10100 positions, but the KV cache of one engine has 6430; choose"
            " at most 63",
        ),
    ],
)
def test_an_impossible_set_up_is_refused_with_its_numbers(settings: SimSettings, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rates(settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(("kind", "rollout_devices"), [("colocated", 4), ("disaggregated", None)])
def test_the_placement_must_be_that_of_the_cluster(kind: str, rollout_devices: int | None) -> None:
    cluster = {"model": "Qwen3-4B", "rollout_devices": rollout_devices}
    config = RunConfig.model_validate(RUN | {"placement": {"kind": kind}, "sim": {"cluster": cluster}})
    with pytest.raises(ConfigError, match=r"placement.kind = .*in \[sim.cluster\]"):
        sim_settings(config)


@pytest.mark.parametrize(("changes", "num"), [({}, 4), ({"tensor_parallel": 2}, 2)])
def test_transfers_to_each_engine_take_as_often_as_long_as_one_broadcast_to_all(
    changes: dict[str, int], num: int
) -> None:
    one, each = (
        rates(on(devices=8, rollout_devices=4, weight_groups=groups, **changes)).engines.load_s
        for groups in (None, "each")
    )
    assert one == rates(on(devices=8, rollout_devices=4, weight_groups="one", **changes)).engines.load_s
    assert each == num * one
