"""What a Hugging Face folder says of its model: shapes, rotary frequencies, stop tokens, weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tailrace.engine.native.support import KEY, check_model
from tailrace.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Architecture:
    """Shapes and constants of a Llama-like causal LM."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    epsilon: float
    """Of every RMSNorm."""
    tied: bool
    """Whether the head is the embedding."""
    qk_norm: bool
    qkv_bias: bool
    inverse_frequencies: Tensor
    """[head_dim / 2], float32, radians a position."""
    rotation_scale: float
    eos_ids: frozenset[int]


def read_architecture(path: Path) -> Architecture:
    """Read a model folder.

    Raises:
        ConfigError: missing, or a model that the embedded engine cannot run.
    """
    check_model(path)
    config = AutoConfig.from_pretrained(path)
    frequencies, scale = _rope(config)
    return Architecture(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        epsilon=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qk_norm=config.model_type == "qwen3",
        qkv_bias=config.model_type == "qwen2",
        inverse_frequencies=frequencies,
        rotation_scale=scale,
        eos_ids=_eos_ids(path, config),
    )


def read_weights(path: Path, arch: Architecture) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, on the CPU.

    Raises:
        ConfigError: there are none, or not those of the architecture.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            KEY, str(path), "the folder has no safetensors weights", "save the model with `save_pretrained`"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    try:
        check_weights(arch, tensors)
    except ValueError as error:
        raise ConfigError(KEY, str(path), str(error), "save the model with `save_pretrained`") from error
    return tensors


def check_weights(arch: Architecture, tensors: Mapping[str, Tensor]) -> None:
    """See that all weights are there.

    Raises:
        ValueError: a tensor is missing or of another shape; names up to three.
    """
    shapes = _weight_shapes(arch)
    wrong = [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]
    if wrong:
        named = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        raise ValueError(f"{len(wrong)} of {len(shapes)} weights are missing or of another shape: {named}")


def _weight_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """By Hugging Face name."""
    hidden, inner, dim = arch.hidden_size, arch.intermediate_size, arch.head_dim
    queries, keys = arch.num_heads * dim, arch.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        layer[f"self_attn.{name}_proj.weight"] = (size, hidden)
        if arch.qkv_bias:
            layer[f"self_attn.{name}_proj.bias"] = (size,)
        if arch.qk_norm and name != "v":
            layer[f"self_attn.{name}_norm.weight"] = (dim,)
    for index in range(arch.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _head_dim(config: PreTrainedConfig) -> int:
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def _rope(config: PreTrainedConfig) -> tuple[Tensor, float]:
    rope: dict[str, Any] = config.rope_parameters
    if rope["rope_type"] != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
        return frequencies.float(), float(scale)
    dim = _head_dim(config)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / rope["rope_theta"] ** exponents, 1.0


def _eos_ids(path: Path, config: PreTrainedConfig) -> frozenset[int]:
    """generation_config.json where there is one, as `generate` does; else config.json."""
    eos = config.eos_token_id
    if (path / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
