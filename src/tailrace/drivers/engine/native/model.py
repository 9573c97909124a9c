"""A Llama-like causal LM: its weights, read from a Hugging Face folder, and the forward pass.

The forward pass computes what the Hugging Face modules do, with fewer kernel launches: q, k and v are one
matrix, gate and up are another, and q and k are normalised and rotated together. Attention is passed in,
because it is what differs between a prefill and a decode step.

Suffixes: T tokens of a call, H query heads, K key-value heads, D head dimension, V vocabulary.
"""

from collections import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typing_extensions import override

from tailrace.devices import for_fused_attention
from tailrace.drivers.engine.native.cache import Slot
from tailrace.drivers.engine.native.sampler import on_device
from tailrace.drivers.models.causal_lm import FILES_ALONE
from tailrace.model_folder import check_all_used, check_files, folder_error, weight_files

FLASH = torch.ops.aten._flash_attention_forward
"""The operator that `varlen_attn` of torch calls. That function passes `seqused_k` on from torch 2.12 on."""
MIN_PACKED, ROWS = 2**18, 16
"""A matrix with fewer elements stays in the processor's cache. The layout is chosen for so many rows."""

Adapted = abc.Sequence[tuple["Lora", Tensor | None]]
"""Adapters, and to which rows of a call each is added; None: to all."""


class Matrix:
    """The weight of a linear layer, [out, in]. A CPU computes few rows, as in decoding, at the speed of its
    memory: a large matrix has a copy there in the layout of oneDNN, which is 1.7 times as fast on 16 rows.

    Args:
        rows: of the layers that an adapter may name, the rows of each, in their order.
    """

    def __init__(self, weight: Tensor, rows: Mapping[str, int]) -> None:
        self.weight, self.rows, self.packed = weight, rows, None

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


class CausalLM:
    """Weights of a Hugging Face folder, and the forward pass. Raises a ConfigError as `check_files`, and if
    transformers refuses the config or the weights do not fit it. `max_tokens`: rotary embeddings are made
    for positions below it; at most the model's context."""

    def __init__(self, path: Path, *, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        check_files(path)
        self.device, self._dtype = device, dtype
        self._weights: dict[str, Tensor] = {}
        """Views of the memory of the weights, by their Hugging Face names."""
        try:
            self._allocate(AutoConfig.from_pretrained(path, **FILES_ALONE), max_tokens)
        except Exception as error:  # a value that `check_files` does not know
            raise folder_error(path, f"config.json cannot be used: {error}") from error
        storages = [weight.untyped_storage() for weight in self._weights.values()]
        self._storages = {storage.data_ptr(): (storage, storage.nbytes()) for storage in storages}
        self.restore(path)

    def _allocate(self, config: PreTrainedConfig, max_tokens: int) -> None:
        self._config, self._heads = config, (config.num_attention_heads, config.num_key_value_heads)
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.max_tokens = min(max_tokens, config.max_position_embeddings)
        like, positions = torch.empty(0, dtype=self._dtype), torch.arange(self.max_tokens)[None]
        rotations = LlamaRotaryEmbedding(config)(like, positions)
        self._cos, self._sin = (x[0, :, None].to(self.device) for x in rotations)  # [max_tokens, 1, D]
        self._sin[..., : self._head_dim // 2].neg_()
        hidden, vocabulary = config.hidden_size, config.vocab_size
        embedding = self._named({"model.embed_tokens.weight": vocabulary}, self._empty(vocabulary, hidden))
        self._embedding, self._head = embedding, Matrix(embedding, {})
        if not config.tie_word_embeddings:
            head = self._named({"lm_head.weight": vocabulary}, torch.empty_like(embedding))
            self._head = Matrix(head, {})
        self._last_norm = self._named({"model.norm.weight": hidden}, self._empty(hidden))
        self._layers = [self._layer(f"model.layers.{index}") for index in range(config.num_hidden_layers)]

    def _layer(self, name: str) -> Layer:
        hidden, mlp, dim = self._config.hidden_size, self._config.intermediate_size, self._head_dim
        heads, num_kv = dict(zip("qk", self._heads, strict=True)), self._heads[1]
        qkv = {f"{name}.self_attn.{x}_proj": num * dim for x, num in (heads | {"v": num_kv}).items()}
        biases = {f"{layer}.bias": num for layer, num in qkv.items()}
        norms = {f"{name}.self_attn.{x}_norm.weight": num for x, num in heads.items()}
        has_bias, has_norm = (self._config.model_type == each for each in ("qwen2", "qwen3"))
        return Layer(
            input_norm=self._named({f"{name}.input_layernorm.weight": hidden}, self._empty(hidden)),
            qkv=self._matrix(qkv, hidden),
            qkv_bias=self._named(biases, self._empty(sum(qkv.values()))) if has_bias else None,
            qk_norm=self._named(norms, self._empty(sum(self._heads), dim)) if has_norm else None,
            out=self._matrix({f"{name}.self_attn.o_proj": hidden}, heads["q"] * dim),
            post_norm=self._named({f"{name}.post_attention_layernorm.weight": hidden}, self._empty(hidden)),
            gate_up=self._matrix({f"{name}.mlp.{each}_proj": mlp for each in ("gate", "up")}, hidden),
            down=self._matrix({f"{name}.mlp.down_proj": hidden}, mlp),
        )

    def _matrix(self, rows: Mapping[str, int], num_in: int) -> Matrix:
        weight = self._empty(sum(rows.values()), num_in)
        if not _has_copy(weight):
            weight = self._empty(num_in, len(weight)).T  # without a copy the faster layout for few rows
        return Matrix(self._named({f"{layer}.weight": num for layer, num in rows.items()}, weight), rows)

    def _named(self, rows: Mapping[str, int], joined: Tensor) -> Tensor:
        """Name weights of so many rows each, which lie one after another in a tensor."""
        self._weights |= zip(rows, joined.split_with_sizes([*rows.values()]), strict=True)
        return joined

    @property
    def vocabulary(self) -> int:
        """Number of its tokens."""
        return int(self._config.vocab_size)

    def release(self) -> None:
        """Free the memory of the weights, until `restore`."""
        for matrix in self._matrices():
            matrix.packed = None
        for storage, _ in self._storages.values():
            storage.resize_(0)

    def restore(self, path: Path, on_file: Callable[[], None] = lambda: None) -> None:
        """Take the memory, with the weights of a Hugging Face folder. Raises RuntimeError if there is not
        enough memory, and a ConfigError if the folder does not have them."""
        for storage, size in self._storages.values():
            storage.resize_(size)
        tensors: dict[str, Tensor] = {}
        try:
            for file in weight_files(path):
                tensors |= load_file(file)
                on_file()
            self.load(tensors)
            check_all_used(path, tensors.keys() - self._weights.keys())
        except (SafetensorError, ValueError) as error:
            raise folder_error(path, str(error)) from error

    def empty_cache(self) -> Tensor:
        """[layers, 0, K, D], of the model's device and type."""
        return self._empty(self._config.num_hidden_layers, 0, self._heads[1], self._head_dim)

    @cached_property
    def why_no_varlen(self) -> str:
        """Why this device does not compute `VarlenAttention` of the model's heads; empty if it does."""
        q, k = (self._empty(1, heads, self._head_dim) for heads in self._heads)
        try:
            VarlenAttention.of((k,), torch.zeros(1, device=self.device), [((0, 1), range(1))]).attend(q, k, k)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self._dtype)

    def _matrices(self) -> Iterator[Matrix]:
        for layer in self._layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self._head

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
        suffix_a, suffix_b = ".lora_A.weight", ".lora_B.weight"
        layers = {name.removesuffix(suffix_a) for name in tensors if name.endswith(suffix_a)}
        matrices, factors = list(self._matrices()), dict[Matrix, tuple[Tensor, Tensor]]()
        shapes = {each: (num, m.weight.shape[1]) for m in matrices for each, num in m.rows.items()}
        for layer in layers:
            a, b = tensors[layer + suffix_a], tensors.get(layer + suffix_b)
            if b is None or (*shapes.get(layer, ()), len(a)) != (len(b), a.shape[1], b.shape[1]):
                raise ValueError(f"the adapter of {layer} is incomplete or of another model")
        for matrix in matrices:
            if own := [layer for layer in matrix.rows if layer in layers]:
                a = torch.cat([tensors[layer + suffix_a] for layer in own])
                nothing = {layer + suffix_b: a.new_empty(num, 0) for layer, num in matrix.rows.items()}
                parts = [tensors.get(name, none) for name, none in nothing.items()]
                b = scale * torch.block_diag(*parts)  # type: ignore[no-untyped-call]
                a, b = (factor.T.to(self.device, self._dtype).contiguous() for factor in (a, b))
                factors[matrix] = a, b
        return factors

    def read(
        self,
        pieces: abc.Sequence[Tensor],
        parts: abc.Sequence["Extent"],
        ids: Tensor,
        adapted: Adapted = (),
    ) -> Tensor:
        """Read tokens of sequences, [T] int64, and write their keys and values into slots of pieces. Returns
        the residual stream, [T, hidden]."""
        positions = [position for _, new in parts for position in new]
        places = [start + position for (start, _), new in parts for position in new]
        on = on_device([positions, places], self.device)
        attention = SdpaAttention if self.why_no_varlen else VarlenAttention.of
        return self.forward(ids, on[0], attention(pieces, on[1], parts), adapted)

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


class SdpaAttention(Attention):
    """Causal attention by torch's scaled_dot_product_attention. Sequences with as few new tokens each, whose
    slots of one capacity follow one another, are computed together; others one after another."""

    def __init__(self, pieces: abc.Sequence[Tensor], places: Tensor, parts: abc.Sequence[Extent]) -> None:
        super().__init__(pieces, places)
        self._runs: list[tuple[slice, Slot, int, int, Tensor | None]] = []
        row = 0
        for _, numbered in groupby(enumerate(parts), _neighbours):
            slots, news = zip(*(part for _, part in numbered), strict=True)
            (start, capacity), new, mask = slots[0], news[0], None
            lengths, rows = [own.stop for own in news], slice(row, row := row + len(news) * len(new))
            longest = max(lengths)
            if (len(new) == 1 and min(lengths) < longest) or (len(new) > 1 and new.start):
                starts = torch.arange(start, start + len(news) * capacity, capacity, device=places.device)
                positions = (places[rows].view(len(news), -1) - starts[:, None])[:, None, :, None]
                beyond = torch.arange(longest, device=places.device) > positions
                zeros = pieces[0].new_zeros(beyond.shape)
                mask = zeros.masked_fill_(beyond, float("-inf"))  # [sequences, 1, new tokens, longest]
            self._runs.append((rows, slots[0], len(news), longest, mask))

    @override
    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        _, num_kv, dim = keys.shape
        outs = []
        for rows, (start, capacity), num, longest, mask in self._runs:
            query, slots, causal = q[rows], slice(start, start + num * capacity), mask is None
            key, value = (x[slots].view(num, capacity, num_kv, dim)[:, :longest] for x in (keys, values))
            key, value = key.transpose(1, 2), value.transpose(1, 2)
            if len(query) == num:
                # The query heads that share a key-value head are passed as several queries of one head.
                query = query.view(num, num_kv, -1, dim)
                outs.append(F.scaled_dot_product_attention(query, key, value, mask).flatten(1, 2))
            else:
                query = query.view(num, -1, *query.shape[1:]).transpose(1, 2)
                fused = for_fused_attention(query, key, value)
                out = F.scaled_dot_product_attention(query, *fused, mask, is_causal=causal, enable_gqa=True)
                outs.append(out.transpose(1, 2).flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _neighbours(numbered: tuple[int, Extent]) -> tuple[int, ...]:
    """Equal for neighbouring slots of one capacity with as few new tokens each."""
    number, ((start, capacity), new) = numbered
    is_short = len(new) == 1 or (new.start > 0 and len(new) <= ROWS)
    return (start - number * capacity, capacity, len(new)) if is_short else (number,)


@dataclass(slots=True)
class VarlenAttention(Attention):
    """Causal attention by one kernel of a GPU, which reads the slots' places and lengths on the device.
    `slots`: [3, S + 1] int32. Of S sequences the first position of the slot, ascending, with one more; the
    tokens, the new ones included; and the first row, with one more. `longest`: the most rows and tokens."""

    slots: Tensor
    longest: tuple[int, int]

    @classmethod
    def of(cls, pieces: abc.Sequence[Tensor], places: Tensor, parts: abc.Sequence[Extent]) -> "Attention":
        """That of tokens as the host knows them."""
        rows, lengths = [len(new) for _, new in parts], [new.stop for _, new in parts]
        starts = [*(start for (start, _), _ in parts), len(pieces[0])]
        slots = [starts, [*lengths, 0], [0, *accumulate(rows)]]
        return cls(pieces, places, on_device(slots, places.device).int(), (max(rows), max(lengths)))

    @override
    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        starts, lengths, boundaries = self.slots
        # One row attends to all. Without a window the kernel computes the query heads of a key together.
        is_causal = self.longest[0] > 1
        options: Any = {"window_size_left": -1, "window_size_right": 0 if is_causal else -1}
        options |= {"dropout_p": 0.0, "is_causal": is_causal, "return_debug_mask": False}
        options |= {"seqused_k": lengths[:-1]}
        out: Tensor = FLASH(q, keys, values, boundaries, starts, *self.longest, **options)[0]
        return out


class GatheredAttention(VarlenAttention):
    """Attention of one new token of each sequence, by kernels that every device has: keys and values of
    `longest` positions of each slot are copied, and those behind its tokens are masked."""

    @override
    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        starts, lengths, _ = self.slots[:, :-1].long()
        positions = torch.arange(self.longest[1], device=q.device)
        is_own = positions < lengths[:, None]
        # What lies behind the tokens may not be finite. The first position is.
        copied = starts[:, None] + torch.where(is_own, positions, 0)
        key, value = (x[copied].transpose(1, 2) for x in (keys, values))  # [S, K, longest, D]
        query = q.view(len(q), key.shape[1], -1, q.shape[-1])  # the heads of a key are its queries
        return F.scaled_dot_product_attention(query, key, value, is_own[:, None, None]).flatten(1, 2)
