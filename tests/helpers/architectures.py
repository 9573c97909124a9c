"""Random models of many architectures, of a few thousand parameters, and how the trainer computes each."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tailrace.drivers.engine.native.support import MODEL_TYPES

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
WINDOWED = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 256}
"""Sizes by the names of older architectures."""
EXACT: dict[str, dict[str, object]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "cohere": {"logit_scale": 0.1},
    "cohere2": {"logit_scale": 0.1, **WINDOWED},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {},
    "exaone4": WINDOWED,
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, **WINDOWED},
    "gemma3_text": {"head_dim": 8, **WINDOWED},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "enable_moe_block": False,
        "num_kv_shared_layers": 0,
        **WINDOWED,
    },
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {"head_dim": 8},
    "gpt2": OLD,
    "gpt_bigcode": OLD,
    "gpt_neox": {},
    "gpt_oss": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        **WINDOWED,
    },
    "granite": {"logits_scaling": 3.0},
    "granitemoe": {},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "jetmoe": {"kv_channels": 8},
    "llama": {},
    "minimax_m2": {"head_dim": 8},
    "ministral3": {"head_dim": 8},
    "mistral": {"sliding_window": 9},
    "mixtral": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOWED,
    "olmoe": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, **WINDOWED},
    "qwen2_moe": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "starcoder2": {"sliding_window": 9},
}
BOUNDARIES = "packed boundaries do not reach its attention"
MIXES = "a packed sequence changes log-probs of the next"
DIFFERS = "log-probs differ from its own by up to"
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
SEPARATE: dict[str, dict[str, object]] = {
    "codegen": {**OLD, "rotary_dim": 4},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 9,
    },
}
ALONE: dict[str, tuple[dict[str, object], str]] = {
    "bamba": ({**MAMBA, "attn_layer_indices": [1]}, MIXES),
    "bloom": (OLD, MIXES),
    "falcon": ({"ffn_hidden_size": 48}, MIXES),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, MIXES),
    "granitemoehybrid": ({**MAMBA, "layer_types": ["mamba", "attention"]}, MIXES),
    "jamba": (
        {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
        MIXES,
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, MIXES),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, MIXES),
    "llama4_text": ({"intermediate_size_mlp": 48, "head_dim": 8}, DIFFERS),
    "mamba": ({"state_size": 8}, MIXES),
    "mamba2": ({"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}, MIXES),
    "minimax": ({"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}, MIXES),
    "nemotron": ({"head_dim": 8}, BOUNDARIES),
    "nemotron_h": (
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "head_dim": 8,
        },
        MIXES,
    ),
    "olmo_hybrid": (GATED_DELTA | {"linear_num_value_heads": 2}, MIXES),
    "phimoe": ({"sliding_window": 9}, DIFFERS),  # its window does not reach the attention
    "qwen3_5_moe_text": (GATED_DELTA, MIXES),
    "qwen3_5_text": (GATED_DELTA, MIXES),
    "qwen3_next": (GATED_DELTA, MIXES),
    "recurrent_gemma": (
        {"num_hidden_layers": 3, "lru_width": 32, "head_dim": 8, "attention_window_size": 9},
        MIXES,
    ),
    "stablelm": ({}, BOUNDARIES),
}
SHAPES: dict[str, dict[str, object]] = EXACT | SEPARATE | {name: each for name, (each, _) in ALONE.items()}


def random_model(model_type: str, changes: dict[str, object], std: float = 0.2) -> PreTrainedModel:
    torch.manual_seed(1)
    known = AutoConfig.for_model(model_type).to_dict()
    experts = {name: size for name, size in EXPERTS.items() if name in known}
    config = AutoConfig.for_model(model_type, **{**SIZES, **experts, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.1 * torch.randn_like(weight)
            else:
                weight.normal_(std=std)
    return model


BY_TRANSFORMERS = (
    *("arcee", "glm", "gpt_bigcode", "gpt_neox", "hunyuan_v1_dense", "olmo", "olmo2", "olmo3", "phi"),
    *("seed_oss", "smollm3", "starcoder2"),
)
"""Architectures that vLLM 0.32 lists as served by transformers' own modules."""
NOT_LISTED = (
    *("biogpt", "dots1", "helium", "jetmoe", "persimmon", "codegen", "gpt_neo", "bamba", "minimax", "phimoe"),
    "recurrent_gemma",
)
"""Architectures that vLLM 0.32 does not list."""


def engine_table() -> list[str]:
    """The rows of docs/reference/models.md: models that trainer and engines compute in the same way."""
    trainers = {"packed": EXACT, "packed without shared prompts": SEPARATE, "one sequence at a time": ALONE}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for trainer, models in trainers.items():
        for model in models:
            embedded = "fast" if model in MODEL_TYPES else "slower"
            vllm = "transformers' modules" if model in BY_TRANSFORMERS else "its own"
            vllm = "not listed" if model in NOT_LISTED else vllm
            rows.setdefault((trainer, embedded, vllm), []).append(model)
    places = {trainer: place for place, trainer in enumerate(trainers)}
    ordered = sorted(rows, key=lambda row: (places[row[0]], *row[1:]))
    return [f"| {', '.join(rows[row])} | {' | '.join(row)} |" for row in ordered]
