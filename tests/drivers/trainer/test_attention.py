import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from helpers.attention import WITHOUT_PLANS, AttentionCalls
from tailrace.drivers.trainer.attention import packed_causal_attention

MODULE = torch.nn.Identity()


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query = torch.randn(1, 4, total, 8, generator=generator)
    key, value = (torch.randn(1, 2, total, 8, generator=generator) for _ in range(2))
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return query, key, value, boundaries


def same_sequence(lengths: list[int]) -> torch.Tensor:
    """[T, T] bool of packed sequences."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return sequence[:, None] == sequence[None, :]


def causal(positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """[T, T] bool: not after the token, and not before its window."""
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < (window or len(positions)))


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_packed_attention_equals_one_masked_attention_over_all_tokens(window: int | None) -> None:
    lengths = [5, 1, 7]
    query, key, value, boundaries = packed(lengths)
    out, weights = packed_causal_attention(
        MODULE,
        query,
        key,
        value,
        None,
        0.3,
        sliding_window=window,
        cu_seq_lens_q=boundaries,
        sequence_lengths=lengths,
    )
    seen = same_sequence(lengths) & causal(torch.arange(13), window)
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2))
    assert weights is None


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_sequences_that_share_a_context_attend_to_it(window: int | None) -> None:
    """Two completions, of 2 and 3 tokens, of a prompt of 4, and a sequence of 5."""
    lengths, key_lengths = [6, 3, 5], [6, 7, 5]
    keys = torch.tensor([*range(6), *range(4), *range(6, 14)])
    query, key, value, boundaries = packed(lengths)
    out, _ = packed_causal_attention(
        MODULE,
        query,
        key,
        value,
        None,
        sliding_window=window,
        cu_seq_lens_q=boundaries,
        cu_seq_lens_k=torch.tensor([0, 6, 13, 18], dtype=torch.int32),
        sequence_lengths=lengths,
        keys=keys,
        key_lengths=key_lengths,
    )
    places = torch.tensor([0, 1, 2, 3, 4, 5, 4, 5, 6, 0, 1, 2, 3, 4])
    same = same_sequence(lengths)
    same[6:9, :4] = True
    seen = same & causal(places, window)
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("named", [{"softcap": 0.7}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_caps_and_sinks_are_those_of_transformers_eager_attention(
    named: dict[str, object], window: int | None
) -> None:
    lengths = [5, 1, 7]
    query, key, value, boundaries = packed(lengths)
    of_lengths = {"cu_seq_lens_q": boundaries, "sequence_lengths": lengths}
    out, _ = packed_causal_attention(
        MODULE, query, key, value, None, 0.3, sliding_window=window, **named, **of_lengths
    )
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, named.get("s_aux")
    seen = same_sequence(lengths) & causal(torch.arange(13), window)
    mask = torch.zeros(13, 13).masked_fill(~seen, float("-inf"))
    eager = (modeling_gemma2 if "softcap" in named else modeling_gpt_oss).eager_attention_forward
    wanted, _ = eager(module, query, key, value, mask, scaling=0.3, **named)
    torch.testing.assert_close(out, wanted)


def test_attention_without_boundaries_is_refused() -> None:
    query, key, value, _ = packed([3])
    with pytest.raises(NotImplementedError, match="packed boundaries do not reach its attention"):
        packed_causal_attention(MODULE, query, key, value, None)


@pytest.mark.parametrize(("name", "given"), [("indices", torch.zeros(4)), ("is_causal", False), ("bias", 0)])
def test_attention_with_an_argument_that_it_does_not_compute_is_refused_by_name(
    name: str, given: object
) -> None:
    query, key, value, boundaries = packed([3])
    lengths = {"cu_seq_lens_q": boundaries, "sequence_lengths": [3]}
    plain, _ = packed_causal_attention(
        MODULE, query, key, value, None, dropout=0.0, is_causal=True, **lengths
    )
    assert plain.shape[1] == 3
    with pytest.raises(NotImplementedError, match=f"takes '{name}', which packed attention does not compute"):
        packed_causal_attention(MODULE, query, key, value, None, **{name: given}, **lengths)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shared", [0, 40])
def test_the_kernel_for_varying_lengths_equals_the_loop(shared: int) -> None:
    """The last sequence has the first tokens of the first one as its context."""
    lengths = [70, 1, 129]
    query, key, value, boundaries = (x.cuda() for x in packed(lengths))
    key_boundaries = boundaries + torch.tensor([0, 0, 0, shared], dtype=torch.int32).cuda()
    places = {
        "sliding_window": 50,
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": key_boundaries,
        "sequence_lengths": lengths,
        "keys": torch.tensor([*range(71), *range(shared), *range(71, 200)]).cuda(),
        "key_lengths": [70, 1, 129 + shared],
    }
    half = (x.bfloat16() for x in (query, key, value))
    rough, _ = packed_causal_attention(MODULE, *half, None, **places)
    exact, _ = packed_causal_attention(MODULE, query, key, value, None, **places)
    torch.testing.assert_close(rough.float(), exact, atol=0.03, rtol=0.03)


@pytest.mark.parametrize(("device", "num_kv_heads"), [("cpu", 2), ("cuda", 4)])
def test_in_float32_on_cuda_no_kernel_gets_grouped_heads(device: str, num_kv_heads: int) -> None:
    """Tensors without numbers stand for a GPU: a length that was read from it would be an error."""
    lengths = [5, 8]
    with FakeTensorMode(), AttentionCalls() as calls:
        query, key, value = (torch.empty(1, heads, 13, 8, device=device) for heads in (4, 2, 2))
        starts = torch.empty(3, dtype=torch.int32, device=device)
        out, _ = packed_causal_attention(
            MODULE, query, key, value, None, cu_seq_lens_q=starts, sequence_lengths=lengths
        )
    assert out.shape == (1, 13, 4, 8)
    assert calls.made == [((1, num_kv_heads, length, 8), WITHOUT_PLANS) for length in lengths]


def test_repeated_heads_give_what_grouped_heads_give() -> None:
    query, key, value, _ = packed([13])
    repeated = (x.repeat_interleave(2, 1) for x in (key, value))
    torch.testing.assert_close(
        scaled_dot_product_attention(query, *repeated, is_causal=True),
        scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
        atol=1e-6,
        rtol=0,
    )
