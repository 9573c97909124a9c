"""Causal attention over packed sequences, registered with transformers under the name `PACKED`.

Packed sequences attend only within themselves, and no [T, T] mask is made. On CUDA with half precision,
torch's kernel for sequences of varying length computes all at once; elsewhere scaled_dot_product_attention
computes each sequence. The boundaries arrive as `cu_seq_lens_q`, the keyword with which transformers packs
for flash attention, so every architecture that runs packed there runs packed here. Their lengths come as a
list, too: to read them from the device would stop it in each layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tailrace.devices import attention_kernels, for_fused_attention

PACKED = "tailrace_packed"


def packed_causal_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sequence_lengths: Sequence[int] = (),
    **_others: object,  # transformers' signature: architectures pass more than this needs
) -> tuple[Tensor, None]:
    """Causal attention of T packed tokens with H heads, G key and value heads, dimension D.

    Args:
        query: [1, H, T, D]
        key, value: [1, G, T, D]
        attention_mask: ignored: the boundaries define what a token attends to.
        scaling: factor of query times key; None: D^(-1/2).
        sliding_window: number of positions that a token attends to, including itself; None: all before it.
        cu_seq_lens_q: [N + 1] int32: the N sequences begin at its first N entries, the last entry is T.
        sequence_lengths: [N], of the sequences.

    Returns:
        [1, T, H, D], and no attention weights.

    Raises:
        NotImplementedError: the architecture does not pass the boundaries on.
    """
    if cu_seq_lens_q is None or not sequence_lengths:
        raise NotImplementedError(f"{type(module).__name__} does not pass packed boundaries to its attention")
    if query.is_cuda and value.dtype in (torch.bfloat16, torch.float16):
        # Autocast does not apply to the kernel: rotary embeddings may have left float32 queries and keys.
        q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        starts, longest = cu_seq_lens_q, max(sequence_lengths)
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        out = varlen_attn(
            q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window, enable_gqa=True
        )
        assert isinstance(out, Tensor)
        return out[None], None
    key, value = for_fused_attention(query, key, value)
    outs = []
    parts = (torch.split(x, list(sequence_lengths), dim=2) for x in (query, key, value))
    with attention_kernels():
        for q, k, v in zip(*parts, strict=True):
            band = _band(q.shape[2], sliding_window, q.device)
            causal = band is None
            outs.append(
                scaled_dot_product_attention(q, k, v, band, is_causal=causal, scale=scaling, enable_gqa=True)
            )
    return torch.cat(outs, dim=2).transpose(1, 2), None


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[length, length] bool mask of a sliding window; None if plain causal attention is the same."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)


AttentionInterface.register(PACKED, packed_causal_attention)
