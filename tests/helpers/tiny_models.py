"""Random models of a few thousand parameters, saved as Hugging Face folders with a tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ("qwen3", "llama", "qwen2", "mistral")
VOCABULARY = 61
LETTERS = "".join(chr(ord("A") + id) for id in range(VOCABULARY))
"""Token i is the i-th of these characters."""

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


def tiny_config(family: str = "qwen3", **changes: object) -> PreTrainedConfig:
    """The config of one of FAMILIES: 2 layers, no end-of-text token, a context of 512 tokens."""
    shape = {**_SHAPE, **changes}
    return {
        "qwen3": lambda: Qwen3Config(**{"head_dim": 16, "tie_word_embeddings": True, **shape}),
        "llama": lambda: LlamaConfig(**{"rope_parameters": _LLAMA3_ROPE, **shape}),
        "qwen2": lambda: Qwen2Config(**shape),
        "mistral": lambda: MistralConfig(**{"sliding_window": None, **shape}),
    }[family]()


def tiny_model(family: str = "qwen3", seed: int = 0, **changes: object) -> PreTrainedModel:
    """Every weight is random, gains and biases too. changes: to the config."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:
                weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name))
    return model


def letter_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character; the vocabulary is LETTERS."""
    vocabulary = {letter: id for id, letter in enumerate(LETTERS)}
    inner = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="A"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="A", chat_template=chat_template)


def save_tiny_model(folder: Path, family: str = "qwen3", seed: int = 0, **changes: object) -> PreTrainedModel:
    """Save a `tiny_model` and a `letter_tokenizer`; returns the model."""
    model = tiny_model(family, seed, **changes)
    model.save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return model
