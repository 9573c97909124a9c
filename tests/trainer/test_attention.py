import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tailrace.trainer.attention import packed_causal_attention

MODULE = torch.nn.Identity()


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query = torch.randn(1, 4, total, 8, generator=generator)
    key, value = (torch.randn(1, 2, total, 8, generator=generator) for _ in range(2))
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return query, key, value, boundaries


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_packed_attention_equals_one_masked_attention_over_all_tokens(window: int | None) -> None:
    lengths = [5, 1, 7]
    query, key, value, boundaries = packed(lengths)
    out, weights = packed_causal_attention(
        MODULE, query, key, value, None, 0.3, sliding_window=window, cu_seq_lens_q=boundaries
    )
    place = torch.arange(13)
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    distance = place[:, None] - place[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & (distance >= 0) & (distance < (window or 13))
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2))
    assert weights is None


def test_attention_without_boundaries_is_refused() -> None:
    query, key, value, _ = packed([3])
    with pytest.raises(NotImplementedError, match="Identity does not pass packed boundaries"):
        packed_causal_attention(MODULE, query, key, value, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_for_varying_lengths_equals_the_loop() -> None:
    query, key, value, boundaries = (x.cuda() for x in packed([70, 1, 129]))
    rough = packed_causal_attention(
        MODULE,
        *(x.bfloat16() for x in (query, key, value)),
        None,
        sliding_window=50,
        cu_seq_lens_q=boundaries,
        max_length_q=129,
    )[0]
    exact = packed_causal_attention(
        MODULE, query, key, value, None, sliding_window=50, cu_seq_lens_q=boundaries
    )[0]
    torch.testing.assert_close(rough.float(), exact, atol=0.03, rtol=0.03)
