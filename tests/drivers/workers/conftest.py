"""A tiny model on disk and short waits."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from helpers.worker_cases import VOCABULARY
from tailrace.drivers.engine import supervised
from tailrace.drivers.workers import process


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often for what is stopped, and restart what has died sooner."""
    monkeypatch.setattr(process, "LOOK_S", 0.1)
    monkeypatch.setattr(supervised, "FIRST_PAUSE_S", 0.1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers with random weights that prefer no token much."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path
