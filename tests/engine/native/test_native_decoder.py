"""The compiled kernels compute what torch does, and only where they can."""

import numpy as np
import pytest
import torch
from native_cases import PROMPTS, finish, submit_all

from tailrace.engine.base import EngineSettings, SamplingSettings
from tailrace.engine.native import kernels
from tailrace.engine.native.compiled import SHORT, CompiledDecoder
from tailrace.engine.native.decoder import TorchDecoder
from tailrace.engine.native.sampler import draw
from tailrace.vectors import WIDE


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral"])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 7, "top_p": 0.9}])
def test_kernels_and_torch_give_the_same_tokens_and_logprobs(make_engine, monkeypatch, family, truncation):
    sampling = SamplingSettings(max_completion_tokens=60, **truncation)
    compiled = make_engine(family, sampling=sampling)
    monkeypatch.setattr(
        "tailrace.engine.native.engine.decoder_for",
        lambda model, sampling, **_: TorchDecoder(model, sampling),
    )
    plain = make_engine(family, sampling=sampling)
    for engine in (compiled, plain):
        submit_all(engine, PROMPTS)
    expected, ended = finish(plain), finish(compiled)
    for id, delta in ended.items():
        assert delta.ids == expected[id].ids
        torch.testing.assert_close(
            torch.tensor(delta.logprobs), torch.tensor(expected[id].logprobs), atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("longest", [1, 16, 17, 48, 250, SHORT + 1])
def test_kernels_and_torch_keep_the_same_of_a_context(make_engine, longest):
    engine = make_engine("qwen3")
    compiled, plain = engine._decoder, TorchDecoder(engine._model, SamplingSettings(max_completion_tokens=1))
    contexts = [
        [1 + (i * number) % 29 for i in range(length)] for number, length in enumerate((5, 0, longest, 3))
    ]
    with torch.inference_mode():
        for block, wanted in zip(compiled.prefill(contexts), plain.prefill(contexts), strict=True):
            torch.testing.assert_close(block.keys, wanted.keys, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(block.values, wanted.values, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", CompiledDecoder), ("bfloat16", TorchDecoder)])
def test_the_type_chooses_the_decoder(make_engine, dtype, kind):
    assert type(make_engine(settings=EngineSettings(dtype=dtype))._decoder) is kind


def test_the_draw_equals_torchs_and_never_takes_the_impossible():
    logits = torch.randn(4000, 37, generator=torch.Generator().manual_seed(0)) * 5
    logits[:, 36] = float("-inf")
    uniforms = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
    uniforms[-1] = 1 - 2**-53
    expected, logprobs = draw(logits, uniforms, SamplingSettings(max_completion_tokens=1))
    ids, drawn = np.empty(4000, np.int64), np.empty(4000)
    kernels.draw(logits.numpy().copy(), uniforms.numpy(), ids, drawn)
    assert (ids == expected.numpy()).mean() > 0.999  # a boundary may fall on either side of a rounding
    same = ids == expected.numpy()
    np.testing.assert_allclose(drawn[same], logprobs.numpy()[same], atol=1e-5)
    assert ids.max() < 36


def test_silu_keeps_five_digits_even_far_from_zero():
    gate = torch.cat([torch.linspace(-120, 120, 4801), torch.linspace(-1, 1, 2001)])[None]
    up = torch.full_like(gate, 1.5)
    expected = (torch.nn.functional.silu(gate.double()) * 1.5).float()
    kernels.silu_times(gate.numpy(), up.numpy())
    torch.testing.assert_close(gate, expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 72])
@pytest.mark.parametrize(("num_heads", "num_kv"), [(2, 2), (6, 2), (5, 1)])
def test_attention_to_any_length_equals_torchs_whatever_lies_beyond(dim, num_heads, num_kv):
    lengths = [1, 2, 7, 8, 9, 16, 17, 31, 33, 40, 63, 64, 65, 127, 128, 129, 161, 256, 299, 300]
    capacity = lengths[-1]
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, len(lengths), num_kv, dim, capacity, generator=generator)
    values = torch.randn(2, len(lengths), num_kv, capacity, dim, generator=generator)
    for slot, length in enumerate(lengths):
        keys[:, slot, :, :, length:] = 1e30
        values[:, slot, :, length:] = 1e30
    qkv = torch.randn(len(lengths), num_heads + 2 * num_kv, dim, generator=generator)
    unturned = torch.stack([torch.ones(capacity, dim), torch.zeros(capacity, dim)], 1)
    out = torch.empty(len(lengths), num_heads, dim)
    kernels.attend(
        *(1, 0, np.arange(len(lengths)), qkv.numpy(), np.empty((0, 0), np.float32), 0.0, unturned.numpy()),
        *(np.array(lengths) - 1, keys.numpy(), values.numpy()),
        *(np.empty((4, capacity + WIDE), np.float32), out.numpy()),
    )
    q, k, v = qkv.split([num_heads, num_kv, num_kv], 1)
    for slot, length in enumerate(lengths):
        assert torch.equal(keys[1, slot, :, :, length - 1], k[slot])
        assert torch.equal(values[1, slot, :, length - 1], v[slot])
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[slot][None, :, None],
            keys[1, slot, :, :, :length].transpose(1, 2)[None],
            values[1, slot, :, :length][None],
            scale=1.0,
            enable_gqa=True,
        )
        torch.testing.assert_close(out[slot], expected[0, :, 0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 41])
def test_silu_touches_nothing_beyond_the_last_row(width):
    memory, up = torch.ones(5 * width + 16), torch.ones(5, width)
    kernels.silu_times(memory[: 5 * width].view(5, width).numpy(), up.numpy())
    expected = torch.nn.functional.silu(torch.ones(()))
    torch.testing.assert_close(memory[: 5 * width], expected.expand(5 * width))
    assert torch.equal(memory[5 * width :], torch.ones(16))
