"""Which architectures train exactly: each is exact in every sample of a pack, or refused with the reason. The
list is in docs/servers-and-devices.md."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.packing import MicroBatch
from tailrace.errors import ConfigError
from tailrace.types import SampleId

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "servers-and-devices.md"
VOCABULARY, NUM_PROMPT = 96, 20
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
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {},
    "exaone4": WINDOWED,
    "gemma": {"head_dim": 8},
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
    "granitemoe": {},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "llama": {},
    "minimax_m2": {"head_dim": 8},
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
DIFFERS = "packed log-probs differ from its own by up to"
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "bloom": (OLD, MIXES),
    "cohere": ({"logit_scale": 0.1}, DIFFERS),
    "falcon": ({"ffn_hidden_size": 48}, MIXES),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, MIXES),
    "gemma2": ({"head_dim": 8}, "its attention takes 'softcap'"),
    "gpt_oss": ({"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "'s_aux'"),
    "granite": ({"logits_scaling": 3.0}, DIFFERS),
    "jamba": ({"mamba_d_state": 8, "mamba_dt_rank": 4}, MIXES),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, MIXES),
    "llama4_text": ({"intermediate_size_mlp": 48, "head_dim": 8}, "no attribute 'last_hidden_state'"),
    "mamba": ({"state_size": 8}, MIXES),
    "nemotron": ({"head_dim": 8}, BOUNDARIES),
    "phimoe": ({"sliding_window": 9}, DIFFERS),  # its window does not reach the attention
    "qwen3_next": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "head_dim": 8,
        },
        MIXES,
    ),
    "stablelm": ({}, BOUNDARIES),
}


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


def samples() -> list[TrainingSample]:
    """Two, of 80 tokens each."""
    ids = torch.randint(3, VOCABULARY, (2, 80), generator=torch.Generator().manual_seed(3)).tolist()
    return [
        TrainingSample(SampleId(0, 0, i), each[:NUM_PROMPT], each[NUM_PROMPT:], [0.0] * 60, 0.0)
        for i, each in enumerate(ids)
    ]


@pytest.mark.parametrize("model_type", EXACT)
def test_an_architecture_is_exact_in_both_samples_of_a_pack(model_type: str) -> None:
    policy = PolicyModel(random_model(model_type, EXACT[model_type]), TrainerSettings(), temperature=0.8)
    given = samples()
    with torch.no_grad():
        packed = policy.logprobs(MicroBatch.of(given, policy.device)).logprobs
        policy.model.set_attn_implementation("eager")
        ids = torch.tensor([each.prompt_ids + each.completion_ids for each in given])
        alone = (policy.model(ids, use_cache=False).logits / 0.8)[:, NUM_PROMPT - 1 : -1].log_softmax(-1)
    wanted = alone.gather(2, ids[:, NUM_PROMPT:, None]).flatten()
    torch.testing.assert_close(packed, wanted, atol=5e-6, rtol=0)


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_that_would_not_be_exact_is_refused_with_the_reason(model_type: str) -> None:
    changes, reason = REFUSED[model_type]
    with pytest.raises(ConfigError, match=f"type '{model_type}' does not run packed: ") as caught:
        PolicyModel(random_model(model_type, changes), TrainerSettings(), temperature=1.0)
    assert reason in str(caught.value)


def test_a_leak_that_is_small_because_the_weights_are_is_refused() -> None:
    model = random_model("falcon_h1", REFUSED["falcon_h1"][0], std=0.01)
    with pytest.raises(ConfigError, match=MIXES):
        PolicyModel(model, TrainerSettings(), temperature=1.0)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_depends_on_the_longest_sequence_is_refused(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if rope_type == "longrope" else {}
    with pytest.raises(ConfigError, match=f"its rope type '{rope_type}' depends on the longest sequence"):
        PolicyModel(random_model("llama", {"rope_parameters": rope}), TrainerSettings(), temperature=1.0)


def test_windows_are_those_of_the_config_after_the_check() -> None:
    policy = PolicyModel(random_model("mistral", {"sliding_window": 40}), TrainerSettings(), temperature=1.0)
    attention = policy.model.model.layers[0].self_attn
    assert policy.model.config.sliding_window == getattr(attention, "sliding_window", 40) == 40


def test_the_page_lists_exactly_the_architectures_that_are_tried() -> None:
    rows = dict(
        line.strip("| ").split(" | ", 1) for line in PAGE.read_text().splitlines() if "`model_type`" in line
    )
    assert rows == {
        "exact, by `model_type`": ", ".join(EXACT),
        "refused, by `model_type`": ", ".join(REFUSED),
    }
