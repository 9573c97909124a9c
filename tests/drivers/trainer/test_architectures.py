"""Architectures train exactly, packed or one sequence at a time. The list:
docs/reference/models.md."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.lfm2 import modeling_lfm2

from helpers.architectures import (
    ALONE,
    MIXES,
    SEPARATE,
    SHAPES,
    VOCABULARY,
    engine_table,
    random_model,
)
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.distributed import Ranks
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.packing import MicroBatch, Packing
from tailrace.errors import ConfigError
from tailrace.types import SampleId

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "reference" / "models.md"
NUM_PROMPT = 20


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
        torch.testing.assert_close(computed(policy), own_logprobs(policy.model), atol=1e-5, rtol=0)


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
    batches = policy.own_micro_batches(group)
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
        torch.testing.assert_close(computed(policy), own_logprobs(policy.model), atol=1e-5, rtol=0)


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


def test_the_page_has_a_row_of_each_way_in_which_trainer_and_engines_compute_a_model() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows == ["| `model_type` | trainer | embedded engine | vLLM 0.32 |", *engine_table()]
