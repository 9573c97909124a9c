"""Attention in rectangles against one masked attention over all tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tailrace.trainer.rectangles import attend, attend_backward, rectangles


@given(st.lists(st.integers(1, 120), min_size=1, max_size=12))
def test_every_token_has_one_place_and_every_place_a_token(lengths: list[int]) -> None:
    layout = rectangles(lengths)
    total = sum(lengths)
    assert layout.tokens[layout.places].tolist() == list(range(total))
    assert int(layout.real.sum()) == total
    assert sum(num * length for num, length in layout.shapes) == len(layout.tokens) == len(layout.real)
    assert sum(num for num, _ in layout.shapes) == len(lengths)


def test_like_lengths_share_a_rectangle_and_a_long_one_has_its_own() -> None:
    assert rectangles([8, 1000, 12, 5]).shapes == ((1, 1000), (3, 12))
    assert rectangles([100, 80, 70]).shapes == ((2, 100), (1, 70))


@pytest.mark.parametrize("lengths", [[6], [5, 1, 7], [90, 3, 60, 80]])
def test_equals_one_masked_attention_over_everything(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query, grad = (torch.randn(total, 4, 8, generator=generator) for _ in range(2))
    key, value = (torch.randn(total, 2, 8, generator=generator) for _ in range(2))
    layout = rectangles(lengths)
    out, kept = attend(query, key, value, layout, 0.3)
    gradients = attend_backward(grad, kept, layout, 0.3, num_kv=2)

    place = torch.arange(total)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (sequence[:, None] == sequence[None, :]) & (place[:, None] >= place[None, :])
    leaves = [x.requires_grad_() for x in (query, key, value)]
    wanted = scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in leaves), attn_mask=seen, scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    wanted.backward(grad)
    torch.testing.assert_close(out, wanted.detach())
    for found, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, atol=1e-5, rtol=1e-5)
