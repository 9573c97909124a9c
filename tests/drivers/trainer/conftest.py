"""A tiny model on disk and trainers of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainer_cases import VOCABULARY, make_torch_trainer
from transformers import Qwen3Config, Qwen3ForCausalLM

from tailrace.drivers.trainer.trainer import TorchTrainer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers with random weights and a tokenizer file beside them."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def make_trainer(model_path: Path) -> Callable[..., TorchTrainer]:
    def make(temperature: float = 0.8, **settings: object) -> TorchTrainer:
        defaults: dict[str, object] = {
            "learning_rate": 1e-3,
            "max_tokens_per_microbatch": 48,
            "min_tokens_per_microbatch": 90,
        }
        return make_torch_trainer(model_path, temperature=temperature, **(defaults | settings))

    return make
