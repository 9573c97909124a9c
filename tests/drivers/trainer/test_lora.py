"""LoRA: an adapter is trained, merged, saved and switched off."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from trainer_cases import make_units
from transformers import AutoModelForCausalLM

from tailrace.contracts.trainer import LoraSettings
from tailrace.drivers.trainer.adapter import adapter_tensors, check_lora
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.drivers.weights.tensors import manifest
from tailrace.errors import CheckpointError, ConfigError

Make = Callable[..., TorchTrainer]
LORA = {"rank": 4, "alpha": 8.0}


def copies(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def step(trainer: TorchTrainer, seed: int = 0) -> float:
    trainer.accumulate(make_units(2, seed=seed))
    return trainer.step().loss


def test_only_the_adapter_changes_and_merged_weights_are_its_sum_with_the_base(make_trainer: Make) -> None:
    merged = make_trainer(lora=LORA)
    alone = make_trainer(lora=LORA | {"publish": "adapter"})
    before, adapter_before = copies(merged), copies(alone)
    base = {name: p.clone() for name, p in alone._policy.model.named_parameters() if "lora_" not in name}
    for trainer in (merged, alone):
        for seed in range(2):
            step(trainer, seed)

    adapter = copies(alone)
    assert all(not torch.equal(adapter[name], adapter_before[name]) for name in adapter)
    for name, p in alone._policy.model.named_parameters():
        assert "lora_" in name or torch.equal(p, base[name]), name
    for name, tensor in merged.weights():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in adapter:
            change = adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"] * 2.0
            assert torch.equal(tensor, before[name] + change), name
            assert change.abs().max() > 0
        else:
            assert torch.equal(tensor, before[name]), name


def test_merged_weights_give_the_log_probs_of_the_trained_policy(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(lora=LORA)
    step(trainer)
    trainer.save(tmp_path / "saved")()
    sample = make_units(1)[0][0]
    policy = trainer._policy
    exported = make_trainer()
    exported._policy.model.load_state_dict(
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    )
    assert exported.logprobs(sample) == pytest.approx(trainer.logprobs(sample), abs=1e-5)
    assert trainer.reference_logprobs(sample) != pytest.approx(trainer.logprobs(sample), abs=1e-3)
    assert trainer.reference_logprobs(sample) == make_trainer().logprobs(sample)
    assert policy.adapter is not None


def test_the_adapter_is_in_the_format_of_peft(make_trainer: Make, model_path: Path, tmp_path: Path) -> None:
    trainer = make_trainer(lora=LORA)
    step(trainer)
    trainer.save(tmp_path / "saved")()
    written = json.loads((tmp_path / "saved" / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == model_path.name
    base = AutoModelForCausalLM.from_pretrained(model_path).eval()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter").eval()
        assert torch.allclose(theirs(ids).logits, ours(ids).logits, atol=1e-5)


def test_a_restored_adapter_goes_on_bit_for_bit(make_trainer: Make, tmp_path: Path) -> None:
    original = make_trainer(lora=LORA, weight_decay=0.1)
    step(original)
    original.save(tmp_path / "saved")()
    wanted = step(original, 1)
    restored = make_trainer(lora=LORA, weight_decay=0.1)
    restored.restore(tmp_path / "saved")
    assert step(restored, 1) == wanted
    again = dict(restored.weights())
    for name, tensor in original.weights():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (LORA | {"rank": 2}, r"its rank is 4, here 2; set trainer.lora.rank as it was"),
        (LORA | {"alpha": 16.0}, r"its alpha is 8\.0, here 16\.0; set trainer.lora.alpha as it was"),
        (LORA | {"target_modules": ["q_proj"]}, "belongs to another model"),
        (None, "belongs to another model"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(
    make_trainer: Make, tmp_path: Path, other: object, words: str
) -> None:
    trainer = make_trainer(lora=LORA)
    step(trainer)
    trainer.save(tmp_path / "saved")()
    with pytest.raises(CheckpointError, match=words):
        make_trainer(lora=other).restore(tmp_path / "saved")


def test_a_checkpoint_without_an_adapter_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer().save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="there is no adapter that can be read"):
        make_trainer(lora=LORA).restore(tmp_path / "saved")


def test_the_kl_to_the_reference_is_zero_before_the_first_step(make_trainer: Make) -> None:
    trainer = make_trainer(lora=LORA, kl_coef=0.1)
    unit = make_units(1)[0]
    for _ in range(2):
        referred = [
            type(s)(
                s.id, s.prompt_ids, s.completion_ids, s.behavior_logprobs, s.advantage,
                trainer.reference_logprobs(s),
            )
            for s in unit
        ]  # fmt: skip
        trainer.accumulate([referred])
        kl = trainer.step().reference_kl
        if trainer._optimizer.num_steps == 1:
            assert kl == pytest.approx(0.0, abs=1e-7)
    assert kl > 1e-6


@pytest.mark.parametrize("names", ["all-linear", ["q_proj", "down_proj"]])
def test_the_published_tensors_are_those_that_the_folder_predicts(
    make_trainer: Make, model_path: Path, names: object
) -> None:
    settings = LoraSettings.model_validate(LORA | {"target_modules": names, "publish": "adapter"})
    trainer = make_trainer(lora=settings)
    assert set(manifest(dict(trainer.weights()))) == set(adapter_tensors(model_path, settings))


@pytest.mark.parametrize(
    ("settings", "engine", "transport", "words"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "native", "shared_memory",
         r"trainer\.lora\.target_modules = .*lm_head: no linear layer.*choose from down_proj, gate_proj"),
        ({"publish": "adapter"}, "vllm", "shared_memory",
         r"publish = 'adapter': vLLM reads an adapter from a folder.*weights\.transport = .filesystem"),
        ({"publish": "adapter"}, "native", "filesystem",
         r"the embedded engine reads a version in a folder as a whole model"),
        ({"versions": 2}, "native", "shared_memory",
         r"versions = 2: merged weights replace each other; set it to 1, or publish = .adapter"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_remedy(
    model_path: Path, settings: dict[str, object], engine: str, transport: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_lora(model_path, LoraSettings.model_validate(settings), engine=engine, transport=transport)


def test_layers_that_the_model_lacks_are_refused_by_the_trainer_too(make_trainer: Make) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.target_modules = .*c_attn.* not found"):
        make_trainer(lora={"target_modules": ["c_attn"]})
