"""Which models the embedded engine can run, told from `config.json` alone.

Imports no torch, so that a config is refused before anything heavy is loaded.
"""

import json
from pathlib import Path
from typing import Any

from tailrace.errors import ConfigError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on the length of the sequence."""
KEY = "model.path"


def check_model(path: Path) -> None:
    """Whether the folder holds a causal LM that `NativeEngine` runs.

    Raises:
        ConfigError: the folder or its config.json is missing, or the architecture is not supported.
    """
    config = _read_config(path)
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            KEY,
            str(path),
            f"the embedded engine cannot run model type {model_type!r}",
            f"choose a model of type {', '.join(MODEL_TYPES)}",
        )
    for feature in _unsupported(model_type, config):
        raise ConfigError(
            KEY, str(path), f"the embedded engine does not support {feature}", "choose a model without it"
        )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ConfigError(KEY, str(path), "there is no such folder", "name a Hugging Face model folder")
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(
            KEY, str(path), "the folder has no config.json", "save the model with `save_pretrained`"
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(
            KEY, str(path), f"config.json is not JSON ({error})", "save the model again"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(KEY, str(path), "config.json is not a JSON object", "save the model again")
    return config


def _unsupported(model_type: str, config: dict[str, Any]) -> list[str]:
    """What of the architecture the forward pass does not compute, in words."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    windowed = config.get("use_sliding_window", model_type == "mistral")
    found = {
        f"rope type {rope_type!r}": rope_type not in ROPE_TYPES,
        "sliding-window attention": windowed and config.get("sliding_window") is not None,
        f"activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "attention_bias": model_type != "qwen2" and config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "quantised weights": config.get("quantization_config") is not None,
    }
    return [feature for feature, present in found.items() if present]
