import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_cases import VOCABULARY, make_units
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.distributed import ATTENTION
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.packing import MicroBatch
from tailrace.errors import ConfigError

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
    policy = PolicyModel(model, TrainerSettings(), temperature=0.6)
    with torch.no_grad():
        got = policy.logprobs(MicroBatch.of(samples, CPU)).logprobs
        model.set_attn_implementation("eager")
        wanted = []
        for sample in samples:
            logits = model(torch.tensor([sample.prompt_ids + sample.completion_ids])).logits[0]
            logp = (logits / 0.6).log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
            wanted.append(logp.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0])
    torch.testing.assert_close(got, torch.cat(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize("weight", [float("nan"), 3.4e38])
def test_damaged_weights_are_not_taken_for_an_architecture(weight: float) -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[2] = weight
    with pytest.raises(ConfigError, match="its log-probs are not finite: weights are damaged"):
        PolicyModel(model, TrainerSettings(), temperature=1.0)


def test_bfloat16_computes_near_float32_with_float32_weights() -> None:
    samples = make_units(1)[0]
    batch = MicroBatch.of(samples, CPU)
    exact, rough = (
        PolicyModel(
            random_model("qwen3", head_dim=16),
            TrainerSettings.model_validate({"dtype": dtype}),
            temperature=1.0,
        )
        for dtype in ("float32", "bfloat16")
    )
    difference = exact.logprobs(batch).logprobs - rough.logprobs(batch).logprobs
    assert 0 < difference.abs().max() < 0.2
    assert {parameter.dtype for parameter in rough.parameters().values()} == {torch.float32}


class Kernels(TorchDispatchMode):
    """Inside the block counts the calls of attention's forward and backward kernels that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forward = self.num_backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_forward += func in ATTENTION
        self.num_backward += "attention" in str(func) and "backward" in str(func)
        return func(*args, **(kwargs or {}))


def test_activation_checkpointing_gives_the_same_bits_and_computes_attention_once() -> None:
    samples = make_units(1)[0]
    batch = MicroBatch.of(samples, CPU)
    gradients = []
    for recomputed in (False, True):
        settings = TrainerSettings(activation_checkpointing=recomputed)
        policy = PolicyModel(random_model("qwen3", head_dim=16), settings, temperature=1.0)
        with Kernels() as kernels:
            policy.logprobs(batch).logprobs.sum().backward()
        assert kernels.num_forward == kernels.num_backward == 2 * len(batch.lengths)
        gradients.append([each.grad for each in policy.parameters().values()])
    assert all(torch.equal(*each) for each in zip(*gradients, strict=True))


def damage(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.fixture
def folder(model_path: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model_path, tmp_path / "model")


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        PolicyModel.load(folder, TrainerSettings(), temperature=1.0)
    assert (caught.value.key, caught.value.value) == ("model.path", str(folder))
    return caught.value.problem


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"\x10\x00\x00\x00\x00\x00\x00\x00{"])
def test_damaged_weights_are_a_config_error_that_names_the_file(folder: Path, content: bytes) -> None:
    path = damage(folder, "model.safetensors", content)
    assert refusal(folder).startswith(f"{path.name} is damaged (")


def test_truncated_weights_are_a_config_error_that_names_the_file(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    path = damage(folder, "model.safetensors", whole[: len(whole) // 2])
    assert refusal(folder).startswith(f"{path.name} is damaged (")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"hidden_size": -32},
        {"hidden_size": "32"},
        {"num_key_value_heads": 3},
        {"vocab_size": 12},
        {"rope_parameters": [1]},
        {"model_type": "nonsense"},
    ],
    ids=str,
)
def test_a_nonsensical_config_is_a_config_error_that_names_the_file(
    folder: Path, changes: dict[str, object]
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert refusal(folder).startswith("config.json")


def test_a_config_that_is_no_json_is_a_config_error_that_names_the_file(folder: Path) -> None:
    damage(folder, "config.json", b'{"a":')
    assert refusal(folder).startswith("config.json is not JSON")


def test_a_folder_without_weights_or_that_does_not_exist_is_a_config_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == "the folder has no safetensors weights"
    assert refusal(folder / "nowhere") == "there is no such folder"
