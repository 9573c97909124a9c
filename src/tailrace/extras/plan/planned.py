"""The config of a live run on the devices of [sim.cluster], as it divides them."""

from collections.abc import Mapping
from contextlib import suppress
from math import gcd
from pathlib import Path
from typing import Any

from tailrace.config import RunConfig
from tailrace.drivers.assembly.machine import CHOSEN_SHARE
from tailrace.drivers.assembly.simulation import sim_sampling
from tailrace.drivers.kinds.torch import trainer_memory
from tailrace.drivers.trainer.plans import check_tensor_parallel
from tailrace.errors import ConfigError
from tailrace.extras.http.settings import VllmEngineSettings
from tailrace.kinds import kind_of
from tailrace.rollout.placement import DeviceSharing, Kind
from tailrace.sim.cluster import model_of
from tailrace.sim.device_profiles import device_of
from tailrace.sim.settings import SimClusterSettings

TAGS = ("kind", "transport")
"""Keys that select the class of a section."""


def changes_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings that a config sets to other values than their defaults, and the kinds that it
    names."""
    given = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return _changed(given, config.model_dump(mode="json", exclude_defaults=True))


def _changed(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in given.items():
        if isinstance(value, dict) and (inner := _changed(value, others.get(key, {}))):
            found[key] = inner
        elif not isinstance(value, dict) and (key in others or key in TAGS):
            found[key] = value
    return found


def chooses_server(config: RunConfig) -> bool:
    """Whether the config leaves the kind of its engines open on GPUs, whose rates in [sim.cluster] are those
    of a server."""
    given, cluster = config.engine.model_fields_set, config.sim.cluster
    is_open = "kind" not in given and given <= VllmEngineSettings.model_fields.keys()
    return is_open and cluster is not None and cluster.device != "CPU"


def least_tensor_parallel(config: RunConfig, cluster: SimClusterSettings) -> int:
    """Return `trainer.tensor_parallel`: as the config sets it, else the fewest GPUs of a node with which the
    state and a pass over the longest sample fit. Shards of FSDP gather whole layers and compute whole
    samples, so more of them do not help there; each layer is all-reduced, so more than needed are slower."""
    given, (generating, training) = config.trainer.tensor_parallel, cluster.devices_by_use
    if "tensor_parallel" in config.trainer.model_fields_set or cluster.device == "CPU":
        return given
    name, device = cluster.model or str(config.model and config.model.path), device_of(cluster)
    shape, replicas = model_of("sim.cluster.model", name), cluster.trainer_replicas or 1
    longest = config.sim.lengths.prompt_tokens + sim_sampling(config).max_completion_tokens
    num = (training or generating) // replicas
    sizes = gcd(num, cluster.devices_per_node, shape.num_heads, shape.num_kv_heads, shape.mlp_size)
    for size in (each for each in range(1, sizes + 1) if sizes % each == 0):
        with suppress(ConfigError, ImportError):  # no plan, or no transformers to tell
            if Path(name).is_dir():
                check_tensor_parallel(Path(name), size)
            changes = {"ranks": num // size, "tensor_parallel": size, "replicas": replicas, "device": "cuda"}
            changes |= {"activation_checkpointing": cluster.recompute_activations, "dtype": "bfloat16"}
            trainer = config.trainer.changed(max_tokens_per_microbatch=longest, **changes)
            held = trainer_memory(config.changed(trainer=trainer), shape, longest)
            if held.device_bytes <= CHOSEN_SHARE * device.memory_bytes:
                return size
    return given


def on_cluster(config: RunConfig, cluster: SimClusterSettings, placement: Kind) -> dict[str, dict[str, Any]]:
    """Return the settings of engines, trainer and placement that differ where they have the devices of a
    cluster, as it divides them. On GPUs engines whose kind is open are vLLM's. A cluster of several nodes is
    one of Ray; in turn its devices are left to the config."""
    generating, training = cluster.devices_by_use
    size, replicas, on_gpu = cluster.tensor_parallel, cluster.trainer_replicas or 1, cluster.device != "CPU"
    kind = "vllm" if chooses_server(config) else config.engine.kind
    divided = least_tensor_parallel(config, cluster)
    ranks = (training or generating) // replicas // divided
    trainer: dict[str, Any] = {"ranks": ranks, "replicas": replicas}
    if divided > 1:
        trainer["tensor_parallel"] = divided
    engine: dict[str, Any] = {"kind": kind, "replicas": generating // size, "tensor_parallel_size": size}
    if slots := config.sim.engines.slots:
        engine["max_num_seqs"] = slots
    if on_gpu:
        trainer |= {"device": "cuda", "activation_checkpointing": cluster.recompute_activations}
        engine |= {"device": "cuda"}
    for section, theirs in ((engine, config.engine), (trainer, config.trainer)):
        if "dtype" not in theirs.model_fields_set:
            section["dtype"] = "bfloat16"
    args = getattr(config.engine, "args", ())
    known = kind_of("engine", kind).settings
    if DeviceSharing(placement).takes_turns and (missing := {*known.sleep_args} - {*args}):
        engine["args"] = [*args, *missing]
    given = config.engine.resources  # servers to join have their devices
    sections = {"engine": {key: engine[key] for key in engine if given and key in known.model_fields}}
    sections |= {"trainer": trainer, "placement": {"kind": placement}}
    if on_gpu and cluster.devices <= cluster.devices_per_node:
        engines = _lists(0, generating // size, size)
        replicated = _lists(generating if training else 0, replicas, trainer["ranks"] * divided)
        # The replicas that train early have the devices of the last engines (DeviceSharing.engines).
        sections["placement"] |= {"devices": "gpus", "engines": engines, "trainer": replicated[::-1]}
    elif on_gpu and training:
        sections |= {"host": {"kind": "ray"}, "weights": {"transport": "process_group"}}
    return sections


def _lists(first: int, num: int, size: int) -> list[list[int]]:
    return [[*range(start, start + size)] for start in range(first, first + num * size, size)]
