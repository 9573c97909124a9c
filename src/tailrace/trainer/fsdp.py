"""A model sharded over the ranks of a replica, by torch's fully_shard (FSDP2).

Each rank keeps a shard of every parameter, gradient and optimizer state. The parameters of one block are
gathered while it is computed. Gradients are summed over the ranks, not averaged, because the trainer divides
its sum of gradients by the count of the whole step. The replicas' sums are added in that step (optimizer.py).
"""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tailrace.trainer.base import TrainerSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of a model, in order: what transformers would not split over devices."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def recompute_activations(modules: Iterable[nn.Module]) -> None:
    """Let modules keep only their inputs for the backward pass.

    transformers has the same for models in training mode; these are in evaluation mode.
    """
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)


def shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, settings: TrainerSettings) -> None:
    """Shard a model whose whole parameters are on the CPU. Rank 0 has their values, the others get them.

    Args:
        root: what is called; the model is in it. What is in no block is gathered with it: norms, head, and
            the embedding that is tied to the head.
    """
    whole = None
    if mesh.get_local_rank() == 0:
        whole = {name: parameter.detach() for name, parameter in root.named_parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    options = {
        "mesh": mesh,
        "reshard_after_forward": True,  # else the root would keep old weights after a pass without gradient
        "mp_policy": _precision(settings),
        "offload_policy": _offload(settings),
    }
    for module in [*blocks(model), *([] if is_tied else [embedding]), root]:
        fully_shard(module, **options)  # type: ignore[call-overload]
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no reduction with a factor
            module.set_gradient_divide_factor(1.0)
    scatter(whole, dict(root.named_parameters()))
    for buffer in root.buffers():
        dist.broadcast(buffer, group=mesh.get_group(), group_src=0)


def _precision(settings: TrainerSettings) -> MixedPrecisionPolicy:
    if settings.dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[settings.dtype], reduce_dtype=torch.float32)


def _offload(settings: TrainerSettings) -> OffloadPolicy:
    if not settings.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=settings.device != "cpu")


@torch.no_grad()
def scatter(whole: Mapping[str, Tensor] | None, parameters: Mapping[str, Tensor]) -> None:
    """Copy tensors into parameters, one after another.

    Args:
        whole: by name, in rank 0; None in the others, which get their shards from it. Tensors that are
            sharded as the parameters are copied in each rank.
    """
    for name, parameter in parameters.items():
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype) if whole is None else whole[name]
        if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor):
            tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
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
