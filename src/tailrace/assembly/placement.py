"""The placement of a config: the devices of its processes, and their checks."""

from itertools import chain

from tailrace.config import RunConfig
from tailrace.devices import DeviceMap
from tailrace.engine.settings import NativeEngineSettings, VllmEngineSettings
from tailrace.errors import ConfigError
from tailrace.model_folder import read_config
from tailrace.rollout.device_map import plan_devices, shared_devices
from tailrace.rollout.placement import PlacementSettings, Shared
from tailrace.sim.settings import SimSettings
from tailrace.weights.base import ProcessGroupSettings


def device_map(config: RunConfig) -> DeviceMap:
    """Return the devices of each process of a live run.

    Raises:
        ConfigError: there are too few.
    """
    if config.host.kind == "ray":
        for name in ("engines", "trainer"):
            if listed := getattr(config.placement, name):
                problem = "Ray chooses nodes and devices (host.kind = 'ray')"
                remedy = "remove it, and name amounts in [host.resources]"
                raise ConfigError(f"placement.{name}", listed, problem, remedy)
    return plan_devices(
        config.placement,
        config.trainer,
        num_engines=config.engine.num_engines,
        tensor_parallel_size=tensor_parallel_size(config),
    )


def shared(config: RunConfig) -> Shared:
    """Return which devices engines and trainer of a live run have in common.

    Raises:
        ConfigError: the placement cannot work.
    """
    engine, largest = config.engine, config.placement.max_tensor_parallel_size
    if largest and (not isinstance(engine, VllmEngineSettings) or engine.urls):
        problem = "only vLLM servers that the run starts can be restarted with another size"
        raise ConfigError("placement.max_tensor_parallel_size", largest, problem, "remove it")
    if largest and config.host.kind == "ray":
        problem = "Ray gives each server its devices once, and two servers cannot be joined"
        raise ConfigError("placement.max_tensor_parallel_size", largest, problem, "remove it")
    return shared_devices(
        config.placement,
        config.trainer,
        num_engines=engine.num_engines,
        tensor_parallel_size=tensor_parallel_size(config),
    )


def sim_shared(config: RunConfig, sim: SimSettings) -> Shared:
    """As `shared`, for simulated engines, which have no lists of devices.

    Args:
        sim: [sim] with everything that it takes from the other sections.
    """
    placement = config.placement
    settings = PlacementSettings(
        kind=placement.kind, max_tensor_parallel_size=placement.max_tensor_parallel_size
    )
    return shared_devices(
        settings,
        config.trainer,
        num_engines=sim.engines.count or 1,
        tensor_parallel_size=sim.cluster.tensor_parallel if sim.cluster else tensor_parallel_size(config),
    )


def check_placement(config: RunConfig) -> None:
    """Check the placement of a live run.

    Raises:
        ConfigError: there are too few devices, several processes of the trainer would use one GPU, a process
            does not see its device, NCCL would have to send within one GPU or to a CPU, or a tensor-parallel
            size does not divide the model's heads.
    """
    assert config.model
    _check_gpus_of_ranks(config)
    _check_numbers(config)
    _check_nccl(config)
    heads = read_config(config.model.path).get("num_attention_heads")
    sizes = {
        "engine.tensor_parallel_size": tensor_parallel_size(config),
        "placement.max_tensor_parallel_size": config.placement.max_tensor_parallel_size or 1,
    }
    for key, size in sizes.items():
        if isinstance(heads, int) and heads % size:
            problem = f"the {heads} attention heads of the model cannot be divided by it"
            raise ConfigError(key, size, problem, f"choose a divisor of {heads}")
    device_map(config)
    shared(config)


def _check_gpus_of_ranks(config: RunConfig) -> None:
    """NCCL refuses two ranks on one GPU. Without a list of GPUs all processes would use the same one."""
    trainer, placement = config.trainer, config.placement
    num = trainer.ranks * trainer.replicas
    has_own = config.host.kind == "ray" or (placement.devices == "gpus" and placement.trainer)
    if num > 1 and trainer.device != "cpu" and not has_own:
        problem = f"the {num} processes of the trainer would all use {trainer.device}"
        remedy = 'set placement.devices = "gpus", and list the GPUs of each replica'
        raise ConfigError("placement.trainer", placement.trainer, problem, remedy)


def _check_numbers(config: RunConfig) -> None:
    """A process with a list of GPUs sees them as cuda:0, cuda:1 and so on, whatever their numbers are."""
    placement, engine = config.placement, config.engine
    named = {"trainer.device": (config.trainer.device, placement.trainer)}
    if isinstance(engine, NativeEngineSettings):
        named["engine.device"] = (engine.device, placement.engines)
    for key, (device, lists) in named.items():
        if placement.devices == "gpus" and lists and device.startswith("cuda:"):
            problem = "placement gives the process its GPUs, and it sees no others"
            raise ConfigError(key, device, problem, 'write "cuda"')


def _check_nccl(config: RunConfig) -> None:
    """NCCL sends from one GPU to another. Ray gives each process GPUs of its own."""
    placement, engine = config.placement, config.engine
    if not isinstance(config.weights, ProcessGroupSettings) or config.weights.backend != "nccl":
        return
    native = [engine.device] if isinstance(engine, NativeEngineSettings) else []
    used = ["cuda:0" if device == "cuda" else device for device in (config.trainer.device, *native)]
    is_one = len(set(used)) < len(used) and config.host.kind != "ray"
    if placement.engines or placement.trainer:  # a process with a list sees no other GPUs
        is_one = not {gpus[0] for gpus in placement.trainer[:1]}.isdisjoint(chain(*placement.engines))
    if is_one or "cpu" in used:
        problem = "trainer and engines must have GPUs, and different ones"
        raise ConfigError("weights.backend", "nccl", problem, 'write "gloo", or change the devices')


def tensor_parallel_size(config: RunConfig) -> int:
    """Return the devices of one engine."""
    return 1 if isinstance(config.engine, NativeEngineSettings) else config.engine.tensor_parallel_size
