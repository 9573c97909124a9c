"""The decoder by hand against the model's own modules, forward and gradients."""

import random

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tailrace.trainer.fused import can_fuse, fused_hidden_states
from tailrace.trainer.packing import MicroBatch, by_prompt
from tailrace.trainer.wire import TrainingSample
from tailrace.types import SampleId

SHAPE = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES = [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)]


def make_model(config: type, model: type, **changes: object) -> PreTrainedModel:
    """Without its head; its gains and biases are anything but 1 and 0."""
    torch.manual_seed(0)
    made: PreTrainedModel = model(config(**{**SHAPE, **changes})).eval().base_model
    for parameter in made.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.8, 0.3)
    return made


def make_samples(lengths: list[int], prompts: list[int] | None = None) -> list[TrainingSample]:
    """Samples of so many completion tokens; those whose prompt has the same number have it in common."""
    chance = random.Random(0)
    numbers = range(len(lengths)) if prompts is None else prompts
    texts = {number: [chance.randrange(50) for _ in range(5 + 30 * number)] for number in set(numbers)}
    return [
        TrainingSample(
            SampleId(0, 0, index),
            texts[numbers[index]],
            [chance.randrange(50) for _ in range(length)],
            [0.0] * length,
            0.0,
        )
        for index, length in enumerate(lengths)
    ]


def make_batch(lengths: list[int]) -> MicroBatch:
    return MicroBatch.of([[sample] for sample in make_samples(lengths)], torch.device("cpu"))


def plain_hidden_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """[T, hidden]: each sequence alone, by the model's own eager attention."""
    model.set_attn_implementation("eager")
    parts = torch.split(batch.input_ids[0], batch.boundaries.diff().tolist())
    return torch.cat([model(part[None], use_cache=False).last_hidden_state[0] for part in parts])


@pytest.mark.parametrize("lengths", [[8], [3, 70, 9, 100, 1, 66], [8, 8, 8, 200]])
@pytest.mark.parametrize("family", FAMILIES, ids=["llama", "qwen2", "qwen3"])
def test_equals_the_model_s_own_modules(family: tuple[type, type], lengths: list[int]) -> None:
    model, batch = make_model(*family), make_batch(lengths)
    assert can_fuse(model, torch.float32)
    wanted = plain_hidden_states(model, batch)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (wanted * direction).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found = fused_hidden_states(model, batch)
    (found * direction).sum().backward()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            gradients[name],
            atol=1e-6 * largest,
            rtol=1e-5,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES, ids=["llama", "qwen2", "qwen3"])
def test_a_prompt_that_samples_share_has_the_gradient_of_all_its_copies(
    family: tuple[type, type], num_threads: int
) -> None:
    model = make_model(*family)
    samples = make_samples([3, 70, 1, 9, 100, 6, 1], prompts=[0, 1, 1, 2, 2, 2, 3])
    together, alone = by_prompt(samples), [[sample] for sample in samples]
    assert [len(one) for one in together] == [1, 2, 3, 1]
    direction = torch.randn(190, 64, generator=torch.Generator().manual_seed(1))
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(num_threads)
    for laid_out in (alone, together):
        batch = MicroBatch.of(laid_out, torch.device("cpu"))
        model.zero_grad()
        hidden = fused_hidden_states(model, batch)[batch.predictors]
        (hidden * direction).sum().backward()
        found.append((hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    torch.set_num_threads(before)
    (hidden, gradients), (shared_hidden, shared_gradients) = found
    torch.testing.assert_close(shared_hidden, hidden, atol=1e-5, rtol=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, atol=1e-6 * largest, rtol=1e-5)


def test_nothing_is_kept_for_a_gradient_that_nobody_wants() -> None:
    model, batch = make_model(*FAMILIES[2]), make_batch([4, 6])
    hidden = fused_hidden_states(model, batch)
    with torch.no_grad():
        same = fused_hidden_states(model, batch)
    assert hidden.requires_grad and not same.requires_grad
    assert torch.equal(same, hidden)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (FAMILIES[0], {"mlp_bias": True}),
        (FAMILIES[0], {"attention_bias": True}),
        (FAMILIES[0], {"hidden_act": "gelu"}),
        (FAMILIES[0], {"head_dim": 12}),
        (FAMILIES[2], {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ],
    ids=["mlp bias", "o bias", "another activation", "heads of no whole vectors", "a sliding window"],
)
def test_what_it_does_not_compute_is_left_to_the_model(
    family: tuple[type, type], changes: dict[str, object]
) -> None:
    assert not can_fuse(make_model(*family, **changes), torch.float32)


def test_bfloat16_is_left_to_the_model() -> None:
    assert not can_fuse(make_model(*FAMILIES[2]), torch.bfloat16)


def test_two_threads_compute_what_one_does() -> None:
    model, batch = make_model(*FAMILIES[2]), make_batch([3, 70, 9, 100, 1, 66])
    found = []
    num_threads = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        model.zero_grad()
        hidden = fused_hidden_states(model, batch)
        hidden.square().sum().backward()
        found.append((hidden.detach(), model.layers[0].self_attn.k_proj.weight.grad.clone()))
    torch.set_num_threads(num_threads)
    (hidden, gradient), (other_hidden, other_gradient) = found
    torch.testing.assert_close(hidden, other_hidden, atol=1e-5, rtol=1e-5)
    largest = float(gradient.abs().max())
    torch.testing.assert_close(gradient, other_gradient, atol=1e-6 * largest, rtol=1e-5)
