"""From the settings of a placement to the devices of each process."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from tailrace.devices import DeviceMap, Devices
from tailrace.errors import ConfigError
from tailrace.rollout.placement import PlacementSettings, Shared
from tailrace.trainer.base import TrainerSettings


def plan_devices(
    settings: PlacementSettings,
    trainer: TrainerSettings,
    *,
    num_engines: int,
    tensor_parallel_size: int = 1,
) -> DeviceMap:
    """Assign devices to processes. Without a list the processes share the machine.

    Args:
        tensor_parallel_size: devices of one engine.

    Raises:
        ConfigError: there are fewer devices than that, or two processes would have the same device.
    """
    ranks, replicas = trainer.ranks, trainer.replicas
    engines, trainers = settings.engines, settings.trainer
    _check_lists("placement.engines", engines, num_engines, "engines", tensor_parallel_size)
    _check_lists("placement.trainer", trainers, replicas, "replicas of the trainer", ranks)
    if settings.kind == "disaggregated" and (both := _numbers(engines) & _numbers(trainers)):
        problem = f"the engines have the devices {sorted(both)}, too"
        remedy = 'choose other devices, or placement.kind = "colocated" or "elastic"'
        raise ConfigError("placement.trainer", trainers, problem, remedy)
    _check_exist(settings)
    of_ranks = [each for devices in trainers for each in _divided(devices, ranks)]
    return DeviceMap(
        tuple(_devices(settings, each) for each in engines) or (None,) * num_engines,
        tuple(_devices(settings, each) for each in of_ranks) or (None,) * (ranks * replicas),
    )


def shared_devices(
    settings: PlacementSettings,
    trainer: TrainerSettings,
    *,
    num_engines: int,
    tensor_parallel_size: int = 1,
) -> Shared:
    """Whether engines and trainer have devices in common, which engines have those of replica 0, and how many
    engines may be joined.

    Raises:
        ConfigError: the elastic placement has nothing to lend, or would lend everything; the engines cannot
            be joined to groups of the largest tensor-parallel size.
    """
    max_width = _max_width(settings.max_tensor_parallel_size, tensor_parallel_size, num_engines)
    if settings.kind == "elastic":
        if trainer.replicas != 2:
            problem = "the elastic placement trains with one half of the devices, and then with both"
            raise ConfigError("trainer.replicas", trainer.replicas, problem, "set it to 2")
        if num_engines < 2:
            problem = f"{num_engines} engine cannot give a half of the devices to the trainer"
            raise ConfigError("placement.kind", "elastic", problem, "start at least 2 engines")
    if settings.kind != "elastic" or not (settings.engines and settings.trainer):
        return Shared(settings.kind, max_width=max_width)
    first = set(settings.trainer[0])
    shared = tuple(bool(first & set(each)) for each in settings.engines)
    if not any(shared) or all(shared):
        number = "none" if not any(shared) else "each"
        problem = f"{number} of the {num_engines} engines has a device of replica 0"
        raise ConfigError("placement.trainer", settings.trainer, problem, "give replica 0 those of one half")
    return Shared(settings.kind, shared, max_width)


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


def _max_width(largest: int | None, smallest: int, num_engines: int) -> int:
    """Engines whose devices are joined to one group of the largest tensor-parallel size."""
    if largest is None:
        return 1
    width, rest = divmod(largest, smallest)
    if rest or width & (width - 1) or not width:
        problem = f"the size is doubled from engine.tensor_parallel_size = {smallest} and never becomes that"
        raise ConfigError(
            "placement.max_tensor_parallel_size", largest, problem, "choose a power of two of it"
        )
    if num_engines % width:
        problem = f"{num_engines} engines of {smallest} devices cannot be joined to groups of {largest}"
        raise ConfigError("placement.max_tensor_parallel_size", largest, problem, "lower it, or add engines")
    return width


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


def _check_exist(settings: PlacementSettings) -> None:
    """Raises a ConfigError if this machine lacks one of the devices."""
    if settings.devices == "gpus":
        import torch

        there = set(range(torch.cuda.device_count()))
    else:
        there = set(os.sched_getaffinity(0)) if sys.platform == "linux" else set()
    for key, lists in (("placement.engines", settings.engines), ("placement.trainer", settings.trainer)):
        if missing := sorted(_numbers(lists) - there):
            numbers = f"{len(there)} {settings.devices}: {sorted(there)}"
            raise ConfigError(
                key, lists, f"there is no {missing}; this process may use {numbers}", "lower it"
            )


def _numbers(lists: Sequence[Sequence[int]]) -> set[int]:
    return set(chain.from_iterable(lists))


def _divided(devices: Sequence[int], parts: int) -> list[Sequence[int]]:
    size = len(devices) // parts
    return [devices[start : start + size] for start in range(0, len(devices), size)]


def _devices(settings: PlacementSettings, numbers: Sequence[int]) -> Devices:
    return Devices(gpus=tuple(numbers)) if settings.devices == "gpus" else Devices(cpus=tuple(numbers))


def _cpus(devices: Sequence[Devices | None]) -> set[int]:
    return {cpu for each in devices if each for cpu in each.cpus}
