"""Attention of packed sequences.

It is registered with transformers under the name `PACKED`. Packed sequences attend only within
themselves, and no [T, T] mask is made. On CUDA with half precision, torch's kernel for sequences of varying
length computes all at once; elsewhere scaled_dot_product_attention computes each sequence. The boundaries
arrive as `cu_seq_lens_q`, the keyword with which transformers packs for flash attention, so every
architecture that runs packed there runs packed here. Their lengths come as a list, too: to read them from the
device would stop it in each layer.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from tailrace.devices import attention_kernels, for_fused_attention
from tailrace.drivers.trainer.packing import Packing

PACKED = "tailrace_packed"
GROUPED: Mapping[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""torch's kernel takes grouped heads; before torch 2.12 nobody needs to tell."""
HARMLESS = {
    "position_ids",
    "seq_idx",
    "max_length_q",
    "max_length_k",
    "dropout",
    "use_cache",
    "output_attentions",
}
"""Arguments of an attention that do not change what packed sequences in evaluation mode get."""


def packed_causal_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sequence_lengths: Sequence[int] = (),
    keys: Tensor | None = None,
    key_lengths: Sequence[int] = (),
    **others: object,  # transformers' signature: architectures pass more than this needs
) -> tuple[Tensor, None]:
    """Causal attention of T packed tokens with H heads, G key and value heads, dimension D. Raises a
    NotImplementedError if the architecture does not pass the boundaries on, or passes an argument that would
    change the result: it is named.

    Args:
        query: [1, H, T, D]
        key, value: [1, G, T, D]
        attention_mask: ignored: the boundaries define what a token attends to.
        scaling: factor of query times key; None: D^(-1/2).
        sliding_window: number of positions that a token attends to, including itself; None: all before it.
        cu_seq_lens_q: [S + 1] int32: the S sequences begin at its first S entries, the last entry is T.
        softcap: scores are capped: softcap * tanh(score / softcap).
        s_aux: [H], sinks: scores of one more key, whose value is zero.
        sequence_lengths: [S], of the sequences.
        keys, cu_seq_lens_k, key_lengths: what each sequence attends to (`MicroBatch`), where some share a
            context. The last keys of a sequence are its own tokens.

    Returns:
        [1, T, H, D], and no attention weights.
    """
    if cu_seq_lens_q is None or not sequence_lengths:
        raise NotImplementedError("packed boundaries do not reach its attention")
    if key.shape[2] != query.shape[2]:
        raise NotImplementedError("its attention has keys that are not those of the tokens")
    for name, given in others.items():
        if given is not None and name not in HARMLESS and (name, given) != ("is_causal", True):
            raise NotImplementedError(
                f"its attention takes {name!r}, which packed attention does not compute"
            )
    if keys is None:
        key_lengths, cu_seq_lens_k = sequence_lengths, cu_seq_lens_q
    else:
        key, value = key.index_select(2, keys), value.index_select(2, keys)
    is_plain = softcap is None and s_aux is None
    if is_plain and query.is_cuda and value.dtype in (torch.bfloat16, torch.float16):
        # Autocast does not apply to the kernel: rotary embeddings may have left float32 queries and keys.
        q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        longest = max(sequence_lengths), max(key_lengths)
        boundaries = cu_seq_lens_q, cu_seq_lens_k
        # The window is aligned at the last query and the last key.
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        out = varlen_attn(q, k, v, *boundaries, *longest, scale=scaling, window_size=window, **GROUPED)
        assert isinstance(out, Tensor)
        return out[None], None
    key, value = for_fused_attention(query, key, value)
    outs = []
    queries = torch.split(query, list(sequence_lengths), dim=2)
    parts = (torch.split(x, list(key_lengths), dim=2) for x in (key, value))
    with attention_kernels():
        for q, k, v in zip(queries, *parts, strict=True):
            band = _band(q.shape[2], k.shape[2], sliding_window, q.device)
            if not is_plain:
                outs.append(_capped_attention(q, k, v, band, scaling, softcap, s_aux))
                continue
            causal = band is None
            outs.append(
                scaled_dot_product_attention(q, k, v, band, is_causal=causal, scale=scaling, enable_gqa=True)
            )
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1), None  # some take a view of it


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    band: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a cap or with sinks, which no fused kernel has. Arguments as `packed_causal_attention`;
    makes [1, H, T, K]."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).tril_()
    scores = scores.masked_fill(~(seen if band is None else band), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """[queries, keys] bool mask of causal attention whose last query is the last key, in a sliding window;
    None if plain causal attention is the same."""
    if queries == keys and (window is None or keys <= window):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return seen if window is None else seen.triu_(keys - queries + 1 - window)


AttentionInterface.register(PACKED, packed_causal_attention)


def use_attention(model: PreTrainedModel, packing: Packing) -> None:
    """Let a model attend as `packing` needs it. Fused attention of transformers ignores caps of scores."""
    model.set_attn_implementation("eager" if packing is Packing.ALONE else PACKED)
