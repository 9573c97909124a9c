"""Rates of engines and trainer, computed from devices and a model.

A decode step reads the weights once (base_s) and the KV cache (context_s), or computes (compute_s), whichever
bounds it, and all-reduces twice a layer over the devices of the engine. Prefill and training are bound by
arithmetic: 2 FLOPs a parameter and token forward, 4 backward (Kaplan et al., 2020, section 2.1), and in
training for attention, too: a token meets half of its sequence on average, with 4 FLOPs a layer and dimension
of the queries (the same section). A prefill counts the projection to the vocabulary at each position; so a
verification adds only the draw, which is bound by memory. Left out are attention and communication of a
prefill, and activations in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, log2
from pathlib import Path
from typing import Any, TypeVar

from tailrace.contracts.memory import STATE_BYTES, ModelShape, ProcessMemory, gib, in_turn
from tailrace.contracts.trainer import OffloadSettings, Place
from tailrace.errors import ConfigError
from tailrace.settings import Settings
from tailrace.sim.device_profiles import TABLE, DeviceProfile, device_of
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, SimClusterSettings, SimSettings

BYTES_PER_WEIGHT = 2
"""Engines hold weights and KV cache in bfloat16."""


def multiplied_parameters(model: ModelShape) -> int:
    """Parameters of the matrices of one layer with which each token is multiplied."""
    attention = 2 * model.hidden_size * (model.query_size + model.kv_size)
    return attention + 3 * model.hidden_size * model.mlp_size


def _known(*sizes: int) -> ModelShape:
    """A model with a head of its own; experts make its blocks larger than what a token is multiplied with."""
    shape = ModelShape(*sizes)
    outside = 2 * shape.vocabulary * shape.hidden_size
    of_all = (shape.num_parameters - outside) // shape.num_layers
    block = multiplied_parameters(shape)
    return replace(
        shape, block_parameters=of_all if of_all > 2 * block else block, outside_parameters=outside
    )


MODELS: Mapping[str, ModelShape] = {name: _known(*sizes) for name, sizes in TABLE["models"].items()}
"""Models of the papers and of published measurements."""

S = TypeVar("S", bound=Settings)

ALL_REDUCES = 2
"""All-reduces of each layer, forward (Shoeybi et al., Megatron-LM, 2019, section 3)."""
OPTIMIZER_BYTES = 30
"""Bytes that a step of Adam reads and writes for each parameter: weight, momentum and variance in float32
(24), the gradient (4) and the weight in bfloat16 (2)."""
DRAW_BYTES = 20
"""Bytes that a draw reads and writes for each token of the vocabulary: its logit in bfloat16 (4) and float32
(8), its probability (8; sampler.py of the embedded engine)."""
UPDATE_S = 0.19e-9
"""Seconds of an optimizer step for each parameter (`SimClusterSettings.update_s`)."""
RESTART_S = 10.0
"""Seconds of an engine's restart without its weights. Assumed."""


def rates(settings: SimSettings) -> SimSettings:
    """Fill every field of engines and trainer that the settings leave open from [sim.cluster].

    Settings without a cluster are returned as they are. Raises a ConfigError if the model does not fit its
    devices, the devices cannot be divided as asked, or a response is longer than the context or the KV cache.
    """
    if settings.cluster is None:
        return settings
    setup = _Setup.of(settings.cluster)
    setup.check_devices()
    setup.check_memory()
    engines = _filled(settings.engines, setup.engine_rates())
    training = setup.trainer_rates()
    if "tokens_per_s" in settings.trainer.model_fields_set:
        training["attention_s"] = 0.0  # a rate that is given has it
    trainer = _filled(settings.trainer, training)
    filled = settings.changed(engines=engines, trainer=trainer)
    _check_lengths(filled, setup.model)
    return filled


def memory_shares(cluster: SimClusterSettings) -> tuple[float, float]:
    """Return the share of its devices' memory that the trainer's state fills, and the largest share of a
    device that is filled, by engines, trainer, or what both hold in turn. Raises a ConfigError if there is no
    such device or model."""
    setup = _Setup.of(cluster)
    filled = max(sum(each.device_bytes for each in turn) for turn in setup.on_a_device().values())
    return setup.state_bytes / setup.training_memory, filled / setup.device.memory_bytes


def _filled(section: S, found: Mapping[str, Any]) -> S:
    given = section.model_fields_set
    return section.changed(**{key: value for key, value in found.items() if key not in given})


def model_of(key: str, name: str | None) -> ModelShape:
    """Return a known model, or the one of a folder. Raises a ConfigError if there is no such model. `key`:
    that names it in the config."""
    if name is not None and name in MODELS:
        return MODELS[name]
    if name is None or not Path(name).is_dir():
        problem = "it is neither the name of a known model nor a folder"
        raise ConfigError(key, name, problem, f"choose from {', '.join(MODELS)}, or name a model folder")
    return ModelShape.read(Path(name))


@dataclass(frozen=True, slots=True)
class _Setup:
    """A model on the devices of a cluster."""

    cluster: SimClusterSettings
    device: DeviceProfile
    model: ModelShape

    @classmethod
    def of(cls, cluster: SimClusterSettings) -> "_Setup":
        return cls(cluster, device_of(cluster), model_of("sim.cluster.model", cluster.model))

    @property
    def generating(self) -> int:
        return self.cluster.rollout_devices or self.cluster.devices

    @property
    def training(self) -> int:
        return self.cluster.devices - (self.cluster.rollout_devices or 0)

    @property
    def training_memory(self) -> float:
        return self.training * self.device.memory_bytes

    @property
    def state_bytes(self) -> float:
        num = self.model.num_parameters * (self.cluster.trainer_replicas or 1)
        return self.cluster.trainer_bytes_per_parameter * num

    @property
    def trainer_size(self) -> int:
        """Devices that divide each layer of the trainer."""
        return self.cluster.trainer_tensor_parallel or 1

    @property
    def offload(self) -> OffloadSettings:
        return self.cluster.offload or OffloadSettings()

    @property
    def places(self) -> dict[str, Place]:
        """Place of each part while engines generate. The host's memory is that of a CPU."""
        stays = self.cluster.device == "CPU"
        found = self.offload.places()
        return {part: "device" if place == "host" and stays else place for part, place in found.items()}

    def state(self) -> dict[str, int]:
        """The parts of the trainer's state on one of its devices."""
        of_device, whole = self.state_bytes / self.training, sum(STATE_BYTES.values())
        return {part: int(of_device * size / whole) for part, size in STATE_BYTES.items()}

    def on_a_device(self) -> dict[str, list[ProcessMemory]]:
        """The memory that is held on one device, in each turn. Left out are activations."""
        name, state = self.cluster.device, self.state()
        stays = {part: size for part, size in state.items() if self.places[part] == "device"}
        taken = {"weights and KV cache": int(self.cluster.memory_share * self.device.memory_bytes)}
        engine = ProcessMemory("engine", name, taken, {})
        trainer = ProcessMemory("trainer", name, state, {}, asleep=stays)
        if self.cluster.rollout_devices:
            return {"generating": [engine], "training": [trainer]}
        return in_turn([engine, trainer])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model as engines hold it."""
        return BYTES_PER_WEIGHT * self.model.num_parameters

    @property
    def multiplied(self) -> int:
        """Parameters that each token is multiplied with: all matrices but the embedding of its input."""
        model = self.model
        return model.num_layers * multiplied_parameters(model) + model.hidden_size * model.vocabulary

    @property
    def engine_memory(self) -> float:
        return self.cluster.tensor_parallel * self.device.memory_bytes * self.cluster.memory_share

    def link(self, num_devices: int) -> float:
        """Return the bytes a second between devices, of which the first nodes are filled."""
        rate = self.device.link_bytes_per_s
        if num_devices > self.cluster.devices_per_node:
            rate = min(rate, self.cluster.network_bytes_per_s)
        return rate * self.cluster.link_efficiency

    def engine_rates(self) -> dict[str, Any]:
        cluster, device, model = self.cluster, self.device, self.model
        size = cluster.tensor_parallel
        memory = size * device.bytes_per_s * cluster.bandwidth_efficiency
        arithmetic_s = 2 * self.multiplied / (size * device.flops)
        prefilled_per_s = cluster.prefill_efficiency / arithmetic_s
        all_reduces = ALL_REDUCES * model.num_layers
        hop_s = all_reduces * device.link_latency_s
        reduced = all_reduces * BYTES_PER_WEIGHT * model.hidden_size * 2
        # Each device of an engine has at least one whole head of the KV cache.
        kv_bytes = model.kv_bytes(BYTES_PER_WEIGHT) * max(1.0, size / model.num_kv_heads)
        reload_s = self.weight_bytes / size / (device.host_bytes_per_s * cluster.link_efficiency)
        return {
            "count": self.generating // size,
            "base_s": self.weight_bytes / memory,
            "compute_s": arithmetic_s / cluster.decode_efficiency,
            "context_s": kv_bytes / memory,
            "slope_s": reduced * (size - 1) / size / self.link(size),
            "reduce_s": reduced / self.link(size),
            "overhead_s": cluster.overhead_s + hop_s * log2(size),
            "overhead_per_request_s": cluster.overhead_per_request_s,
            "communication_s": hop_s,
            "kv_tokens": int((self.engine_memory - self.weight_bytes) / kv_bytes),
            "weight_tokens": int(self.weight_bytes / kv_bytes),
            "prefill_tokens_per_s": prefilled_per_s,
            "verify_positions": DRAW_BYTES * model.vocabulary / memory * prefilled_per_s,
            "regroup_s": RESTART_S + reload_s,
            **self._switch_s(),
        }

    def _switch_s(self) -> dict[str, float]:
        """Return the costs of new weights, and of engines that sleep and wake. In turn, the new weights reach
        them when they wake."""
        if self.cluster.rollout_devices:
            return {"load_s": self._send_s()}
        gather_s = self.weight_bytes / self.link(self.cluster.devices)
        return {"load_s": gather_s, "sleep_s": 0.0, "wake_s": gather_s}

    def _swap_s(self, *parts: str) -> float:
        """Return the time in which parts of the trainer's state leave all its devices, or come back."""
        cluster, state, places = self.cluster, self.state(), self.places
        rates = {
            "device": inf,
            "host": self.device.host_bytes_per_s * cluster.link_efficiency,
            "disk": cluster.filesystem_bytes_per_s / min(self.training, cluster.devices_per_node),
        }
        return sum(state[part] / rates[places[part]] for part in parts)

    def _send_s(self) -> float:
        """Return the time in which the weights reach all engines: by one pipelined broadcast, or by a
        transfer to each, all of which leave over one link."""
        if self.cluster.transport == "filesystem":
            return self.weight_bytes / self.cluster.filesystem_bytes_per_s
        num = self.generating // self.cluster.tensor_parallel if self.cluster.weight_groups == "each" else 1
        return num * self.weight_bytes / self.link(self.cluster.devices)

    def _activations_s(self) -> float:
        """Return the time of a token's all-reduces on devices that divide the layers: of its hidden state, as
        often as engines do for each forward pass, its repetition, and the backward pass (Shoeybi et al.,
        Megatron-LM, 2019, section 3). A ring of N moves 2 (N - 1) / N times that."""
        cluster, model, size = self.cluster, self.model, self.trainer_size
        times = ALL_REDUCES * model.num_layers * (3 if cluster.recompute_activations else 2)
        reduced = times * BYTES_PER_WEIGHT * model.hidden_size
        return reduced * 2 * (size - 1) / size / self.link(size)

    def trainer_rates(self) -> dict[str, float]:
        """All state is sharded over the trainer's devices. A step reduces gradients and gathers weights, of
        the part of each layer that a device has."""
        cluster, device, model, num = self.cluster, self.device, self.model, self.training
        passes = 4 if cluster.recompute_activations else 3  # in forward passes; backward is two
        flops_per_s = num * device.flops * cluster.training_efficiency
        attention = 2 * model.num_layers * model.query_size
        update_s = UPDATE_S * model.num_parameters if cluster.update_s is None else cluster.update_s
        optimizer_s = (
            OPTIMIZER_BYTES * model.num_parameters / (num * device.bytes_per_s * cluster.bandwidth_efficiency)
        ) * (cluster.trainer_replicas or 1)
        gather_s = self.weight_bytes / self.link(num) if num > 1 else 0.0
        write_s = self._send_s() if cluster.transport == "filesystem" else 0.0
        # gradients in float32, weights in bfloat16
        size = self.trainer_size
        exchange_s = 3 * self.weight_bytes / size / self.link(num) if num > size else 0.0
        tokens_per_s = flops_per_s / (2 * passes * self.multiplied)
        swaps = {"swap_s": self._swap_s(*STATE_BYTES), "early_swap_s": self._swap_s("weights")}
        return ({} if cluster.rollout_devices else swaps) | {
            "tokens_per_s": tokens_per_s / (1 + tokens_per_s * self._activations_s() * size / num),
            "attention_s": passes * attention / flops_per_s,
            "step_s": optimizer_s + exchange_s + update_s,
            "publish_s": gather_s + write_s if cluster.rollout_devices else 0.0,
        }

    def check_devices(self) -> None:
        size, num = self.cluster.tensor_parallel, self.cluster.devices
        if self.training < 1:
            problem = f"all {num} devices would generate, and none would train"
            remedy = f"choose fewer than {num}, or leave it out so that all generate and train in turn"
            raise ConfigError("sim.cluster.rollout_devices", self.generating, problem, remedy)
        heads, rollout, own = self.model.num_heads, self.generating, self.trainer_size
        each = self.training // (self.cluster.trainer_replicas or 1)
        divided = (
            (
                "",
                size,
                rollout,
                f"{rollout} devices that generate cannot form engines of {size} devices each",
            ),
            (
                "",
                size,
                heads,
                f"the {size} devices of an engine cannot share {heads} attention heads equally",
            ),
            ("trainer_", own, each, f"{own} devices cannot divide the layers of a replica of {each} devices"),
            ("trainer_", own, heads, f"the {own} devices cannot share {heads} attention heads equally"),
        )
        for owner, of, number, problem in divided:
            if number % of:
                remedy = f"choose a divisor of {number}"
                raise ConfigError(f"sim.cluster.{owner}tensor_parallel", of, problem, remedy)
        if size > self.cluster.devices_per_node:
            problem = f"a node has {self.cluster.devices_per_node} devices"
            raise ConfigError("sim.cluster.tensor_parallel", size, problem, "an engine must be on one node")

    def check_memory(self) -> None:
        key, name, device = "sim.cluster.model", self.cluster.model, self.cluster.device
        weights, size, num = self.weight_bytes, self.cluster.tensor_parallel, self.training
        if weights >= self.engine_memory:
            room = f"an engine on {size} x {device} has {gib(self.engine_memory)}"
            raise ConfigError(
                key, name, f"its weights take {gib(weights)}, but {room}", "raise tensor_parallel"
            )
        if self.state_bytes > self.training_memory:
            room = f"{num} x {device} have {gib(self.training_memory)}"
            problem = f"the trainer holds {gib(self.state_bytes)}, but {room}"
            raise ConfigError(key, name, problem, "give the trainer more devices")
        for turn, held in self.on_a_device().items():
            if sum(each.device_bytes for each in held) > self.device.memory_bytes:
                parts = " and ".join(f"{each.name} {gib(each.device_bytes)}" for each in held)
                problem = f"while {turn}, a device holds {parts}, and has {gib(self.device.memory_bytes)}"
                remedy = 'write "host" for more parts of [trainer.offload], or lower sim.cluster.memory_share'
                raise ConfigError("sim.cluster.memory_share", self.cluster.memory_share, problem, remedy)


def _check_lengths(settings: SimSettings, model: ModelShape) -> None:
    lengths = settings.lengths
    limit = lengths.max_tokens or DEFAULT_MAX_TOKENS
    total = lengths.prompt_tokens + limit
    words = f"with prompts of {lengths.prompt_tokens} a sequence has up to {total} tokens"
    if total > model.context_tokens:
        problem = f"{words}, but the model's context has {model.context_tokens}"
        raise ConfigError("sim.lengths.max_tokens", limit, problem, "lower it")
    room = settings.engines.kv_tokens
    cache = f"the KV cache of one engine has {room}"
    if total > room:
        problem = f"{words}, but {cache} positions"
        raise ConfigError("sim.lengths.max_tokens", limit, problem, "lower it, or raise tensor_parallel")
    slots, least = settings.engines.slots or 0, lengths.prompt_tokens + 1
    if slots * least > room:
        problem = f"so many requests have at least {slots * least} positions, but {cache}"
        raise ConfigError("sim.engines.slots", slots, problem, f"choose at most {room // least}")
