"""From devices and a model to the rates of engines and trainer.

A decode step reads the weights once (base_s) and the KV cache (context_s), or computes (compute_s), whichever
bounds it, and all-reduces twice a layer over the devices of the engine. Prefill and training are bound by
arithmetic: 2 FLOPs a parameter and token forward, 4 backward (Kaplan et al., 2020, section 2.1). Left out are
the FLOPs of attention over the context, the communication of a prefill, and activations in memory.
"""

from collections.abc import Mapping
from math import log2
from pathlib import Path
from typing import Any, TypeVar

from tailrace.errors import ConfigError
from tailrace.memory import gib
from tailrace.settings import Settings
from tailrace.sim.profiles import BYTES_PER_WEIGHT, MODELS, PROFILES, Device, Model
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, SimClusterSettings, SimSettings

S = TypeVar("S", bound=Settings)

ALL_REDUCES = 2
"""In each layer, forward (Shoeybi et al., Megatron-LM, 2019, section 3)."""
OPTIMIZER_BYTES = 30
"""That a step of Adam reads and writes for each parameter: weight, momentum and variance in float32 (24), the
gradient (4) and the weight in bfloat16 (2)."""
RESTART_S = 10.0
"""Seconds of an engine's restart without its weights. Assumed."""


def rates(settings: SimSettings) -> SimSettings:
    """Fill every field of engines and trainer that the settings leave open from [sim.cluster].

    Settings without a cluster are returned as they are.

    Raises:
        ConfigError: the model does not fit its devices, the devices cannot be divided as asked, or a response
            is longer than the context or the KV cache.
    """
    cluster = settings.cluster
    if cluster is None:
        return settings
    device, model = device_of(cluster), model_of("sim.cluster.model", cluster.model)
    _check_devices(cluster, model)
    _check_memory(cluster, device, model)
    engines = _filled(settings.engines, _engine_rates(cluster, device, model))
    filled = settings.model_copy(
        update={
            "engines": engines,
            "trainer": _filled(settings.trainer, _trainer_rates(cluster, device, model)),
        }
    )
    _check_lengths(filled, model)
    return filled


def trainer_memory_share(cluster: SimClusterSettings) -> float:
    """Return the share of its devices' memory that the trainer's state fills.

    Raises:
        ConfigError: there is no such device or model.
    """
    device, model = device_of(cluster), model_of("sim.cluster.model", cluster.model)
    return _state_bytes(cluster, model) / _training_memory(cluster, device)


def _filled(section: S, found: Mapping[str, Any]) -> S:
    return section.model_copy(
        update={key: value for key, value in found.items() if key not in section.model_fields_set}
    )


def device_of(cluster: SimClusterSettings) -> Device:
    """
    Raises:
        ConfigError: there is no such profile.
    """
    if cluster.device not in PROFILES:
        problem = "there is no profile of this name"
        raise ConfigError("sim.cluster.device", cluster.device, problem, f"choose from {', '.join(PROFILES)}")
    return PROFILES[cluster.device]


def model_of(key: str, name: str | None) -> Model:
    """Return a known model, or the one of a folder.

    Args:
        key: that names it in the config.

    Raises:
        ConfigError: there is no such model.
    """
    if name is not None and name in MODELS:
        return MODELS[name]
    if name is None or not Path(name).is_dir():
        problem = "it is neither the name of a known model nor a folder"
        raise ConfigError(key, name, problem, f"choose from {', '.join(MODELS)}, or name a model folder")
    return Model.read(Path(name))


def _generating(cluster: SimClusterSettings) -> int:
    return cluster.rollout_devices or cluster.devices


def _training(cluster: SimClusterSettings) -> int:
    return cluster.devices - (cluster.rollout_devices or 0)


def _link(cluster: SimClusterSettings, device: Device, num_devices: int) -> float:
    """Return the bytes a second between devices, of which the first nodes are filled."""
    rate = device.link_bytes_per_s
    if num_devices > cluster.devices_per_node:
        rate = min(rate, cluster.network_bytes_per_s)
    return rate * cluster.link_efficiency


def _engine_rates(cluster: SimClusterSettings, device: Device, model: Model) -> dict[str, Any]:
    size = cluster.tensor_parallel
    memory = size * device.bytes_per_s * cluster.bandwidth_efficiency
    arithmetic_s = 2 * model.multiplied_parameters / (size * device.flops)
    all_reduces = ALL_REDUCES * model.num_layers
    hop_s = all_reduces * device.link_latency_s
    reduced = all_reduces * BYTES_PER_WEIGHT * model.hidden_size * 2 * (size - 1) / size
    kv_bytes = _kv_bytes(model, size)
    reload_s = model.weight_bytes / size / (device.host_bytes_per_s * cluster.link_efficiency)
    return {
        "count": _generating(cluster) // size,
        "base_s": model.weight_bytes / memory,
        "compute_s": arithmetic_s / cluster.decode_efficiency,
        "context_s": kv_bytes / memory,
        "slope_s": reduced / _link(cluster, device, size),
        "overhead_s": cluster.overhead_s + hop_s * log2(size),
        "communication_s": hop_s,
        "kv_tokens": int(_kv_room(cluster, device, model) / kv_bytes),
        "weight_tokens": int(model.weight_bytes / kv_bytes),
        "prefill_tokens_per_s": cluster.prefill_efficiency / arithmetic_s,
        "regroup_s": RESTART_S + reload_s,
        **_switch_s(cluster, device, model),
    }


def _switch_s(cluster: SimClusterSettings, device: Device, model: Model) -> dict[str, float]:
    """Return the costs of new weights and of the change between generating and training.

    In turn, the trainer's state waits in the host's memory while engines generate. The new weights reach the
    engines when they wake.
    """
    if cluster.rollout_devices:
        return {"load_s": _send_s(cluster, device, model)}
    swap_s = (
        _state_bytes(cluster, model) / cluster.devices / (device.host_bytes_per_s * cluster.link_efficiency)
    )
    gather_s = model.weight_bytes / _link(cluster, device, cluster.devices)
    return {"load_s": gather_s, "sleep_s": swap_s, "wake_s": swap_s + gather_s}


def _send_s(cluster: SimClusterSettings, device: Device, model: Model) -> float:
    """Return the time in which the weights reach all engines, as a pipelined broadcast."""
    if cluster.transport == "filesystem":
        return model.weight_bytes / cluster.filesystem_bytes_per_s
    return model.weight_bytes / _link(cluster, device, cluster.devices)


def _trainer_rates(cluster: SimClusterSettings, device: Device, model: Model) -> dict[str, float]:
    """All state is sharded over the trainer's devices. A step reduces gradients and gathers the weights."""
    num = _training(cluster)
    flops = (8 if cluster.recompute_activations else 6) * model.multiplied_parameters
    link = _link(cluster, device, num)
    optimizer_s = (
        OPTIMIZER_BYTES * model.num_parameters / (num * device.bytes_per_s * cluster.bandwidth_efficiency)
    )
    exchange_s = 3 * model.weight_bytes / link if num > 1 else 0.0  # float32 gradients, bfloat16 weights
    gather_s = model.weight_bytes / link if cluster.rollout_devices and num > 1 else 0.0
    write_s = _send_s(cluster, device, model) if cluster.transport == "filesystem" else 0.0
    return {
        "tokens_per_s": num * device.flops * cluster.training_efficiency / flops,
        "step_s": optimizer_s + exchange_s,
        "publish_s": gather_s + (write_s if cluster.rollout_devices else 0.0),
    }


def _kv_bytes(model: Model, size: int) -> float:
    """Return the bytes of one position on all devices of an engine. A device has at least one whole head."""
    return model.kv_bytes * max(1.0, size / model.num_kv_heads)


def _kv_room(cluster: SimClusterSettings, device: Device, model: Model) -> float:
    return cluster.tensor_parallel * device.memory_bytes * cluster.memory_share - model.weight_bytes


def _state_bytes(cluster: SimClusterSettings, model: Model) -> float:
    return cluster.trainer_bytes_per_parameter * model.num_parameters


def _training_memory(cluster: SimClusterSettings, device: Device) -> float:
    return _training(cluster) * device.memory_bytes


def _check_devices(cluster: SimClusterSettings, model: Model) -> None:
    size, generating = cluster.tensor_parallel, _generating(cluster)
    if _training(cluster) < 1:
        problem = f"all {cluster.devices} devices would generate, and none would train"
        remedy = (
            f"choose fewer than {cluster.devices}, or leave it out so that all generate and train in turn"
        )
        raise ConfigError("sim.cluster.rollout_devices", generating, problem, remedy)
    for what, number in (
        ("devices that generate", generating),
        ("attention heads of the model", model.num_heads),
    ):
        if number % size:
            problem = f"the {number} {what} cannot be divided by it"
            raise ConfigError("sim.cluster.tensor_parallel", size, problem, f"choose a divisor of {number}")
    if size > cluster.devices_per_node:
        problem = f"a node has {cluster.devices_per_node} devices"
        raise ConfigError("sim.cluster.tensor_parallel", size, problem, "an engine must be on one node")


def _check_memory(cluster: SimClusterSettings, device: Device, model: Model) -> None:
    name, size = cluster.model, cluster.tensor_parallel
    room = size * device.memory_bytes * cluster.memory_share
    if _kv_room(cluster, device, model) <= 0:
        problem = (
            f"its weights take {gib(model.weight_bytes)}, but an engine on {size} x {cluster.device} has"
        )
        raise ConfigError("sim.cluster.model", name, f"{problem} {gib(room)}", "raise tensor_parallel")
    state, room = _state_bytes(cluster, model), _training_memory(cluster, device)
    if state > room:
        num = _training(cluster)
        problem = f"the trainer holds {gib(state)}, but {num} x {cluster.device} have {gib(room)}"
        raise ConfigError("sim.cluster.model", name, problem, "give the trainer more devices")


def _check_lengths(settings: SimSettings, model: Model) -> None:
    lengths = settings.lengths
    limit = lengths.max_tokens or DEFAULT_MAX_TOKENS
    total = lengths.prompt_tokens + limit
    words = f"with prompts of {lengths.prompt_tokens} a sequence has up to {total} tokens"
    if total > model.context_tokens:
        problem = f"{words}, but the model's context has {model.context_tokens}"
        raise ConfigError("sim.lengths.max_tokens", limit, problem, "lower it")
    if total > settings.engines.kv_tokens:
        problem = f"{words}, but the KV cache of one engine has {settings.engines.kv_tokens} positions"
        raise ConfigError("sim.lengths.max_tokens", limit, problem, "lower it, or raise tensor_parallel")
    slots, least = settings.engines.slots or 0, lengths.prompt_tokens + 1
    if slots * least > settings.engines.kv_tokens:
        problem = (
            f"so many requests have at least {slots * least} positions, but the KV cache of one engine has"
        )
        remedy = f"choose at most {settings.engines.kv_tokens // least}"
        problem = f"{problem} {settings.engines.kv_tokens}"
        raise ConfigError("sim.engines.slots", slots, problem, remedy)
