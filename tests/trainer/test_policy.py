import pytest
import torch
from trainer_cases import VOCABULARY, make_units
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tailrace.errors import ConfigError
from tailrace.trainer.packing import MicroBatch
from tailrace.trainer.policy import Policy
from tailrace.trainer.wire import TrainingSample
from tailrace.types import SampleId

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def random_model(model_type: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | changes)))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {"head_dim": 16}),
        ("qwen2", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 5}),
        ("phi", {}),  # a head with a bias
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),  # learned positions
    ],
)
def test_packed_log_probs_equal_the_plain_forward_of_each_sample(
    model_type: str, changes: dict[str, object]
) -> None:
    samples = [sample for sample in make_units(1, num_samples=7)[0] if sample.completion_ids]
    model = random_model(model_type, **changes)
    policy = Policy(model, temperature=0.6, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        got = policy.logprobs(MicroBatch.of([[sample] for sample in samples], CPU)).logprobs
        model.set_attn_implementation("eager")
        wanted = []
        for sample in samples:
            logits = model(torch.tensor([sample.prompt_ids + sample.completion_ids])).logits[0]
            logp = (logits / 0.6).log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
            wanted.append(logp.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0])
    torch.testing.assert_close(got, torch.cat(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("granite", {"logits_scaling": 3.0}), ("mamba", {}), ("stablelm", {})],
    ids=["logits changed after the head", "state runs through packed sequences", "boundaries not passed on"],
)
def test_an_architecture_that_cannot_run_packed_is_refused(
    model_type: str, changes: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=f"type '{model_type}' does not run packed; choose"):
        Policy(random_model(model_type, **changes), temperature=1.0, device=CPU, dtype=torch.float32)


def test_bfloat16_computes_near_float32_with_float32_weights() -> None:
    samples = make_units(1)[0]
    batch = MicroBatch.of([[sample] for sample in samples], CPU)
    exact, rough = (
        Policy(random_model("qwen3", head_dim=16), temperature=1.0, device=CPU, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    difference = exact.logprobs(batch).logprobs - rough.logprobs(batch).logprobs
    assert 0 < difference.abs().max() < 0.2
    assert {parameter.dtype for parameter in rough.parameters().values()} == {torch.float32}


def answers_to(prompt_ids: list[int], *completions: list[int]) -> list[TrainingSample]:
    return [
        TrainingSample(SampleId(0, 0, i), prompt_ids, ids, [0.0] * len(ids), 0.0)
        for i, ids in enumerate(completions)
    ]


@pytest.mark.parametrize(
    ("dtype", "num_fed"),
    [(torch.float32, 4 + 2 + 1), (torch.bfloat16, 3 * 4 + 2 + 1)],
    ids=["ours", "theirs"],
)
def test_a_prompt_is_fed_once_where_the_decoder_is_ours(dtype: torch.dtype, num_fed: int) -> None:
    policy = Policy(random_model("qwen3", head_dim=16), temperature=1.0, device=CPU, dtype=dtype)
    (batch,) = policy.batches(answers_to([5, 6, 7, 8], [1, 2, 3], [4, 5], [9]), budget=100)
    assert batch.input_ids.shape == (1, num_fed)
    assert batch.targets.tolist() == [1, 2, 3, 4, 5, 9]
