"""The placement of a config: the devices of its processes, and their checks."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

from tailrace.config import PolicyConfig, RunConfig
from tailrace.devices import DeviceMap, Devices
from tailrace.drivers.kinds.hooks import JoinedEngines
from tailrace.drivers.workers.hosts import host_kind
from tailrace.errors import ConfigError
from tailrace.kinds import kind_of
from tailrace.ledger.prices import Prices
from tailrace.model_folder import read_config
from tailrace.rollout.placement import DeviceSharing, PlacementSettings
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, SimSettings


def device_map(config: RunConfig) -> DeviceMap:
    """Return the devices of each process of a live run. Without a list the processes share the machine.
    Raises a ConfigError if there are too few, or two processes would have the same device."""
    placement, num_engines = config.placement, config.engine.num_engines
    ranks, replicas = config.trainer.replica_processes, config.trainer.replicas
    engines, trainers = placement.engines, placement.trainer
    host_kind(config.host).check_placement(placement)
    _check_lists("placement.engines", engines, num_engines, "engines", config.engine.num_devices)
    _check_lists("placement.trainer", trainers, replicas, "replicas of the trainer", ranks)
    if not placement.takes_turns and (both := _numbers(engines) & _numbers(trainers)):
        problem = f"the engines have the devices {sorted(both)}, too"
        remedy = 'choose other devices, or placement.kind = "colocated" or "elastic"'
        raise ConfigError("placement.trainer", trainers, problem, remedy)
    of_ranks = [each for devices in trainers for each in _divided(devices, ranks)]
    return DeviceMap(
        tuple(_devices(placement, each) for each in engines) or (None,) * num_engines,
        tuple(_devices(placement, each) for each in of_ranks) or (None,) * (ranks * replicas),
    )


def device_sharing(config: RunConfig, sim: SimSettings | None = None) -> DeviceSharing:
    """Whether engines and trainer have devices in common, which engines have those of the replicas that train
    early, and how many engines may be joined. Raises a ConfigError if the elastic placement has nothing to
    lend or would lend everything, another one would lend after prompts, engines cannot be joined as asked, or
    the offline profile lacks a size.
    `sim`: [sim] with everything that it takes from the other sections, for simulated engines, which have no
    lists of devices."""
    if config.run.eval_beside and config.placement.takes_turns:
        problem, remedy = "engines sleep while the trainer works", 'choose placement.kind = "disaggregated"'
        raise ConfigError("run.eval_beside", True, problem, remedy)
    placement, replicas = config.placement, config.trainer.replicas
    num_engines, size = config.engine.num_engines, config.engine.num_devices
    if sim:
        num_engines, size = sim.engines.count or 1, sim.cluster.tensor_parallel if sim.cluster else size
    sharing, longest = DeviceSharing(placement.kind, early_replicas=max(1, replicas // 2)), None
    if placement.joins_engines:
        joined: JoinedEngines = kind_of("placement", "joined")
        sharing = joined.sharing(sharing, placement, size, num_engines, sim)
    if placement.lend_after == "prompts":
        if not placement.lends:
            problem = f"placement.kind = {placement.kind} lends no devices"
            raise ConfigError("placement.lend_after", "prompts", problem, 'remove it, or write "elastic"')
        given = config.sampling.max_completion_tokens if config.sampling else DEFAULT_MAX_TOKENS
        longest = (sim and sim.lengths.max_tokens) or given
    if placement.lends:
        if replicas % 2:
            problem = "the elastic placement trains with one half of the replicas, and then with both"
            raise ConfigError("trainer.replicas", replicas, problem, f"set it to {replicas + 1}")
        if num_engines < 2:
            problem = f"{num_engines} engine cannot give a half of the devices to the trainer"
            raise ConfigError("placement.kind", "elastic", problem, "start at least 2 engines")
    early, sharing = sharing.early_replicas, replace(sharing, longest=longest)
    if sim or not placement.lends or not (placement.engines and placement.trainer):
        return sharing
    first = _numbers(placement.trainer[:early])
    lent = tuple(bool(first & set(each)) for each in placement.engines)
    if not any(lent) or all(lent):
        has = f"{'each' if any(lent) else 'none'} of the {num_engines} engines has a device"
        problem = f"{has} of the first {early} of the {replicas} replicas, which train early"
        raise ConfigError("placement.trainer", placement.trainer, problem, "give them those of one half")
    return replace(sharing, engines=lent)


def prices_of(config: RunConfig, sim: SimSettings | None = None) -> Prices | None:
    """Return the prices of a config with the devices that they count for; None: it has no prices. A device is
    a GPU, or a process on CPUs. `sim`: as in `device_sharing`."""
    if config.prices is None:
        return None
    if sim and sim.cluster:
        return Prices(config.prices, *sim.cluster.devices_by_use)
    placement, trainer = config.placement, config.trainer
    num_engines = sim.engines.count or 1 if sim else config.engine.num_engines
    generating, training = num_engines * config.engine.num_devices, trainer.num_processes
    if not sim and placement.devices == "gpus" and placement.engines and placement.trainer:
        gpus = _numbers(placement.engines)
        return Prices(config.prices, len(gpus), len(_numbers(placement.trainer) - gpus))
    in_common = generating if placement.takes_turns else 0
    return Prices(config.prices, generating, max(0, training - in_common))


def check_placement(config: PolicyConfig) -> None:
    """Check the placement of a live run. Raises a ConfigError if it cannot work."""
    _check_gpus_of_ranks(config)
    _check_numbers(config)
    _check_nccl(config)
    heads = read_config(config.model.path).get("num_attention_heads")
    sizes = {
        "engine.tensor_parallel_size": config.engine.num_devices,
        "placement.max_tensor_parallel_size": config.placement.max_tensor_parallel_size or 1,
    }
    for key, size in sizes.items():
        if isinstance(heads, int) and heads % size:
            problem = f"the {size} devices of an engine cannot share {heads} attention heads equally"
            raise ConfigError(key, size, problem, f"choose a divisor of {heads}")
    largest = config.placement.max_tensor_parallel_size
    if largest and not (config.engine.can_regroup and config.engine.resources):
        problem = "only vLLM servers that the run starts can be restarted with another size"
        raise ConfigError("placement.max_tensor_parallel_size", largest, problem, "remove it")
    device_map(config)
    device_sharing(config)
    _check_reference(config)


def _check_reference(config: RunConfig) -> None:
    """With LoRA the reference is the trainer without its adapter."""
    trainer = config.trainer
    sleeps = config.placement.takes_turns and "weights" not in trainer.kept_asleep()
    if sleeps and trainer.lora and config.algorithm.kl_coef:
        problem = "the reference is the trainer without its adapter, and computes while engines generate"
        key, remedy = "trainer.offload.weights", 'set it to "device"'
        raise ConfigError(key, trainer.offload.weights, problem, remedy)


def _check_gpus_of_ranks(config: RunConfig) -> None:
    """NCCL refuses two ranks on one GPU. Without a list of GPUs all processes would use the same one."""
    trainer, placement = config.trainer, config.placement
    num = trainer.num_processes
    has_own = config.host.gives_devices or (placement.devices == "gpus" and placement.trainer)
    if num > 1 and trainer.device != "cpu" and not has_own:
        problem = f"the {num} processes of the trainer would all use {trainer.device}"
        remedy = 'set placement.devices = "gpus", and list the GPUs of each replica'
        raise ConfigError("placement.trainer", placement.trainer, problem, remedy)


def _check_numbers(config: RunConfig) -> None:
    """A process with a list of GPUs sees them as cuda:0, cuda:1 and so on, whatever their numbers are."""
    placement = config.placement
    named = {
        "trainer.device": (config.trainer.device, placement.trainer),
        "engine.device": (config.engine.torch_device, placement.engines),
    }
    for key, (device, lists) in named.items():
        if placement.devices == "gpus" and lists and device.startswith("cuda:"):
            problem = "placement gives the process its GPUs, and it sees no others"
            raise ConfigError(key, device, problem, 'write "cuda"')


def _check_nccl(config: RunConfig) -> None:
    """NCCL sends from one GPU to another."""
    placement = config.placement
    if not config.weights.on_devices:
        return
    named = [device for device in (config.trainer.device, config.engine.torch_device) if device]
    used = ["cuda:0" if device == "cuda" else device for device in named]
    is_one = len(set(used)) < len(used) and not config.host.gives_devices
    if placement.engines or placement.trainer:  # a process with a list sees no other GPUs
        is_one = not {gpus[0] for gpus in placement.trainer[:1]}.isdisjoint(chain(*placement.engines))
    if is_one or "cpu" in used:
        problem = "trainer and engines must have GPUs, and different ones"
        raise ConfigError("weights.backend", "nccl", problem, 'write "gloo", or change the devices')


@contextmanager
def trainer_cpus_reserved(devices: DeviceMap) -> Iterator[None]:
    """Keep this process, and the processes that it starts without devices, off the CPUs that only the trainer
    has, inside the block."""
    trainer = _cpus(devices.trainer) - _cpus(devices.engines)
    cpus = os.sched_getaffinity(0) if trainer else set()
    if not cpus - trainer:
        yield
        return
    os.sched_setaffinity(0, cpus - trainer)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def _check_lists(key: str, lists: Sequence[Sequence[int]], num: int, what: str, size: int) -> None:
    if not lists:
        return
    if len(lists) != num:
        problem = f"it lists devices of {len(lists)}, for {num} {what}"
        raise ConfigError(key, lists, problem, "write one list for each")
    for number, devices in enumerate(lists):
        if not devices or len(devices) % size:
            problem = f"number {number} of the {what} has {len(devices)} devices for {size} ranks"
            raise ConfigError(key, lists, problem, "give it a multiple of that number")
    if len(_numbers(lists)) < len(list(chain.from_iterable(lists))):
        raise ConfigError(key, lists, "a device is listed twice", "list each device once")


def _numbers(lists: Sequence[Sequence[int]]) -> set[int]:
    return set(chain.from_iterable(lists))


def _divided(devices: Sequence[int], parts: int) -> list[Sequence[int]]:
    size = len(devices) // parts
    return [devices[start : start + size] for start in range(0, len(devices), size)]


def _devices(settings: PlacementSettings, numbers: Sequence[int]) -> Devices:
    return Devices(gpus=tuple(numbers)) if settings.devices == "gpus" else Devices(cpus=tuple(numbers))


def _cpus(devices: Sequence[Devices | None]) -> set[int]:
    return {cpu for each in devices if each for cpu in each.cpus}
