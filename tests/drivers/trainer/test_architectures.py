"""Architectures train exactly, packed or one sequence at a time. The list:
docs/servers-and-devices.md."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.lfm2 import modeling_lfm2

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.distributed import Ranks
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.packing import MicroBatch, Packing
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
    "jamba": ({"mamba_d_state": 8, "mamba_dt_rank": 4}, MIXES),
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


def samples() -> list[TrainingSample]:
    """Two, of 80 tokens each."""
    ids = torch.randint(3, VOCABULARY, (2, 80), generator=torch.Generator().manual_seed(3)).tolist()
    return [
        TrainingSample(SampleId(0, 0, i), each[:NUM_PROMPT], each[NUM_PROMPT:], [0.0] * 60, 0.0)
        for i, each in enumerate(ids)
    ]


def policy_of(model_type: str, model: PreTrainedModel | None = None) -> PolicyModel:
    return PolicyModel(
        model or random_model(model_type, SHAPES[model_type]), TrainerSettings(), temperature=0.8
    )


def own_logprobs(model: PreTrainedModel) -> Tensor:
    """Log-probs of the completions by transformers' own forward pass, which sees one sample at a time."""
    model.set_attn_implementation("eager")
    found = []
    for each in samples():
        ids = torch.tensor([each.prompt_ids + each.completion_ids])
        logp = (model(ids, use_cache=False).logits / 0.8)[0, NUM_PROMPT - 1 : -1].log_softmax(-1)
        found.append(logp.gather(1, ids[0, NUM_PROMPT:, None])[:, 0])
    return torch.cat(found)


def computed(policy: PolicyModel) -> Tensor:
    batches = [MicroBatch.of(samples(), policy.device, policy.packing)]
    return torch.cat([policy.logprobs(batch).logprobs for batch in batches])


@pytest.mark.parametrize("model_type", SHAPES)
def test_an_architecture_is_exact_in_both_samples_however_they_are_computed(model_type: str) -> None:
    policy = policy_of(model_type)
    if model_type in ALONE:
        assert policy.way.startswith("one sequence at a time: ") and ALONE[model_type][1] in policy.way
    else:
        assert policy.packing is (Packing.SEPARATE if model_type in SEPARATE else Packing.SHARED)
    with torch.no_grad():
        torch.testing.assert_close(computed(policy), own_logprobs(policy.model), atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    "model_type",
    ["gemma2", "gpt_oss", "granite", "falcon_h1", "gpt_neo", "jamba", "lfm2", "nemotron_h", "qwen3_5_text"],
)
def test_gradients_are_those_of_transformers_own_forward_pass(model_type: str) -> None:
    policy, upstream = policy_of(model_type), torch.linspace(-1, 1, 120)
    gradients = []
    for logprobs in (computed(policy), own_logprobs(policy.model)):
        policy.model.zero_grad()
        (logprobs * upstream).sum().backward()
        gradients.append({name: each.grad for name, each in policy.model.named_parameters()})
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-4, rtol=1e-4)


def test_samples_of_a_group_share_no_prompt_where_a_layer_carries_a_state() -> None:
    policy, group = policy_of("qwen3_5_text"), [replace(samples()[0], id=SampleId(0, 0, i)) for i in range(3)]
    batches = policy.own_micro_batches(group, max_tokens=1000)
    assert [each.lengths for each in batches] == [[79]] * 3


def convolved_by(heeds: Callable[[Tensor | None], bool]) -> Callable[..., Tensor]:
    """transformers' convolution of LFM2 on a CPU, which begins anew where `seq_idx` changes if it is heeded,
    as the kernel of causal-conv1d does."""
    own = modeling_lfm2.causal_conv1d_fn

    def convolve(x: Tensor, *others: object, seq_idx: Tensor | None = None, **named: object) -> Tensor:
        if seq_idx is None or not heeds(seq_idx):
            return own(x, *others, **named)
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([own(each, *others, **named) for each in x.split(lengths, 2)], 2)

    return convolve


def test_a_layer_with_a_state_that_heeds_the_boundaries_is_packed_without_shared_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", convolved_by(lambda _: True))
    policy = policy_of("lfm2")
    assert policy.packing is Packing.SEPARATE
    with torch.no_grad():
        torch.testing.assert_close(computed(policy), own_logprobs(policy.model), atol=5e-6, rtol=0)


def test_a_leak_planted_in_one_layer_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two convolutions ignores the boundaries."""
    calls = itertools.count()
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", convolved_by(lambda _: next(calls) % 2 == 0))
    shape = {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}
    policy = policy_of("lfm2", random_model("lfm2", shape))
    assert policy.packing is Packing.ALONE and MIXES in policy.way


def test_a_leak_that_is_small_because_the_weights_are_is_not_packed() -> None:
    assert MIXES in policy_of("falcon_h1", random_model("falcon_h1", SHAPES["falcon_h1"], std=0.01)).way


def test_ranks_cannot_share_a_model_that_computes_one_sequence_at_a_time() -> None:
    problem = r"trainer\.ranks = 2: an architecture of type 'lfm2' trains one sequence at a time"
    with pytest.raises(ConfigError, match=problem):
        PolicyModel(
            random_model("lfm2", SHAPES["lfm2"]), TrainerSettings(), temperature=1.0, ranks=Ranks(0, 2)
        )


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_depends_on_the_longest_sequence_is_not_packed(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if rope_type == "longrope" else {}
    policy = policy_of("llama", random_model("llama", {"rope_parameters": rope}))
    assert f"at a time: its rope type '{rope_type}' depends on the longest sequence" in policy.way


def test_windows_are_those_of_the_config_after_the_check() -> None:
    policy = PolicyModel(random_model("mistral", {"sliding_window": 40}), TrainerSettings(), temperature=1.0)
    attention = policy.model.model.layers[0].self_attn
    assert policy.model.config.sliding_window == getattr(attention, "sliding_window", 40) == 40


def test_the_page_lists_exactly_the_architectures_that_are_tried() -> None:
    rows = dict(
        line.strip("| ").split(" | ", 1) for line in PAGE.read_text().splitlines() if "`model_type`" in line
    )
    assert rows == {
        "packed, by `model_type`": ", ".join(EXACT),
        "packed without shared prompts, by `model_type`": ", ".join(SEPARATE),
        "one sequence at a time, by `model_type`": ", ".join(ALONE),
    }
