"""LoRA: an adapter is trained, merged, saved and switched off."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from trainer_cases import make_torch_trainer, make_units
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from helpers.architectures import SHAPES, SIZES, random_model
from tailrace.contracts.trainer import LoraSettings
from tailrace.drivers.trainer.adapter import adapted_modules, adapter_tensors, check_lora
from tailrace.drivers.trainer.lora import Adapter
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.drivers.weights.tensors import manifest
from tailrace.errors import CheckpointError, ConfigError
from tailrace.model_folder import tensor_shapes

Make = Callable[..., TorchTrainer]
LORA = {"rank": 4, "alpha": 8.0}


def copies(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


@torch.no_grad()
def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """Those of some tokens, by transformers and peft."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    found: torch.Tensor = model.eval()(torch.arange(20)[None]).logits
    return found


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
    assert len(written["target_modules"]) == 14
    assert written["target_modules"] == sorted(written["target_modules"])
    theirs = logits(model_path, tmp_path / "saved" / "adapter")
    assert torch.allclose(theirs, logits(tmp_path / "saved"), atol=1e-5)


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
    ("settings", "words"),
    [
        ({"target_modules": ["q_proj", "lm_head"]},
         r"trainer\.lora\.target_modules = .*lm_head: no linear layer.*choose from down_proj, gate_proj"),
        ({"versions": 2},
         r"versions = 2: merged weights replace each other; set it to 1, or publish = .adapter"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_remedy(
    model_path: Path, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_lora(model_path, LoraSettings.model_validate(settings))


def test_layers_that_the_model_lacks_are_refused_by_the_trainer_too(make_trainer: Make) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.target_modules = .*c_attn: no linear layer"):
        make_trainer(lora={"target_modules": ["c_attn"]})


REFUSED = ("falcon_h1", "mamba", "mamba2", "nemotron_h")
"""Architectures some linear layers of which peft refuses to adapt."""
SHOWN = ("qwen2_moe", "gemma4_text", "phimoe", "gpt2")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SHAPES.keys() - {*SHOWN, *REFUSED}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [*SHOWN, *sorted(SLOW, key=str)])
def test_the_adapter_of_any_architecture_is_what_its_folder_predicts(model_type: str, tmp_path: Path) -> None:
    random_model(model_type, SHAPES[model_type]).save_pretrained(tmp_path)
    settings = LoraSettings(rank=2, publish="adapter")
    trainer = make_torch_trainer(tmp_path, lora=settings)
    assert set(manifest(dict(trainer.weights()))) == set(adapter_tensors(tmp_path, settings))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "gpt2"])
def test_the_merged_export_is_peft_s_sum_and_has_the_names_of_the_base(
    model_type: str, tmp_path: Path
) -> None:
    folder, saved = tmp_path / "base", tmp_path / "saved"
    random_model(model_type, SHAPES[model_type]).save_pretrained(folder)
    trainer = make_torch_trainer(folder, learning_rate=1e-2, lora=LORA)
    step(trainer)
    trainer.save(saved)()
    names = [sorted(load_file(each / "model.safetensors")) for each in (folder, saved)]
    assert names[0] == names[1]
    ours = logits(saved)
    assert torch.allclose(logits(folder, saved / "adapter"), ours, atol=1e-4)
    assert not torch.allclose(logits(folder), ours, atol=1e-2)


def test_an_adapter_leaves_the_layers_for_images_out_and_has_the_names_of_the_files(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=SIZES | SHAPES["gemma3_text"], vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "base")
    trainer = make_torch_trainer(tmp_path / "base", lora=LORA | {"publish": "adapter"})
    step(trainer)
    trainer.save(tmp_path / "saved")()
    layers = {name.rpartition(".lora_")[0] for name in dict(trainer.weights())}
    in_files = {name.removesuffix(".weight") for name in tensor_shapes(tmp_path / "base")}
    assert len(layers) == 14 and layers <= in_files
    assert all(name.startswith("language_model.model.layers.") for name in layers)
    theirs = logits(tmp_path / "base", tmp_path / "saved" / "adapter")
    assert torch.allclose(theirs, logits(tmp_path / "saved"), atol=1e-5)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_names_in_files_may_lack_the_prefix_of_the_model(model_type: str, tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    model = random_model(model_type, SHAPES[model_type] | {"tie_word_embeddings": True})
    model.save_pretrained(base)
    model.base_model.save_pretrained(base)
    settings = LoraSettings(rank=2, publish="adapter")
    trainer = make_torch_trainer(base, learning_rate=1e-2, lora=settings)
    step(trainer)
    assert set(manifest(dict(trainer.weights()))) == set(adapter_tensors(base, settings))
    trainer.save(saved)()
    ours = logits(saved)
    assert torch.allclose(logits(base, saved / "adapter"), ours, atol=1e-4)
    assert not torch.allclose(logits(base), ours, atol=1e-3)
    make_torch_trainer(base, lora=settings).restore(saved)


def test_a_model_of_whose_layers_the_folder_names_none_is_refused(model_path: Path) -> None:
    model = random_model("gpt2", SHAPES["gpt2"])
    model.config.name_or_path = str(model_path)
    with pytest.raises(ConfigError, match="the folder's weights have other names than"):
        Adapter(model, LoraSettings())


def test_layers_of_experts_are_left_out_and_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model("qwen3_moe", SHAPES["qwen3_moe"]).save_pretrained(tmp_path)
    capsys.readouterr()
    check_lora(tmp_path, LoraSettings())
    said = (
        "the adapter leaves the experts out, and other layers of their names: down_proj, gate_proj, up_proj"
    )
    assert capsys.readouterr().err == f"tailrace: {said}\n"
    kinds = {name.rpartition(".")[2] for name in adapted_modules(tmp_path, LoraSettings())}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}
    words = "up_proj: no linear layer of the model, but for its experts.*choose from k_proj, o_proj, q_proj"
    with pytest.raises(ConfigError, match=words):
        adapted_modules(tmp_path, LoraSettings(target_modules=("q_proj", "up_proj")))
