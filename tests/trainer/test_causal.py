"""Compiled causal attention against one masked attention over all tokens."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tailrace.trainer.causal import attend, attend_backward
from tailrace.trainer.fused import shares

SCALE = 0.3


@pytest.mark.parametrize(
    ("lengths", "goes_on"),
    [
        ([1], [False]),
        ([6], [False]),
        ([5, 1, 7], [False, False, False]),
        ([90, 3, 60, 80], [False, False, False, False]),
        ([16, 32, 33], [False, False, False]),
        ([4, 5, 1, 7], [False, False, True, True]),
        ([9, 70, 30, 1, 60], [False, False, True, True, True]),
        ([9, 16, 16, 3, 40, 17], [False, False, True, False, True, True]),
    ],
)
@pytest.mark.parametrize(("num_heads", "num_kv"), [(3, 3), (4, 2), (4, 1), (6, 2)])
def test_equals_one_masked_attention_over_everything(
    lengths: list[int], goes_on: list[bool], num_heads: int, num_kv: int
) -> None:
    """A sequence that goes on sees all of the last one that does not."""
    roots = [max(n for n in range(sequence + 1) if not goes_on[n]) for sequence in range(len(lengths))]
    starts = np.array([lengths[root] * goes for root, goes in zip(roots, goes_on, strict=True)])
    chance = torch.Generator().manual_seed(0)
    total = sum(lengths)
    qkv = torch.randn(total, num_heads + 2 * num_kv, 16, generator=chance)
    grad = torch.randn(total, num_heads, 16, generator=chance)
    turned = qkv[:, : num_heads + num_kv].contiguous()
    boundaries = np.cumsum([0, *lengths])
    out, logsums = torch.empty(total, num_heads, 16), torch.empty(total, num_heads)
    of_turned, of_qkv = torch.empty_like(turned), torch.zeros_like(qkv)
    # In two calls, as two threads would.
    for first, last in ((0, 1), (1, len(lengths))):
        into = (out.numpy(), logsums.numpy())
        attend(turned.numpy(), qkv.numpy(), boundaries, starts, first, last, SCALE, *into)
        arrays = (x.numpy() for x in (grad, turned, qkv, out, logsums))
        gradients = (x.numpy() for x in (of_turned, of_qkv))
        attend_backward(*arrays, boundaries, starts, first, last, SCALE, *gradients)

    place = torch.arange(total)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    root = torch.tensor(roots)[sequence]
    within = (sequence[:, None] == sequence[None, :]) | (root[:, None] == sequence[None, :])
    seen = within & (place[:, None] >= place[None, :])
    query, key, value = qkv.clone().requires_grad_().split([num_heads, num_kv, num_kv], 1)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    wanted = scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in leaves), attn_mask=seen, scale=SCALE, enable_gqa=True
    )[0].transpose(0, 1)
    wanted.backward(grad)
    torch.testing.assert_close(out, wanted.detach(), atol=1e-5, rtol=1e-5)
    found = (*of_turned.split([num_heads, num_kv], 1), of_qkv[:, num_heads + num_kv :])
    for gradient, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "starts", "num_threads", "wanted"),
    [
        ([30, 30, 30, 30], [0, 0, 0, 0], 1, [(0, 4)]),
        ([30, 30, 30, 30], [0, 0, 0, 0], 2, [(0, 2), (2, 4)]),
        ([1000, 10, 10, 10], [0, 0, 0, 0], 2, [(0, 1), (1, 4)]),
        ([10, 10, 1000], [0, 0, 0], 2, [(0, 2), (2, 3)]),
        ([10], [0], 2, [(0, 1)]),
        ([30, 30, 30, 30], [0, 0, 30, 30], 2, [(0, 1), (1, 4)]),
        ([30, 30, 30, 30, 90], [0, 30, 30, 30, 0], 2, [(0, 4), (4, 5)]),
        ([30, 30, 30], [0, 30, 30], 2, [(0, 3)]),
    ],
)
def test_threads_share_sequences_by_what_they_cost_and_keep_together_what_goes_on(
    lengths: list[int], starts: list[int], num_threads: int, wanted: list[tuple[int, int]]
) -> None:
    assert shares(np.cumsum([0, *lengths]), np.array(starts), num_threads) == wanted
