"""A Llama-like causal LM: its weights, read from a Hugging Face folder, and the forward pass.

The forward pass computes what the Hugging Face modules do, with fewer kernel launches: q, k and v are one
matrix, gate and up are another, and q and k are normalised and rotated together. Attention is passed in,
because it is what differs between a prefill and a decode step.

Suffixes: T tokens of a call, H query heads, K key-value heads, D head dimension, V vocabulary.
"""

from collections import abc, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typing_extensions import override

from tailrace.devices import for_fused_attention
from tailrace.drivers.engine.native.cache import Slot
from tailrace.drivers.engine.native.sampler import on_device
from tailrace.drivers.engine.native.support import check_model
from tailrace.model_folder import folder_error, weight_files

MIN_PACKED, ROWS = 2**18, 16
"""A matrix with fewer elements stays in the processor's cache. The layout is chosen for so many rows."""

Adapted = abc.Sequence[tuple["Lora", Tensor | None]]
"""Adapters, and to which rows of a call each is added; None: to all."""


class Matrix:
    """The weight of a linear layer, [out, in]. A CPU computes few rows, as in decoding, at the speed of its
    memory: a large matrix has a copy there in the layout of oneDNN, which is 1.7 times as fast on 16 rows."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.packed = weight, None

    def pack(self) -> None:
        """Take the new values of the weight."""
        if _has_copy(self.weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)

    def __call__(self, x: Tensor, bias: Tensor | None = None, adapted: Adapted = ()) -> Tensor:
        if self.packed is None:
            out = F.linear(x, self.weight, bias)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        for adapter, rows in adapted:
            if self in adapter:
                a, b = adapter[self]
                if rows is None:
                    out.addmm_(x @ a, b)
                else:
                    out.index_add_(0, rows, x[rows] @ a @ b)
        return out


Lora = Mapping[Matrix, tuple[Tensor, Tensor]]
"""Factors of each adapted matrix: their product is added to its transpose, [in, R] and [R, out]."""


def _has_copy(weight: Tensor) -> bool:
    return weight.numel() >= MIN_PACKED and weight.device.type == "cpu" and torch._C._has_mkldnn


@dataclass(slots=True)
class Layer:
    """The weights of one block.

    Args:
        qk_norm: [H + K, D], gains of the norms of q and k (Qwen3).
        qkv_bias: of Qwen2.
    """

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Matrix
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix

    def parts(self, sizes: tuple[int, int, int]) -> dict[str, Tensor]:
        """Views of the weights by their Hugging Face names in the block. `sizes`: the rows of q, k, v."""
        gate, up = self.gate_up.weight.chunk(2)
        parts = {
            "input_layernorm.weight": self.input_norm,
            "self_attn.o_proj.weight": self.out.weight,
            "post_attention_layernorm.weight": self.post_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down.weight,
        }
        for kind, joined in (("weight", self.qkv.weight), ("bias", self.qkv_bias)):
            if joined is not None:
                parts |= {
                    f"self_attn.{x}_proj.{kind}": part
                    for x, part in zip("qkv", joined.split_with_sizes(sizes), strict=True)
                }
        if self.qk_norm is not None:
            norms = self.qk_norm.split_with_sizes([size // self.qk_norm.shape[1] for size in sizes[:2]])
            parts |= {f"self_attn.{x}_norm.weight": norm for x, norm in zip("qk", norms, strict=True)}
        return parts


class CausalLM:
    """Weights and the forward pass. Made by `from_pretrained`. `max_tokens`: rotary embeddings are made for
    positions below it; at most the model's context."""

    def __init__(
        self, config: PreTrainedConfig, *, max_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device, self._dtype = device, dtype
        self.max_tokens = min(max_tokens, config.max_position_embeddings)
        self._config, self._heads = config, (config.num_attention_heads, config.num_key_value_heads)
        self._head_dim = _head_dim(config)
        self._cos, self._sin = (x.to(device, dtype) for x in _rotations(config, self.max_tokens))
        self._embedding = self._empty(config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        self._head = Matrix(self._embedding if tied else torch.empty_like(self._embedding))
        self._last_norm = self._empty(config.hidden_size)
        self._layers = [self._empty_layer() for _ in range(config.num_hidden_layers)]
        self._weights = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._last_norm}
        if not tied:
            self._weights["lm_head.weight"] = self._head.weight
        num_q, num_kv = (heads * self._head_dim for heads in self._heads)
        for index, layer in enumerate(self._layers):
            parts = layer.parts((num_q, num_kv, num_kv))
            self._weights |= {f"model.layers.{index}.{name}": part for name, part in parts.items()}
        storages = [weight.untyped_storage() for weight in self._weights.values()]
        self._storages = {storage.data_ptr(): (storage, storage.nbytes()) for storage in storages}

    @classmethod
    def from_pretrained(
        cls, path: Path, *, max_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> "CausalLM":
        """Load a Hugging Face folder. Raises a ConfigError as `check_model`, and if transformers refuses the
        config or the weights do not fit it."""
        check_model(path)
        try:
            config = AutoConfig.from_pretrained(path)
            model = cls(config, max_tokens=max_tokens, device=device, dtype=dtype)
        except Exception as error:  # a value that `check_model` does not know
            raise folder_error(path, f"config.json cannot be used: {error}") from error
        model._load_folder(path)
        return model

    def release(self) -> None:
        """Free the memory of the weights, until `restore`."""
        for matrix in self._matrices():
            matrix.packed = None
        for storage, _ in self._storages.values():
            storage.resize_(0)

    def restore(self, path: Path, on_file: Callable[[], None]) -> None:
        """Take the memory back, with the weights of a Hugging Face folder. Raises RuntimeError if there is
        not enough memory, and a ConfigError if the folder does not have them any more."""
        for storage, size in self._storages.values():
            storage.resize_(size)
        self._load_folder(path, on_file)

    def _load_folder(self, path: Path, on_file: Callable[[], None] = lambda: None) -> None:
        tensors: dict[str, Tensor] = {}
        try:
            for file in weight_files(path):
                tensors |= load_file(file)
                on_file()
            self.load(tensors)
        except (SafetensorError, ValueError) as error:
            raise folder_error(path, str(error)) from error

    def empty_cache(self) -> Tensor:
        """[layers, 0, K, D], of the model's device and type."""
        return self._empty(self._config.num_hidden_layers, 0, self._heads[1], self._head_dim)

    def why_no_varlen(self) -> str:
        """Why this device does not compute `VarlenAttention` of the model's heads; empty if it does."""
        q, k = (self._empty(1, heads, self._head_dim) for heads in self._heads)
        slots = torch.tensor([[0, 1], [1, 0], [0, 1]], dtype=torch.int32, device=self.device)
        try:
            VarlenAttention((), slots, slots, (1, 1)).attend(q, k, k)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self._dtype)

    def _matrix(self, num_out: int, num_in: int) -> Matrix:
        weight = self._empty(num_out, num_in)
        # Without a copy [in, out] is the faster layout for few rows.
        return Matrix(weight if _has_copy(weight) else self._empty(num_in, num_out).T)

    def _matrices(self) -> Iterator[Matrix]:
        for layer in self._layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self._head

    def _empty_layer(self) -> Layer:
        config, dim, num_rotated = self._config, self._head_dim, sum(self._heads)
        hidden, qkv_size = config.hidden_size, (num_rotated + self._heads[1]) * dim
        return Layer(
            input_norm=self._empty(hidden),
            qkv=self._matrix(qkv_size, hidden),
            qkv_bias=self._empty(qkv_size) if config.model_type == "qwen2" else None,
            qk_norm=self._empty(num_rotated, dim) if config.model_type == "qwen3" else None,
            out=self._matrix(hidden, self._heads[0] * dim),
            post_norm=self._empty(hidden),
            gate_up=self._matrix(2 * config.intermediate_size, hidden),
            down=self._matrix(hidden, config.intermediate_size),
        )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite all weights, in place, from a Hugging Face state dict. Raises ValueError if a tensor is
        missing or of another shape; nothing has changed then."""
        check_weights(tensors, self.weights())
        for name, weight in self._weights.items():
            weight.copy_(tensors[name])
        for matrix in self._matrices():
            matrix.pack()

    def weights(self) -> dict[str, Tensor]:
        """Views of the weights as `load` takes them: the norms of q and k have one gain for all heads."""
        return {name: w[0] if "norm" in name and w.dim() == 2 else w for name, w in self._weights.items()}

    def adapter(self, tensors: Mapping[str, Tensor], scale: float) -> Lora:
        """Return what is added to matrices: scale B A for each adapted weight. Raises a ValueError if it is
        of no linear layer of this model, or of another shape, or a B is missing. `tensors`: A [rank, in] and
        B [out, rank], named as in drivers/trainer/adapter.py."""
        suffix, joined = ".lora_A.weight", defaultdict[int, list[tuple[int, Tensor, Tensor]]](list)
        for layer in (name.removesuffix(suffix) for name in tensors if name.endswith(suffix)):
            a, b = tensors[f"{layer}{suffix}"], tensors.get(f"{layer}.lora_B.weight")
            weight = self._weights.get(f"{layer}.weight") if layer.endswith("_proj") else None
            if weight is None or b is None or (*weight.shape, len(a)) != (len(b), a.shape[1], b.shape[1]):
                raise ValueError(f"the adapter of {layer} is incomplete or of another model")
            joined[_storage(weight)].append((weight.storage_offset() // weight.stride(0), a, scale * b))
        matrices = (matrix for matrix in self._matrices() if _storage(matrix.weight) in joined)
        return {matrix: self._factors(matrix, joined[_storage(matrix.weight)]) for matrix in matrices}

    def _factors(self, matrix: Matrix, parts: list[tuple[int, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Join those of the layers of a matrix. `parts`: the first row of each layer, its A and its B."""
        a, start = torch.cat([a for _, a, _ in parts]), 0
        joined = a.new_zeros(len(matrix.weight), len(a))
        for row, _, b in parts:
            joined[row : row + len(b), start : (start := start + b.shape[1])] = b
        a, b = (factor.T.to(self.device, self._dtype).contiguous() for factor in (a, joined))
        return a, b

    def forward(self, ids: Tensor, positions: Tensor, attend: "Attention", adapted: Adapted = ()) -> Tensor:
        """The residual stream after the last block, [T, hidden], for int64 ids and positions, both [T]."""
        x = F.embedding(ids, self._embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm), layer.qkv_bias, adapted)
            x += layer.out(attend(index, *self._rotated(layer, qkv, cos, sin)), adapted=adapted)
            gate, up = layer.gate_up(self._norm(x, layer.post_norm), adapted=adapted).chunk(2, -1)
            x += layer.down(F.silu(gate) * up, adapted=adapted)
        return x

    def _rotated(self, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, K, D] of what the joined matrix gives; q and k are rotated."""
        num_heads = sum(self._heads) + self._heads[1]
        qkv = qkv.view(len(qkv), num_heads, self._head_dim)
        qk, v = torch.split_with_sizes(qkv, (sum(self._heads), self._heads[1]), 1)
        if layer.qk_norm is not None:
            qk = self._norm(qk) * layer.qk_norm
        first, second = qk.chunk(2, -1)
        qk = qk * cos + torch.cat((second, first), -1) * sin
        q, k = torch.split_with_sizes(qk, self._heads, 1)
        return q, k, v

    def _norm(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], gain, self._config.rms_norm_eps)

    def logits(self, x: Tensor) -> Tensor:
        """[T, V], float32, of a residual stream [T, hidden]."""
        return self._head(self._norm(x, self._last_norm)).float()


def check_weights(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raises a ValueError if tensors lack one of the weights, or it has another shape there."""
    wrong = [n for n, w in weights.items() if n not in tensors or tensors[n].shape != w.shape]
    if wrong:
        named = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        num = f"{len(wrong)} of {len(weights)}"
        raise ValueError(f"{num} weights are missing or of another shape: {named}")


def _storage(weight: Tensor) -> int:
    return weight.untyped_storage().data_ptr()


def _head_dim(config: PreTrainedConfig) -> int:
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def _rotations(config: PreTrainedConfig, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the rotary embedding, both [max_tokens, 1, D]."""
    rope: dict[str, Any] = config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, _head_dim(config), 2, dtype=torch.float32) / _head_dim(config)
        frequencies, scale = 1.0 / rope["rope_theta"] ** exponents, 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    angles = torch.arange(max_tokens)[:, None, None] * frequencies.float()
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


@dataclass(slots=True)
class Attention:
    """Attention of a call over slots of the cache, where it writes keys and values of the call first.
    `pieces`: of the cache, or like them. `places`: [T], their positions that are written."""

    pieces: abc.Sequence[Tensor]
    places: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [T, H * D] for q [T, H, D], k and v [T, K, D] of a layer; q and k are rotated."""
        keys, values = self.pieces[2 * layer : 2 * layer + 2]
        keys.index_copy_(0, self.places, k)
        values.index_copy_(0, self.places, v)
        return self.attend(q, keys, values).flatten(1)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return [T, H, D] or [T, H * D]; keys and values are those of all positions, [N, K, D]."""
        raise NotImplementedError


Extent = tuple[Slot, range]
"""Tokens of a sequence: its slot, and their positions in the sequence."""


@dataclass(slots=True)
class PrefillAttention(Attention):
    """Causal attention of parts of sequences, one after another without padding, each to its own slot."""

    parts: abc.Sequence[Extent]

    @override
    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        outs = []
        queries = q.split_with_sizes([len(own) for _, own in self.parts])
        for ((start, _), own), rows in zip(self.parts, queries, strict=True):
            end, mask = start + own.stop, None
            query, key, value = (x.transpose(0, 1)[None] for x in (rows, keys[start:end], values[start:end]))
            if own.start:
                mask = torch.ones(len(own), own.stop, dtype=torch.bool, device=q.device).tril(own.start)
            fused = for_fused_attention(query, key, value)
            out = F.scaled_dot_product_attention(query, *fused, mask, is_causal=mask is None, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


class DecodeAttention(Attention):
    """One new position for each of T sequences. Those whose slots of one capacity follow one another are
    computed together."""

    def __init__(self, pieces: abc.Sequence[Tensor], places: Tensor, parts: abc.Sequence[Extent]) -> None:
        super().__init__(pieces, places)
        self._runs: list[tuple[slice, Slot, int, Tensor | None]] = []
        first = 0
        for end in range(1, len(parts) + 1):
            slot = start, capacity = parts[first][0]
            if end < len(parts) and parts[end][0] == (start + (end - first) * capacity, capacity):
                continue
            lengths, mask = [own.stop for _, own in parts[first:end]], None
            if min(lengths) < (longest := max(lengths)):
                used = on_device(lengths, places.device)[:, None, None, None]
                beyond = torch.arange(longest, device=places.device) >= used
                zeros = pieces[0].new_zeros(beyond.shape)
                mask = zeros.masked_fill_(beyond, float("-inf"))  # [n, 1, 1, longest]
            self._runs.append((slice(first, end), slot, longest, mask))
            first = end

    @override
    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        _, num_kv, dim = keys.shape
        outs = []
        for rows, (start, capacity), longest, mask in self._runs:
            # The query heads that share a key-value head are passed as several queries of one head.
            query = q[rows].view(-1, num_kv, q.shape[1] // num_kv, dim)
            of_run = slice(start, start + len(query) * capacity)
            key, value = (x[of_run].view(-1, capacity, num_kv, dim)[:, :longest] for x in (keys, values))
            key, value = key.transpose(1, 2), value.transpose(1, 2)
            outs.append(F.scaled_dot_product_attention(query, key, value, mask).flatten(1, 2))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


@dataclass(slots=True)
class VarlenAttention(Attention):
    """Both of the others by one kernel of a GPU, which reads the slots' places and lengths on the device.
    `slots`: [3, S + 1] int32. Of S sequences the first position of the slot, ascending, with one more; the
    tokens, the new ones included; and the first row, with one more. `longest`: the most rows and tokens."""

    slots: Tensor
    longest: tuple[int, int]

    @override
    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        starts, lengths, boundaries = self.slots
        # One row attends to all. Without a window the kernel computes the query heads of a key together.
        window = (-1, 0) if self.longest[0] > 1 else (-1, -1)
        options: Any = {"window_size": window, "enable_gqa": True, "seqused_k": lengths[:-1]}
        return varlen_attn(q, keys, values, boundaries, starts, *self.longest, **options)  # type: ignore
