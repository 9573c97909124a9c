"""Models that the embedded engine can run. Imports no torch."""

from pathlib import Path
from typing import Any

from tailrace.model_folder import check_files, folder_error, read_config, rope_section

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose frequencies do not depend on the length of the sequence."""


def check_model(path: Path) -> None:
    """Check that the folder holds a causal LM that `NativeEngine` runs. Raises a ConfigError if a file is
    missing or damaged, a value in it is impossible, or the architecture is not supported. The message names
    the file."""
    for feature in _unsupported(read_config(path)):
        raise folder_error(path, f"the embedded engine does not support {feature}", "choose another model")
    check_files(path)


def _unsupported(config: dict[str, Any]) -> list[str]:
    """The features of the model that the forward pass does not compute, in words."""
    model_type = config.get("model_type")
    rope = rope_section(config)
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    windowed = config.get("use_sliding_window", model_type == "mistral")
    found = {
        f"model type {model_type!r} (only {', '.join(MODEL_TYPES)})": model_type not in MODEL_TYPES,
        f"rope type {rope_type!r}": rope_type not in ROPE_TYPES,
        "sliding-window attention": windowed and config.get("sliding_window") is not None,
        f"activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "attention_bias": model_type != "qwen2" and config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "quantised weights": config.get("quantization_config") is not None,
    }
    return [feature for feature, present in found.items() if present]
