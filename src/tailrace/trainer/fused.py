"""A decoder of the Llama or Qwen kind for training on a CPU in float32: one autograd node, by hand.

The model's own modules would do. But written in single operations a layer is some two hundred of them,
forward and backward, and on short groups a CPU does little else than dispatch them. The parameters are the
model's and are read at each call; only the operations are ours. Tests hold them to the model's own forward
and gradients.

T tokens, H query and K key-value heads of D dimensions.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel

from tailrace.products import add_product, multiply
from tailrace.trainer import causal, kernels
from tailrace.trainer.kernels import Floats, Ints
from tailrace.trainer.packing import MicroBatch
from tailrace.trainer.threads import side_by_side
from tailrace.vectors import WIDTH

FAMILIES = ("llama", "qwen2", "qwen3")
HEAD_NORMS = ("q_norm", "k_norm")
NO_GAINS = [np.empty(0, np.float32)] * 2
"""Of heads that are not normalised."""


def can_fuse(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether a model without its head is one that `hidden_states` computes, at this precision."""
    config = model.config
    if config.model_type not in FAMILIES:
        return False
    attention: Any = model.layers[0].self_attn
    return (
        2 * model.rotary_emb.inv_freq.numel() == attention.head_dim
        and attention.head_dim % WIDTH == 0
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
    boundaries = batch.boundaries.long().numpy()
    starts = batch.position_ids[0].numpy()[boundaries[:-1]]
    parts = shares(boundaries, starts, torch.get_num_threads())
    place = Place(cos.numpy(), sin.numpy(), boundaries, starts, parts)
    blocks: Iterator[Block] = (part(layer) for layer in model.layers for part in (Attention, Mlp))
    norm = RowNorm(model.norm)
    if not torch.is_grad_enabled():
        return _through(blocks, norm, x, place)
    kept = list(blocks)
    parameters = [norm.gain, *(parameter for block in kept for parameter in block.parameters())]
    hidden: Tensor = _Decoder.apply(x, place, kept, norm, *parameters)  # type: ignore[no-untyped-call]
    return hidden


def _through(blocks: "Iterable[Block]", norm: "RowNorm", x: Tensor, place: "Place") -> Tensor:
    """[T, hidden] of [T, hidden]. Blocks that nobody keeps are gone when the next begins, which has
    their memory while it is in the cache."""
    for block in blocks:
        x = block.forward(x, place)
    return norm.forward(x)


class Place(NamedTuple):
    """Where the tokens of a micro-batch stand."""

    cos: Floats
    """[T, D], as the model's rotary embedding gives them."""
    sin: Floats
    boundaries: Ints
    """[S + 1]: those of the micro-batch."""
    starts: Ints
    """[S]: the position at which each sequence starts."""
    shares: list[tuple[int, int]]
    """The first and last sequence of each thread, the last excluded."""

    def share(self, attend: Callable[[int, int], None]) -> None:
        """Call it for the sequences of each thread, side by side."""
        side_by_side([partial(attend, *share) for share in self.shares])


def shares(boundaries: Ints, starts: Ints, num_threads: int) -> list[tuple[int, int]]:
    """Cut S sequences into parts of like cost, a part a thread: boundaries [S + 1], starts [S].

    The cost is in keys that rows go along. What goes on from a sequence stays with it.
    """
    lengths = np.diff(boundaries)
    roots = np.flatnonzero(starts == 0)
    costs = np.add.reduceat(lengths * (lengths + 2 * starts), roots)
    middles = np.cumsum(costs) - costs / 2
    cuts = np.searchsorted(middles, costs.sum() * np.arange(1, num_threads) / num_threads)
    firsts = np.append(roots, len(lengths))[cuts]
    return list(pairwise(sorted({0, *firsts.tolist(), len(lengths)})))


class _Decoder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, place: Place, blocks: "list[Block]", norm: "RowNorm", *parameters: Tensor
    ) -> Tensor:
        ctx.place, ctx.blocks, ctx.norm = place, blocks, norm
        return _through(blocks, norm, x.detach(), place)

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
        head_norms = [getattr(module, name) for name in HEAD_NORMS if hasattr(module, name)]
        self._gains: list[Tensor] = [norm.weight for norm in head_norms]
        self._epsilon: float = head_norms[0].variance_epsilon if head_norms else 0.0
        self._o: Tensor = module.o_proj.weight
        self._dim: int = module.head_dim
        self._num_heads: int = self._o.shape[1] // module.head_dim
        self._scale: float = module.scaling

    def parameters(self) -> list[Tensor]:
        """In the order in which `backward` gives their gradients."""
        weights = [projection.weight for projection in self._projections]
        return [self._norm.gain, *weights, *self._biases(), *self._gains, self._o]

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """[T, hidden] of [T, hidden]; keeps what `backward` needs."""
        self._h = self._norm.forward(x)
        self._weight = torch.cat([projection.weight.detach() for projection in self._projections])
        biases = self._biases()
        qkv = multiply(self._h, self._weight.T)
        if biases:
            qkv += torch.cat(biases)
        self._qkv = qkv.view(len(x), -1, self._dim).numpy()
        num_kv = (self._qkv.shape[1] - self._num_heads) // 2
        turned = x.new_empty(len(x), self._num_heads + num_kv, self._dim)
        self._turned, self._scales = turned.numpy(), x.new_empty(turned.shape[:2]).numpy()
        kernels.turn(
            self._qkv,
            self._num_heads,
            *self._gain_arrays(),
            self._epsilon,
            place.cos,
            place.sin,
            self._turned,
            self._scales,
        )
        self._mixed = x.new_empty(len(x), self._num_heads * self._dim)
        self._logsums = x.new_empty(len(x), self._num_heads).numpy()
        place.share(
            lambda first, last: causal.attend(
                self._turned,
                self._qkv,
                place.boundaries,
                place.starts,
                first,
                last,
                self._scale,
                self._heads(self._mixed),
                self._logsums,
            )
        )
        return multiply(self._mixed, self._o.detach().T).add_(x)

    def backward(self, grad: Tensor, place: Place) -> tuple[Tensor, list[Tensor]]:
        """The gradient of x, in the place of `grad`, and those of the parameters."""
        of_o = multiply(grad.T, self._mixed)
        grad_mixed = multiply(grad, self._o.detach())
        of_turned = np.empty_like(self._turned)
        of_qkv = torch.empty(len(grad), len(self._weight))
        of_qkv_heads = of_qkv.view(self._qkv.shape).numpy()
        place.share(
            lambda first, last: causal.attend_backward(
                self._heads(grad_mixed),
                self._turned,
                self._qkv,
                self._heads(self._mixed),
                self._logsums,
                place.boundaries,
                place.starts,
                first,
                last,
                self._scale,
                of_turned,
                of_qkv_heads,
            )
        )
        of_gains = [torch.zeros_like(gain) for gain in self._gains]
        kernels.turn_backward(
            of_turned,
            self._qkv,
            self._num_heads,
            *self._gain_arrays(),
            place.cos,
            place.sin,
            self._scales,
            of_qkv_heads,
            *([gain.numpy() for gain in of_gains] or NO_GAINS),
        )
        grad, of_norm = self._norm.backward(multiply(of_qkv, self._weight), onto=grad)
        rows = [len(projection.weight) for projection in self._projections]
        weights = multiply(of_qkv.T, self._h).split_with_sizes(rows)
        biases = of_qkv.sum(0).split_with_sizes(rows) if self._biases() else ()
        return grad, [of_norm, *weights, *biases, *of_gains, of_o]

    def _biases(self) -> list[Tensor]:
        return [projection.bias for projection in self._projections if projection.bias is not None]

    def _gain_arrays(self) -> "tuple[Floats, Floats] | list[Floats]":
        return [gain.detach().numpy() for gain in self._gains] or NO_GAINS

    def _heads(self, x: Tensor) -> Floats:
        """[T, H, D] of [T, H D]."""
        array: Floats = x.numpy().reshape(len(x), self._num_heads, self._dim)
        return array


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
        self._gate, self._up = multiply(self._h, self._g.detach().T), multiply(self._h, self._u.detach().T)
        inner = torch.empty_like(self._gate)
        kernels.silu_times(*(part.view(-1).numpy() for part in (self._gate, self._up, inner)))
        return multiply(inner, self._d.detach().T).add_(x)

    def backward(self, grad: Tensor, place: Place) -> tuple[Tensor, list[Tensor]]:
        """The gradient of x, in the place of `grad`, and those of the parameters. To be called once."""
        inner = multiply(grad, self._d.detach())
        kernels.silu_times_backward(*(part.view(-1).numpy() for part in (self._gate, self._up, inner)))
        of_d = multiply(grad.T, inner)
        grad_h = add_product(self._gate, self._g.detach(), multiply(self._up, self._u.detach()))
        grad, of_norm = self._norm.backward(grad_h, onto=grad)
        of_g, of_u = multiply(self._gate.T, self._h), multiply(self._up.T, self._h)
        return grad, [of_norm, of_g, of_u, of_d]


Block = Attention | Mlp


class RowNorm:
    """An RMSNorm of rows, [T, hidden]."""

    def __init__(self, module: Any) -> None:
        self.gain: Tensor = module.weight
        self._epsilon: float = module.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._x, self._scale = x.numpy(), np.empty(len(x), np.float32)
        kernels.normalize(self._x, self.gain.detach().numpy(), self._epsilon, out.numpy(), self._scale)
        return out

    def backward(self, grad: Tensor, *, onto: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The gradient of x, added to `onto` where there is one, and that of the gain."""
        grad_x = torch.zeros_like(grad) if onto is None else onto
        grad_gain = torch.zeros_like(self.gain)
        kernels.normalize_backward(
            grad.numpy(), self._x, self.gain.detach().numpy(), self._scale, grad_x.numpy(), grad_gain.numpy()
        )
        return grad_x, grad_gain
