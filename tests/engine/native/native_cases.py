"""Small random models of each supported family, and what transformers says of the same tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tailrace.engine.native.engine import Delta, NativeEngine, Request

VOCABULARY = 61
TEMPERATURE = 0.8

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_of(family: str) -> PreTrainedConfig:
    return {
        "qwen3": lambda: Qwen3Config(head_dim=16, tie_word_embeddings=True, **_SHAPE),
        "llama": lambda: LlamaConfig(rope_parameters=_LLAMA3_ROPE, **_SHAPE),
        "qwen2": lambda: Qwen2Config(**_SHAPE),
        "mistral": lambda: MistralConfig(sliding_window=None, **_SHAPE),
    }[family]()


def random_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Every weight is random, gains and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:
                weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name))
    return model


def save_model(folder: Path, family: str, seed: int = 0) -> PreTrainedModel:
    model = random_model(family, seed)
    model.save_pretrained(folder)
    return model


def random_ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Log-prob of each completion token by transformers' own forward, [num_tokens]."""
    ids = torch.tensor([[*prompt, *completion]])
    return _chosen(model(ids).logits[0, len(prompt) - 1 : -1], completion)


@torch.no_grad()
def mixed_reference(
    old: PreTrainedModel, new: PreTrainedModel, tokens: Sequence[int], completion: Sequence[int]
) -> Tensor:
    """Of a completion by `new`, where `old` computed the cache of all `tokens` before it but the last."""
    cache = old(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
    rest = torch.tensor([[tokens[-1], *completion]])
    return _chosen(new(rest, past_key_values=cache).logits[0, :-1], completion)


def _chosen(logits: Tensor, ids: Sequence[int]) -> Tensor:
    logprobs = torch.log_softmax(logits.float() / TEMPERATURE, -1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]


def assert_close(delta: Delta, expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(delta.logprobs), expected, atol=1e-4, rtol=0)


def finish(engine: NativeEngine) -> dict[str, Delta]:
    """Step until nothing is left, with the books checked at every step."""
    ended: dict[str, Delta] = {}
    while not engine.idle:
        ended |= {delta.id: delta for delta in engine.step()}
        engine.check_integrity()
    return ended


def assert_undisturbed(parts: Sequence[Delta], undisturbed: NativeEngine, model: PreTrainedModel) -> None:
    """The parts are what PROMPTS["17"] with seed 7 gives in a run of its own, with the model's log-probs."""
    prompt = PROMPTS["17"]
    undisturbed.submit(Request("x", prompt, (), 7))
    expected = finish(undisturbed)["x"].ids
    assert [id for part in parts for id in part.ids] == expected
    logprobs = torch.tensor([logprob for part in parts for logprob in part.logprobs])
    torch.testing.assert_close(logprobs, reference(model, prompt, expected), atol=1e-4, rtol=0)


def submit_all(engine: NativeEngine, prompts: Mapping[str, Sequence[int]]) -> None:
    """One request a prompt; seeds by their order."""
    for seed, (id, prompt) in enumerate(prompts.items()):
        engine.submit(Request(id, prompt, (), seed))


PROMPTS = {f"{length}": random_ids(length, length) for length in (1, 2, 5, 17, 40, 40, 79, 130)}
"""Short and long together."""
