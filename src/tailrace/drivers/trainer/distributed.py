"""A model sharded over the ranks of a replica, by torch's fully_shard (FSDP2).

Each rank keeps a shard of every parameter, gradient and optimizer state. The parameters of one block are
gathered while it is computed. Gradients are summed over the ranks, not averaged, because the trainer divides
its sum of gradients by the count of the whole step. The replicas' sums are added in that step (optimizer.py).

The processes of one trainer: `ranks` x `tensor_parallel` for each of `replicas` copies of the model. With
`tensor_parallel` = N a rank is N processes in sequence, which divide each layer (tensor_parallel.py) and
compute the same micro-batch.

Processes of one replica communicate in every forward and backward pass, so they compute the same plan
of micro-batches (packing.py). Replicas communicate only in an optimizer step. A trainer of one process
does not communicate, and does not initialise torch.distributed.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from tailrace.contracts.trainer import TrainerSettings
from tailrace.errors import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]
"""torch's fused kernels of attention."""


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of a model, in order: what transformers would not split over devices."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def recompute_activations(modules: Iterable[nn.Module]) -> None:
    """Let modules keep only their inputs and what attention computed for the backward pass: to compute that
    again takes as long as all else where sequences are long.

    transformers recomputes all of a module, and in training mode only; these are in evaluation mode.
    """
    contexts = partial(create_selective_checkpoint_contexts, ATTENTION)
    for module in modules:
        module.forward = partial(
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )


def shard(root: nn.Module, model: PreTrainedModel, ranks: "Ranks", settings: TrainerSettings) -> None:
    """Shard a model whose whole parameters are on the CPU. Process 0 has their values, the others get them.
    `root`: what is called; the model is in it."""
    whole = None
    if ranks.rank == 0:
        whole = {name: parameter.detach() for name, parameter in root.named_parameters()}
    if ranks.tensor:
        from tailrace.drivers.trainer.tensor_parallel import divide  # of transformers 5.19

        divide(model, ranks.tensor)
    if ranks.mesh:
        _shard_fully(root, model, ranks.mesh, settings)
    else:
        root.to(settings.device)
    scatter(whole, dict(root.named_parameters()), ranks)
    for buffer in root.buffers():
        dist.broadcast(buffer, group=ranks.group, group_src=0)


def _shard_fully(
    root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, settings: TrainerSettings
) -> None:
    """Shard each block. Norms, head, and the embedding that is tied to it are gathered with the root."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    dtype, is_pinned = DTYPES[settings.dtype], settings.device != "cpu"
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {
        "mesh": mesh,
        "reshard_after_forward": True,  # else the root would keep old weights after a pass without gradient
        "mp_policy": MixedPrecisionPolicy() if dtype == torch.float32 else mixed,
        "offload_policy": CPUOffloadPolicy(is_pinned) if settings.cpu_offload else OffloadPolicy(),
    }
    for module in [*blocks(model), *([] if is_tied else [embedding]), root]:
        fully_shard(module, **options)  # type: ignore[call-overload]
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no reduction with a factor
            module.set_gradient_divide_factor(1.0)


@torch.no_grad()
def scatter(whole: Mapping[str, Tensor] | None, parameters: Mapping[str, Tensor], ranks: "Ranks") -> None:
    """Copy tensors of process 0, by name, into parameters; other processes give None. Tensors that are
    sharded as the parameters are copied in each process."""
    for name, parameter in parameters.items():
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype) if whole is None else whole[name]
        if isinstance(tensor, DTensor):
            local(parameter).copy_(local(tensor))
            continue
        source: int | None = 0
        if ranks.tensor:  # those of one shard are in several meshes
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=ranks.group, group_src=0)
            source = None
        if isinstance(parameter, DTensor):
            place = parameter.device_mesh, parameter.placements
            tensor = distribute_tensor(tensor, *place, src_data_rank=source)
        local(parameter).copy_(local(tensor))


@torch.no_grad()
def gather(parameter: Tensor) -> Tensor:
    """The whole tensor, in every rank. Not a copy if it is not sharded."""
    detached = parameter.detach()
    if not isinstance(detached, DTensor):
        return detached
    whole = detached.full_tensor()
    # Where the shards are unequal it is a part of a larger storage, which safetensors refuses.
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has. Not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The processes over which a tensor is sharded or divided; None: this one has all of it."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among those of the trainer."""

    rank: int = 0
    """Among those of the replica."""
    num_ranks: int = 1
    """Processes of the replica."""
    group: ProcessGroup | None = None
    """The processes of the replica; None: this process has the whole model."""
    mesh: DeviceMesh | None = None
    """One process of each shard, over which the model is sharded; None: there is one shard."""
    tensor: DeviceMesh | None = None
    """The processes that divide the layers of one shard; None: this process has them."""
    replicas: ProcessGroup | None = None
    """The process of the same rank in every replica; None: there is one replica."""
    writers: ProcessGroup | None = None
    """The ranks of the replica once more, on Gloo: for the threads that write a checkpoint, because the
    collectives of two threads would mix in one group."""

    @property
    def place_in_shard(self) -> int:
        """Number of this process among those that divide the layers of its shard."""
        return self.tensor.get_local_rank() if self.tensor else 0

    @property
    def shard(self) -> int:
        """Number of its shard. All processes of a shard compute the same micro-batches."""
        return self.rank // (self.tensor.size() if self.tensor else 1)

    @property
    def num_shards(self) -> int:
        return self.num_ranks // (self.tensor.size() if self.tensor else 1)

    def sum_over_all(self, values: Tensor) -> None:
        """Add up values of all processes, in place."""
        if self.group or self.replicas:
            dist.all_reduce(values)

    def sum_over_shards(self, values: Tensor) -> None:
        """Add up values of the shards of this replica, in place."""
        if self.mesh:
            dist.all_reduce(values, group=self.mesh.get_group())

    def sum_over_replicas(self, values: Sequence[Tensor]) -> None:
        """Add up values of this rank in all replicas, in place."""
        if self.replicas:
            for work in [dist.all_reduce(each, group=self.replicas, async_op=True) for each in values]:
                work.wait()

    def of_first(self, value: T) -> T:
        """The value that rank 0 of this replica has."""
        values = [value]
        if self.group:
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def together(self, work: Callable[[], T]) -> T:
        """Do work without collectives in every rank of the replica. Raises a CheckpointError in all
        ranks if one of them raised it, so that none waits for another."""
        failures: list[str | None] = [None] * self.num_ranks
        result = None
        try:
            result = work()
        except CheckpointError as error:
            if not self.group:
                raise
            failures[self.rank] = str(error)
        if self.group:
            dist.all_gather_object(failures, failures[self.rank], group=self.group)
        if failure := next((each for each in failures if each), None):
            raise CheckpointError(failure)
        return result  # type: ignore[return-value]


def listen(host: str) -> TCPStore:
    """Open the store through which all processes find one another. `host`: an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


@contextmanager
def joined(settings: TrainerSettings, store: TCPStore, *, replica: int, rank: int) -> Iterator[Ranks]:
    """Join the processes of a trainer inside the block; all call it. `store`: of `listen`, or its client."""
    timeout = timedelta(seconds=settings.collective_timeout_s)
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # torch refuses a device without a number here
    if settings.tensor_parallel > 1:  # it warns of collectives that no mesh of two dimensions can merge
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if store.host in ("127.0.0.1", "::1"):  # Gloo otherwise listens where the host's name points
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    num_ranks, num_shards = settings.replica_processes, settings.ranks
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=replica * num_ranks + rank,
        world_size=settings.replicas * num_ranks,
        timeout=timeout,
    )
    try:
        numbers = torch.arange(settings.replicas * num_ranks).view(settings.replicas, num_ranks)
        new_groups: Any = dist.new_subgroups_by_enumeration
        replica_ranks, _ = new_groups(numbers.tolist(), timeout=timeout)
        same_rank, _ = new_groups(numbers.T.tolist(), timeout=timeout)
        writers, _ = new_groups(numbers.tolist(), timeout=timeout, backend="gloo")
        sharded = num_shards > 1 or settings.cpu_offload
        mesh, tensor = None, None
        if settings.tensor_parallel > 1:
            grids = numbers.view(settings.replicas, num_shards, -1)
            same_place, _ = new_groups(grids.transpose(1, 2).flatten(0, 1).tolist(), timeout=timeout)
            same_shard, _ = new_groups(grids.flatten(0, 1).tolist(), timeout=timeout)
            names, grid = ("shards", "tensor"), grids[replica]
            both = DeviceMesh.from_group(
                [same_place, same_shard], device.type, mesh=grid, mesh_dim_names=names
            )
            mesh, tensor = both["shards"] if sharded else None, both["tensor"]
        elif sharded:
            mesh = DeviceMesh.from_group(replica_ranks, device.type)
        group = replica_ranks if mesh or tensor else None
        replicas = same_rank if settings.replicas > 1 else None
        yield Ranks(rank, num_ranks, group, mesh, tensor, replicas, writers if group else None)
    finally:
        dist.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process has ended or did not take part in time."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
