"""Layers that several processes divide, by the plan that transformers has for an architecture.

transformers names a style for each layer (`base_model_tp_plan`), and has its sharding and its collectives:
colwise divides a layer's outputs, rowwise its inputs. Three things are not transformers':

- It sums the gradient of a norm between both in a hook, over what is accumulated so far. Gradients of several
  micro-batches are accumulated here, so each is summed where it is made (`SummedGradient`).
- The embedding and the head are divided by the vocabulary (`DividedEmbedding`). Its head would gather the
  logits: here each process computes log-probs of the columns that it has (model.py).
- An adapter's factor that faces the divided side of its layer is divided with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    AllReduceParallel,
    TensorParallelLayer,
    _AllReduceBackward,
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)
from typing_extensions import override

from tailrace.errors import ConfigError

SUMMED, EMBEDDING = "tailrace_summed_gradient", "tailrace_embedding"
"""Names of our styles among transformers'."""


class SummedGradient(TensorParallelLayer):  # type: ignore[misc]
    """A whole parameter that each process uses for its part of the heads: the processes' gradients are
    summed."""

    @override
    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        own = dict(module._parameters)
        used = {n: p if p is None else _AllReduceBackward.apply(p, mesh.get_group()) for n, p in own.items()}
        module._parameters.update(used)
        try:
            yield
        finally:
            module._parameters.update(own)


class DividedEmbedding(AllReduceParallel):  # type: ignore[misc]
    """An embedding of which each process has the rows of its part of the vocabulary. Other tokens are zero
    in it, and the processes' results are summed."""

    @override
    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        whole = module._parameters[param]
        assert whole is not None
        divided = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(divided, requires_grad=whole.requires_grad)

    @override
    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        look_up, padding = module.forward, module.padding_idx

        def forward(ids: Tensor) -> Tensor:
            whole = module._parameters["weight"]
            assert isinstance(whole, DTensor)
            rows, first = whole.to_local(), mesh.get_local_rank() * -(-len(whole) // mesh.size())
            ids = ids - first
            elsewhere = (ids < 0) | (ids >= len(rows))
            own_padding = None if padding is None else padding - first
            is_own = own_padding is not None and 0 <= own_padding < len(rows)
            module._parameters["weight"] = rows
            module.padding_idx = own_padding if is_own else None
            try:
                found = look_up(ids.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0.0)
            finally:
                module._parameters["weight"], module.padding_idx = whole, padding
            summed: Tensor = self.transform_output_post_forward(module, found, mesh)
            return summed

        module.forward = forward
        return module


ALL_PARALLEL_STYLES.register(SUMMED, SummedGradient())
ALL_PARALLEL_STYLES.register(EMBEDDING, DividedEmbedding())


def divide(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the layers of a model, which has whole parameters, over the processes of a mesh of one
    dimension. Raises a ConfigError if a parameter cannot be divided equally."""
    plan = _plan_of(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    apply_tensor_parallelism(model, mesh, plan)
    for name, module in model.named_modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if module not in (embedding, head):
                    _check_divisible(f"{name}.{own}", parameter)
                part = DTensor.from_local(
                    parameter.to_local().detach().clone(),  # a part of a whole tensor would keep its memory
                    mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                setattr(module, own, nn.Parameter(part, requires_grad=parameter.requires_grad))
    if is_tied:
        head.weight = embedding.weight


def _check_divisible(name: str, parameter: DTensor) -> None:
    num = parameter.device_mesh.size()
    for placement in parameter.placements:
        if not isinstance(placement, Shard | _StridedShard):
            continue
        packed = getattr(placement, "split_factor", 1)
        if (size := parameter.shape[placement.dim] // packed) % num:
            problem = f"{name} of shape {tuple(parameter.shape)} cannot be divided equally"
            raise ConfigError("trainer.tensor_parallel", num, problem, f"choose a divisor of {size}")


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    """The style of each layer by its name with "*" for its number: transformers', but for embedding, head,
    norms and adapted layers."""
    plan: dict[str, str] = {
        name: SUMMED if style == "replicated_with_grad_allreduce" else style
        for name, style in model.tp_plan.items()
    }
    ends = {model.get_input_embeddings(): EMBEDDING, model.get_output_embeddings(): "colwise"}
    for name, module in model.named_modules():
        general = replace_layer_number_by_wildcard(name)
        if module in ends:
            plan[general] = ends[module]
        elif hasattr(module, "lora_A") and (style := plan.pop(general, plan.get(f"{general}.base_layer"))):
            plan[f"{general}.base_layer"] = style
            factor = "lora_A" if style.startswith("rowwise") else "lora_B"
            plan[f"{general}.{factor}.default"] = style
    return plan
