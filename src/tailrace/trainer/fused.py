"""A decoder of the Llama or Qwen kind for training on a CPU in float32: one autograd node, by hand.

The model's own modules would do. But written in single operations a layer is some two hundred of them,
forward and backward, and on short groups a CPU does little else than dispatch them. The parameters are the
model's and are read at each call; only the operations are ours. Tests hold them to the model's own forward
and gradients.

T tokens, H query and K key-value heads of D dimensions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from tailrace.trainer import kernels
from tailrace.trainer.packing import MicroBatch
from tailrace.trainer.rectangles import Rectangles, attend, attend_backward, rectangles

FAMILIES = ("llama", "qwen2", "qwen3")
HEAD_NORMS = ("q_norm", "k_norm")


def can_fuse(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether a model without its head is one that `hidden_states` computes, at this precision."""
    config = model.config
    if config.model_type not in FAMILIES:
        return False
    attention: Any = model.layers[0].self_attn
    return (
        2 * model.rotary_emb.inv_freq.numel() == attention.head_dim
        and config.hidden_act == "silu"
        and model.device.type == "cpu"
        and model.dtype == dtype == torch.float32
        and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
        and not getattr(config, "mlp_bias", False)
        and (config.model_type == "qwen2" or not getattr(config, "attention_bias", False))
    )


def fused_hidden_states(model: Any, batch: MicroBatch) -> Tensor:
    """[T, hidden], after the last norm; differentiable. model: without its head."""
    x = model.embed_tokens(batch.input_ids)[0]
    cos, sin = (part[0] for part in model.rotary_emb(x, batch.position_ids))
    place = Place(cos, sin, rectangles(batch.boundaries.diff().tolist()))
    blocks: list[Block] = [part(layer) for layer in model.layers for part in (Attention, Mlp)]
    parameters = [model.norm.weight, *(parameter for block in blocks for parameter in block.parameters())]
    hidden: Tensor = _Decoder.apply(x, place, blocks, RowNorm(model.norm), *parameters)  # type: ignore[no-untyped-call]
    return hidden


class Place(NamedTuple):
    """Where the tokens of a micro-batch stand."""

    cos: Tensor
    """[T, D], as the model's rotary embedding gives them."""
    sin: Tensor
    layout: Rectangles

    def rotate(self, *parts: Tensor, direction: float) -> None:
        """Turn [T, H, D] by their positions, in place; a direction of -1 is the gradient's."""
        for part in parts:
            kernels.rotate(part.numpy(), self.cos.numpy(), self.sin.numpy(), direction)


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, place: Place, blocks: "list[Block]", norm: "RowNorm", *parameters: Tensor
    ) -> Tensor:
        x = x.detach()
        for block in blocks:
            x = block.forward(x, place)
        ctx.place, ctx.blocks, ctx.norm = place, blocks, norm
        return norm.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, of_norm = ctx.norm.backward(grads[0].contiguous())
        gradients: list[Tensor] = []
        for block in reversed(ctx.blocks):
            grad, of_block = block.backward(grad, ctx.place)
            gradients = [*of_block, *gradients]
        return grad, None, None, None, of_norm, *gradients


class Attention:
    """x + O attend(q, k, v), these three projected from the norm of x; q and k normalised where the model
    does so, and rotated."""

    def __init__(self, layer: Any) -> None:
        module = layer.self_attn
        self._norm = RowNorm(layer.input_layernorm)
        self._projections: list[Linear] = [module.q_proj, module.k_proj, module.v_proj]
        self._head_norms = [RowNorm(getattr(module, name)) for name in HEAD_NORMS if hasattr(module, name)]
        self._o: Tensor = module.o_proj.weight
        self._dim: int = module.head_dim
        self._scale: float = module.scaling

    def parameters(self) -> list[Tensor]:
        """In the order in which `backward` gives their gradients."""
        weights = [projection.weight for projection in self._projections]
        biases = [projection.bias for projection in self._projections if projection.bias is not None]
        return [self._norm.gain, *weights, *biases, *(norm.gain for norm in self._head_norms), self._o]

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """[T, hidden] of [T, hidden]; keeps what `backward` needs."""
        self._h = self._norm.forward(x)
        q, k, v = (linear(self._h, p.weight, p.bias).view(len(x), -1, self._dim) for p in self._projections)
        if self._head_norms:
            q, k = (norm.forward(part) for norm, part in zip(self._head_norms, (q, k), strict=True))
        place.rotate(q, k, direction=1.0)
        self._num_kv = v.shape[1]
        mixed, self._attended = attend(q, k, v, place.layout, self._scale)
        self._mixed = mixed.flatten(1)
        return torch.addmm(x, self._mixed, self._o.T)

    def backward(self, grad: Tensor, place: Place) -> tuple[Tensor, list[Tensor]]:
        """The gradient of x, in the place of `grad`, and those of the parameters."""
        of_o = grad.T @ self._mixed
        grad_mixed = (grad @ self._o).view(len(grad), -1, self._dim)
        q, k, v = attend_backward(grad_mixed, self._attended, place.layout, self._scale, self._num_kv)
        place.rotate(q, k, direction=-1.0)
        of_heads: list[Tensor] = []
        if self._head_norms:
            (q, of_q), (k, of_k) = (
                n.backward(part) for n, part in zip(self._head_norms, (q, k), strict=True)
            )
            of_heads = [of_q, of_k]
        parts = [part.flatten(1) for part in (q, k, v)]
        grad_h = parts[0] @ self._projections[0].weight
        for part, projection in zip(parts[1:], self._projections[1:], strict=True):
            grad_h.addmm_(part, projection.weight)
        weights = [part.T @ self._h for part in parts]
        biases = [part.sum(0) for part, p in zip(parts, self._projections, strict=True) if p.bias is not None]
        grad, of_norm = self._norm.backward(grad_h, onto=grad)
        return grad, [of_norm, *weights, *biases, *of_heads, of_o]


class Mlp:
    """x + D (silu(G h) * U h), h being the norm of x."""

    def __init__(self, layer: Any) -> None:
        self._norm = RowNorm(layer.post_attention_layernorm)
        self._g: Tensor = layer.mlp.gate_proj.weight
        self._u: Tensor = layer.mlp.up_proj.weight
        self._d: Tensor = layer.mlp.down_proj.weight

    def parameters(self) -> list[Tensor]:
        """In the order in which `backward` gives their gradients."""
        return [self._norm.gain, self._g, self._u, self._d]

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """[T, hidden] of [T, hidden]; keeps what `backward` needs."""
        self._h = self._norm.forward(x)
        self._gate, self._up = self._h @ self._g.T, self._h @ self._u.T
        return torch.addmm(x, silu(self._gate).mul_(self._up), self._d.T)

    def backward(self, grad: Tensor, place: Place) -> tuple[Tensor, list[Tensor]]:
        """The gradient of x, in the place of `grad`, and those of the parameters."""
        passed = silu(self._gate)
        grad_inner = grad @ self._d
        grad_up = grad_inner * passed
        grad_gate = torch.ops.aten.silu_backward(grad_inner.mul_(self._up), self._gate)
        of_d = grad.T @ passed.mul_(self._up)
        grad_h = (grad_up @ self._u).addmm_(grad_gate, self._g)
        grad, of_norm = self._norm.backward(grad_h, onto=grad)
        return grad, [of_norm, grad_gate.T @ self._h, grad_up.T @ self._h, of_d]


Block = Attention | Mlp


class RowNorm:
    """An RMSNorm over the last dimension, of contiguous tensors."""

    def __init__(self, module: Any) -> None:
        self.gain: Tensor = module.weight
        self._epsilon: float = module.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        out = torch.empty_like(x)
        self._x = x.numpy().reshape(-1, width)
        self._scale = x.new_empty(len(self._x)).numpy()
        kernels.normalize(
            self._x, self.gain.detach().numpy(), self._epsilon, out.view(-1, width).numpy(), self._scale
        )
        return out

    def backward(self, grad: Tensor, *, onto: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The gradient of x, added to `onto` where there is one, and that of the gain."""
        width = grad.shape[-1]
        grad_x = torch.zeros_like(grad) if onto is None else onto
        grad_gain = torch.zeros_like(self.gain)
        kernels.normalize_backward(
            grad.view(-1, width).numpy(),
            self._x,
            self.gain.detach().numpy(),
            self._scale,
            grad_x.view(-1, width).numpy(),
            grad_gain.numpy(),
        )
        return grad_x, grad_gain
