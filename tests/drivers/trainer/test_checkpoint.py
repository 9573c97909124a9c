import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_cases import make_torch_trainer, make_units
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.architectures import SHAPES, random_model
from tailrace.contracts.trainer import StepStats, TrainerSettings
from tailrace.drivers.trainer import checkpoint
from tailrace.drivers.trainer.checksums import replacing, verify
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.errors import CheckpointError, ConfigError
from tailrace.model_folder import INDEX, weight_files

STATE_FILE = "trainer/shard-00001-model-00001-of-00001.safetensors"
Make = Callable[..., TorchTrainer]


def steps(trainer: TorchTrainer, seeds: range) -> list[StepStats]:
    stats = []
    for seed in seeds:
        trainer.accumulate(make_units(2, seed=seed))
        stats.append(trainer.step())
    return stats


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_restored_trainer_goes_on_bit_for_bit(make_trainer: Make, tmp_path: Path, num_before: int) -> None:
    original = make_trainer(warmup_steps=5, weight_decay=0.1)
    steps(original, range(num_before))
    original.save(tmp_path / "checkpoint")()
    chance = torch.rand(4)
    wanted = steps(original, range(num_before, 6))

    restored = make_trainer(warmup_steps=5, weight_decay=0.1)
    restored.accumulate(make_units(1, seed=99))
    restored.restore(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(4), chance), "the random state goes on too"
    got = steps(restored, range(num_before, 6))
    for name in ("num_steps", "loss", "grad_norm", "learning_rate", "samples"):
        assert [getattr(s, name) for s in got] == [getattr(s, name) for s in wanted], name
    for name, tensor in dict(original.weights()).items():
        assert torch.equal(tensor, dict(restored.weights())[name]), name


def test_the_folder_loads_with_transformers_and_gives_the_same_logits(
    make_trainer: Make, model_path: Path, tmp_path: Path
) -> None:
    trainer = make_trainer()
    steps(trainer, range(2))
    trainer.save(tmp_path / "export")()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    ours = AutoModelForCausalLM.from_pretrained(model_path).eval()
    for name, parameter in ours.named_parameters():
        parameter.data = dict(trainer.weights())[name]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, ours(ids).logits)
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("llama", ["mtp.fc.weight"]),
        ("qwen3_5_moe_text", ["mtp.layers.0.mlp.experts.gate_up_proj", "mtp.norm.weight"]),
        ("deepseek_v3", ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight"]),
    ],
)
def test_weights_that_predict_several_tokens_are_exported_as_the_base_has_them(
    tmp_path: Path, model_type: str, names: list[str]
) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    random_model(model_type, SHAPES[model_type]).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    drafts = {name: torch.randn(4, 2).bfloat16() for name in names}
    tensors = load_file(base / "model.safetensors") | drafts
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    trainer = make_torch_trainer(base)
    steps(trainer, range(1))
    trainer.save(saved)()
    files, index = weight_files(saved), json.loads((saved / INDEX).read_text())
    exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert exported.keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in exported.values())
    assert all(exported[name].dtype == torch.bfloat16 for name in names)
    assert all(torch.equal(exported[name], drafts[name]) for name in names)
    assert not torch.equal(exported["lm_head.weight"], tensors["lm_head.weight"])
    make_torch_trainer(saved).save(tmp_path / "again")()
    assert len(weight_files(tmp_path / "again")) == len(files) == 2


def test_the_folder_of_the_base_may_go_unless_it_has_drafts(model_path: Path, tmp_path: Path) -> None:
    base = shutil.copytree(model_path, tmp_path / "base")
    plain, tensors = make_torch_trainer(base), load_file(base / "model.safetensors")
    save_file(tensors | {"mtp.fc": torch.ones(2)}, base / "model.safetensors", {"format": "pt"})
    drafting = make_torch_trainer(base)
    shutil.rmtree(base)
    plain.save(tmp_path / "saved")()
    with pytest.raises(CheckpointError, match=r"saved cannot be written \(No such file"):
        drafting.save(tmp_path / "saved")()


def test_saving_again_replaces_the_folder_and_leaves_nothing_else(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "checkpoint")()
    steps(trainer, range(1))
    (tmp_path / "checkpoint.partial").mkdir()
    trainer.save(tmp_path / "checkpoint")()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    fresh = make_trainer()
    fresh.restore(tmp_path / "checkpoint")
    assert steps(fresh, range(1))[0].num_steps == 2


@pytest.mark.parametrize("file", ["model.safetensors", STATE_FILE, "config.json"])
@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_damaged_checkpoint_names_itself_and_changes_nothing(
    make_trainer: Make, tmp_path: Path, file: str, damage: str
) -> None:
    trainer = make_trainer()
    steps(trainer, range(1))
    trainer.save(tmp_path / "checkpoint")()
    path = tmp_path / "checkpoint" / file
    content = path.read_bytes()
    path.unlink()
    if damage == "torn":
        path.write_bytes(content[: len(content) // 2])
    fresh, untouched = make_trainer(), make_trainer()
    with pytest.raises(CheckpointError, match=r"checkpoint.*put a copy of it back"):
        fresh.restore(tmp_path / "checkpoint")
    for name, tensor in dict(fresh.weights()).items():
        assert torch.equal(tensor, dict(untouched.weights())[name]), name


def test_a_bit_that_flips_in_any_file_is_found_and_the_file_is_named(
    make_trainer: Make, tmp_path: Path
) -> None:
    trainer, folder = make_trainer(advantage="gae"), tmp_path / "checkpoint"
    steps(trainer, range(2))
    trainer.save(folder)()
    assert verify(folder, "remedy", step=2)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {"model.safetensors", "config.json", "tokenizer.json", "checksums.json"} < {p.name for p in files}
    for file in files:
        content = file.read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(CheckpointError, match=rf"{file.name} is damaged.*; remedy"):
                verify(folder, "remedy", step=2)
        file.write_bytes(content)
    assert verify(folder, "remedy", step=2)


def test_a_checkpoint_of_another_step_in_its_place_is_found(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer()
    steps(trainer, range(1))
    trainer.save(tmp_path / "checkpoint")()
    with pytest.raises(CheckpointError, match="checkpoint has 1 optimizer steps, and the ledger says 2"):
        verify(tmp_path / "checkpoint", "remedy", step=2)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_the_old_one_stays_until_then(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, folder = make_trainer(), tmp_path / "checkpoint"
    trainer.save(folder)()
    before = (folder / "model.safetensors").read_bytes()
    steps(trainer, range(1))
    synchronized, renamed = set[str](), []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        synchronized.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        if path.name == "checkpoint.partial":
            inside = {str(each) for each in [path, *path.rglob("*")]}
            held = [each for each in tmp_path.glob("*/model.safetensors") if each.read_bytes() == before]
            renamed.append((inside <= synchronized, len(held)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    trainer.save(folder)()
    assert renamed == [(True, 1)]
    assert str(tmp_path) in synchronized, "the new name is on the disk, too"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_moments_that_are_missing_as_a_whole_are_a_defect(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 5100)  # the random state and the counts, nothing else
    trainer = make_trainer()
    steps(trainer, range(1))
    trainer.save(tmp_path / "checkpoint")()
    _, *others = sorted((tmp_path / "checkpoint" / "trainer").iterdir())
    assert others
    for file in others:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"moments of the policy are missing.*put a copy of it back"):
        make_trainer().restore(tmp_path / "checkpoint")


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_that_is_there(
    make_trainer: Make, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "checkpoint")()
    before = (tmp_path / "checkpoint" / STATE_FILE).read_bytes()
    (tmp_path / "checkpoint.partial").write_text("a file where a folder is to be")
    with pytest.raises(CheckpointError, match=r"checkpoint cannot be written \(.*; make room on the disk"):
        trainer.save(tmp_path / "checkpoint")()
    assert (tmp_path / "checkpoint" / STATE_FILE).read_bytes() == before


def test_a_generation_config_that_transformers_reads_and_does_not_write_is_copied(
    model_path: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_path, tmp_path / "model")
    given = '{"eos_token_id": 3, "temperature": 0.6, "top_p": 0.9}'  # without do_sample
    (folder / "generation_config.json").write_text(given)
    make_torch_trainer(folder).save(tmp_path / "checkpoint")()
    assert (tmp_path / "checkpoint" / "generation_config.json").read_text() == given
    make_torch_trainer(tmp_path / "checkpoint")


def test_a_model_that_could_not_be_exported_is_refused_at_the_start(model_path: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_path, tmp_path / "model")
    (folder / "generation_config.json").unlink()
    policy = PolicyModel.load(folder, TrainerSettings(), temperature=1.0)
    policy.model.generation_config.temperature = 0.6
    with pytest.raises(ConfigError, match=r"a checkpoint of this model could not be written \(ValueError: "):
        checkpoint.try_export(policy, folder)


def test_a_missing_folder_is_a_checkpoint_error(make_trainer: Make, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        make_trainer().restore(tmp_path / "nowhere")


def test_a_checkpoint_of_another_model_is_refused(
    make_trainer: Make, model_path: Path, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "checkpoint")()
    config = AutoConfig.from_pretrained(model_path)
    config.intermediate_size = 64
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"to another model: .*mlp.* is .*64.*here .*48"):
        make_trainer().restore(tmp_path / "checkpoint")


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("settings", [{}, {"advantage": "gae"}, {"lora": {"rank": 2}}])
def test_a_checkpoint_has_the_state_at_its_beginning_though_training_goes_on(
    make_trainer: Make, tmp_path: Path, settings: dict[str, object], beside: bool
) -> None:
    trainer = make_trainer(async_checkpoints=beside, **settings)
    steps(trainer, range(2))
    write = trainer.save(tmp_path / "checkpoint")
    if beside:
        wanted = steps(trainer, range(2, 4))
        assert not (tmp_path / "checkpoint").exists()
        write()
    else:
        write()
        wanted = steps(trainer, range(2, 4))
    restored = make_trainer(**settings)
    restored.restore(tmp_path / "checkpoint")
    got = steps(restored, range(2, 4))
    assert [(s.num_steps, s.loss, s.grad_norm) for s in got] == [
        (s.num_steps, s.loss, s.grad_norm) for s in wanted
    ]


def test_a_folder_is_replaced_as_a_whole_or_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for number in range(2):
        with replacing(folder) as new:
            (new / f"{number}.json").write_text("{}")
            assert [path.name for path in folder.glob("*")] == ["0.json"][:number]
    with pytest.raises(OSError, match="no room"), replacing(folder) as new:
        (new / "2.json").write_text("{}")
        raise OSError("no room")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["model", "model/1.json"]
