"""The forward pass of a Llama-like causal LM, written for few kernel launches.

What differs from the Hugging Face modules is only how the same function is computed:

- Weights are stored transposed, [in, out], and q, k and v are one matrix. Gate and up are not: their product
  is elementwise, and faster between contiguous matrices.
- The gains of the norms before a projection are folded into that projection's rows, and RMSNorm is
  x / hypot(|x|, sqrt(D * eps)): its factor sqrt(D) is folded as well.
- The two halves that rotary embedding pairs are interleaved within each head of q and k, so that the
  rotation is one complex product. Scores are sums over the head, so they do not change.
- Each of q and k is scaled by D^(-1/4) with its rotation, so that their products need no scale.
- The temperature divides the gain of the last norm, so that logits come out at the sampling temperature.

Attention is the caller's: it is all that differs between a prompt and a decode step (attention.py).

Suffixes: _T tokens of a call, _H query heads, _K key-value heads, _D head dimension, _V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tailrace.engine.native.architecture import Architecture


class Attend(Protocol):
    """Attention of one layer: keeps k and v, and returns [T, H * D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, H, D], k and v: [T, K, D]; q and k rotated and scaled."""


@dataclass(slots=True)
class Layer:
    """Weights of one block, [in, out]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    qk_gain: Tensor | None
    """[H + K, D]: gains of the norms of q and k (Qwen3)."""
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Model:
    """Weights and the forward pass. Not an nn.Module: nothing here is trained.

    Args:
        temperature: logits are divided by it.
        max_tokens: rotations are made for positions below it.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        temperature: float,
        max_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.architecture = arch = architecture
        self.temperature = temperature
        self.device, self.dtype = device, dtype
        self.rotations = _rotations(arch, max_tokens).to(device)
        self.embedding = torch.empty(arch.vocab_size, arch.hidden_size, device=device, dtype=dtype)
        self.head = self._matrix(arch.hidden_size, arch.vocab_size)
        self.last_gain = torch.empty(arch.hidden_size, device=device, dtype=torch.float32)
        self.layers = [self._empty_layer() for _ in range(arch.num_layers)]
        self._hidden_epsilon = torch.tensor(sqrt(arch.hidden_size * arch.epsilon), device=device)
        self._head_epsilon = torch.tensor(sqrt(arch.head_dim * arch.epsilon), device=device)

    def _matrix(self, num_in: int, num_out: int) -> Tensor:
        # Rows one cache line longer than needed: strides of a power of two evict each other from the
        # CPU's caches and cost the product up to half its speed.
        line = 64 // self.dtype.itemsize
        return torch.empty(num_in, num_out + line, device=self.device, dtype=self.dtype)[:, :num_out]

    def _empty_layer(self) -> Layer:
        arch = self.architecture
        num_rotated = arch.num_heads + arch.num_kv_heads
        qkv_size = (num_rotated + arch.num_kv_heads) * arch.head_dim
        gain = torch.empty(num_rotated, arch.head_dim, device=self.device) if arch.qk_norm else None
        bias = torch.empty(qkv_size, device=self.device, dtype=self.dtype) if arch.qkv_bias else None
        return Layer(
            qkv=self._matrix(arch.hidden_size, qkv_size),
            qkv_bias=bias,
            qk_gain=gain,
            out=self._matrix(arch.num_heads * arch.head_dim, arch.hidden_size),
            gate=self._matrix(arch.hidden_size, arch.intermediate_size),
            up=self._matrix(arch.hidden_size, arch.intermediate_size),
            down=self._matrix(arch.intermediate_size, arch.hidden_size),
        )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite all weights, in place, from a Hugging Face state dict that `check_weights` passed."""
        root = sqrt(self.architecture.hidden_size)
        embedding = tensors["model.embed_tokens.weight"]
        head = embedding if self.architecture.tied else tensors["lm_head.weight"]
        self.embedding.copy_(embedding)
        self.head.copy_(head.t())
        self.last_gain.copy_(tensors["model.norm.weight"].float() * (root / self.temperature))
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            self._load_attention(layer, tensors, prefix)
            gain = tensors[f"{prefix}post_attention_layernorm.weight"].float() * root
            layer.gate.copy_((tensors[f"{prefix}mlp.gate_proj.weight"].float() * gain).t())
            layer.up.copy_((tensors[f"{prefix}mlp.up_proj.weight"].float() * gain).t())
            layer.down.copy_(tensors[f"{prefix}mlp.down_proj.weight"].t())

    def _load_attention(self, layer: Layer, tensors: Mapping[str, Tensor], prefix: str) -> None:
        arch, attention = self.architecture, f"{prefix}self_attn."
        gain = tensors[f"{prefix}input_layernorm.weight"].float() * sqrt(arch.hidden_size)
        q, k, v = (tensors[f"{attention}{name}_proj.weight"].float() for name in "qkv")
        layer.qkv.copy_((torch.cat([self._interleave(q), self._interleave(k), v]) * gain).t())
        layer.out.copy_(tensors[f"{attention}o_proj.weight"].t())
        if layer.qkv_bias is not None:
            q, k, v = (tensors[f"{attention}{name}_proj.bias"] for name in "qkv")
            layer.qkv_bias.copy_(torch.cat([self._interleave(q), self._interleave(k), v]))
        if layer.qk_gain is not None:
            q, k = (self._interleave(tensors[f"{attention}{name}_norm.weight"].float()) for name in "qk")
            layer.qk_gain[: arch.num_heads] = q * sqrt(arch.head_dim)
            layer.qk_gain[arch.num_heads :] = k * sqrt(arch.head_dim)

    def _interleave(self, rows: Tensor) -> Tensor:
        """Within each head of the first axis, row i beside row i + D/2."""
        halves = rows.reshape(-1, 2, self.architecture.head_dim // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The residual stream after the last block, [T, hidden], for int64 ids and positions, [T]."""
        x = self.embedding[ids]
        rotations = self.rotations[positions].unsqueeze(1)
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, _normalized(x, self._hidden_epsilon), rotations)
            x.addmm_(attend(index, q, k, v), layer.out)
            h = _normalized(x, self._hidden_epsilon)
            gate = F.silu(torch.mm(h, layer.gate), inplace=True)
            x.addmm_(gate.mul_(torch.mm(h, layer.up)), layer.down)
        return x

    def _qkv(self, layer: Layer, h: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H, D], [T, K, D] and [T, K, D] of a normalised residual stream; q and k rotated and scaled."""
        arch, bias = self.architecture, layer.qkv_bias
        qkv = torch.mm(h, layer.qkv) if bias is None else torch.addmm(bias, h, layer.qkv)
        sizes = arch.num_heads + arch.num_kv_heads, arch.num_kv_heads
        qk, v = torch.split_with_sizes(qkv.view(len(h), -1, arch.head_dim), sizes, 1)
        if layer.qk_gain is not None:
            qk = (qk / _length(qk, self._head_epsilon)).mul_(layer.qk_gain)
        rotated = qk.float()
        rotated.view(torch.complex64).mul_(rotations)
        q, k = torch.split_with_sizes(rotated.to(h.dtype), (arch.num_heads, arch.num_kv_heads), 1)
        return q, k, v

    def logits(self, x: Tensor) -> Tensor:
        """[T, V], float32, at the sampling temperature, of a residual stream [T, hidden]."""
        h = (x / _length(x, self._hidden_epsilon) * self.last_gain).to(x.dtype)
        return torch.mm(h, self.head).float()


def _length(x: Tensor, epsilon: Tensor) -> Tensor:
    """sqrt(|x|^2 + epsilon^2) of the last axis, float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.hypot(norm, epsilon, out=norm)


def _normalized(x: Tensor, epsilon: Tensor) -> Tensor:
    return (x / _length(x, epsilon)).to(x.dtype)


def _rotations(arch: Architecture, max_tokens: int) -> Tensor:
    """Complex [max_tokens, D / 2]: what position p turns and scales pair i by."""
    angles = torch.arange(max_tokens, dtype=torch.float32)[:, None] * arch.inverse_frequencies
    return torch.polar(torch.full_like(angles, arch.rotation_scale * arch.head_dim**-0.25), angles)
