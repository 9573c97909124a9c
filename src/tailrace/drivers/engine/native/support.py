"""Models that the embedded engine can run. Imports no torch."""

from pathlib import Path

from tailrace.model_folder import read_config, rope_section

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose frequencies do not depend on the length of the sequence."""
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of the decode steps that CUDA graphs compute."""
GRAPH_LENGTHS = (256, 1024, 4096, 16_384)
"""The most tokens of a sequence in such a step, beside those of the model's context."""
MAX_GATHERED = 2**15
"""Rows times length: a graph that copies keys and values of more positions is slower than its launches."""


def not_fused(path: Path) -> str:
    """The first feature of the model that `CausalLM` does not compute, in words; empty: it computes all.
    Raises as `read_config`."""
    config = read_config(path)
    model_type, rope = config.get("model_type"), rope_section(config)
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    windowed = config.get("use_sliding_window", model_type == "mistral")
    found = {
        f"model type {model_type!r}": model_type not in MODEL_TYPES,
        f"rope type {rope_type!r}": rope_type not in ROPE_TYPES,
        "sliding-window attention": windowed and config.get("sliding_window") is not None,
        f"activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "attention_bias": model_type != "qwen2" and config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
    }
    return next((feature for feature, present in found.items() if present), "")
