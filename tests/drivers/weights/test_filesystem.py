"""Published weights as Hugging Face folders: complete or absent, whatever dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.tiny_models import save_tiny_model
from tailrace.contracts.weights import TensorInfo, Weights, new_link
from tailrace.drivers.weights.filesystem import FilesystemSender
from tailrace.drivers.weights.manifest import expected_tensors
from tailrace.drivers.weights.settings import FilesystemSettings
from tailrace.drivers.weights.transports import WeightReceiver
from tailrace.errors import ConfigError, TransferFailed, WeightsRefused


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return save_tiny_model(tmp_path_factory.mktemp("trained"), seed=1)


@pytest.fixture(params=[10**9, 5000], ids=["whole", "sharded"])
def sender(tmp_path: Path, served: Path, request: pytest.FixtureRequest) -> Iterator[FilesystemSender]:
    opened = FilesystemSender(tmp_path / "weights", served, request.param)
    yield opened
    opened.close()


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def read(weights: Weights) -> dict[str, Tensor]:
    return WeightReceiver().receive(weights, new_link("engine-0"))


def test_a_version_is_a_model_that_transformers_loads_bit_for_bit(
    sender: FilesystemSender, served: Path, trained: PreTrainedModel, tmp_path: Path
) -> None:
    weights = sender.store(tensors_of(trained), 3)
    assert weights.location == str(tmp_path / "weights" / "version-3")
    loaded = AutoModelForCausalLM.from_pretrained(weights.location).state_dict()
    assert loaded.keys() == trained.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.state_dict().items())
    got = read(weights)
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors_of(trained).items())
    assert {"config.json", "tokenizer.json"} <= {file.name for file in Path(weights.location).iterdir()}
    assert sorted(weights.tensors) == sorted(expected_tensors(served, "float32"))


def test_the_config_of_a_version_says_the_type_of_its_tensors(
    sender: FilesystemSender, trained: PreTrainedModel
) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in tensors_of(trained).items()}
    weights = sender.store(halves, 1)
    config = json.loads((Path(weights.location) / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(weights.location).dtype == torch.bfloat16


def test_the_last_two_versions_are_kept_and_one_written_again_replaces_itself(
    sender: FilesystemSender, tmp_path: Path
) -> None:
    for version, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 4.0)):
        weights = sender.store({"a": torch.tensor([value])}, version)
    assert sorted(path.name for path in (tmp_path / "weights").glob("[a-z]*")) == ["version-2", "version-3"]
    assert read(weights)["a"].tolist() == [4.0]


def test_a_folder_that_another_trainer_publishes_to_is_refused(
    sender: FilesystemSender, tmp_path: Path, served: Path
) -> None:
    with pytest.raises(ConfigError, match=r"weights\.folder = .*another trainer publishes its weights there"):
        FilesystemSender(tmp_path / "weights", served, 1)
    sender.close()
    FilesystemSender(tmp_path / "weights", served, 1).close()


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, served: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"weights\.folder = .*it cannot be written \(Not a dir"):
        FilesystemSender(tmp_path / "file" / "weights", served, 1)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from tailrace.drivers.weights import filesystem

sender = filesystem.FilesystemSender(Path(sys.argv[1]), Path(sys.argv[2]), 10**9)
sender.store({"a": torch.zeros(3)}, 1)
filesystem._synchronize = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
sender.store({"a": torch.ones(3)}, 2)
"""


def test_a_trainer_killed_while_it_writes_leaves_no_version_and_the_next_one_cleans_up(
    tmp_path: Path, served: Path
) -> None:
    folder = tmp_path / "weights"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(served)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert sorted(path.name for path in folder.glob("[a-z]*")) == ["partial-2", "version-1"]
    assert read(Weights(1, str(folder / "version-1")))["a"].tolist() == [0.0] * 3
    with pytest.raises(TransferFailed, match=r"version 2 of the weights cannot be read: .*version-2"):
        read(Weights(2, str(folder / "version-2")))
    FilesystemSender(folder, served, 1).close()
    assert list(folder.glob("[a-z]*")) == []


def test_a_version_without_one_of_its_files_is_not_read(tmp_path: Path, served: Path) -> None:
    sender = FilesystemSender(tmp_path / "weights", served, 100)
    weights = sender.store({"a": torch.zeros(30), "b": torch.zeros(30)}, 1)
    first, _ = sorted(Path(weights.location).glob("*.safetensors"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    with pytest.raises(TransferFailed, match="version 1 of the weights cannot be read"):
        read(weights)
    os.unlink(first)
    with pytest.raises(TransferFailed, match=f"version-1: .*{first.name} is missing"):
        read(weights)
    sender.close()


def test_files_that_are_not_those_of_the_manifest_are_refused(tmp_path: Path, served: Path) -> None:
    sender = FilesystemSender(tmp_path / "weights", served, 10**9)
    weights = sender.store({"a": torch.zeros(30)}, 1)
    sender.close()
    other = Weights(1, weights.location, (TensorInfo("a", (31,), "float32"),))
    with pytest.raises(WeightsRefused, match=r"1 of another shape: a \[30\] in place of \[31\]"):
        read(other)


def test_folders_of_others_beside_the_versions_stay(tmp_path: Path, served: Path) -> None:
    (tmp_path / "version-mine").mkdir()
    FilesystemSender(tmp_path, served, 1).close()
    (tmp_path / "version-7").mkdir()  # of a process that was killed
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "version-8").symlink_to("elsewhere")
    FilesystemSender(tmp_path, served, 1).close()
    assert sorted(os.listdir(tmp_path)) == [".lock", ".tailrace", "elsewhere", "version-mine"]


def test_versions_that_no_trainer_published_are_refused_by_name_before_a_worker_starts(
    tmp_path: Path, served: Path
) -> None:
    (tmp_path / "version-2" / "model").mkdir(parents=True)
    why = r"weights\.folder = .* what tailrace did not write there: version-2; choose another"
    with pytest.raises(ConfigError, match=why):
        FilesystemSender(tmp_path, served, 1)
    with pytest.raises(ConfigError, match=why):
        FilesystemSettings(folder=tmp_path).in_run_folder(tmp_path)
    assert os.listdir(tmp_path) == ["version-2"] and (tmp_path / "version-2" / "model").is_dir()


def test_versions_of_a_release_without_marks_are_replaced(tmp_path: Path, served: Path) -> None:
    (tmp_path / ".lock").write_text("")
    (tmp_path / "version-2").mkdir()
    (tmp_path / "version-2" / "model.safetensors").write_text("")
    FilesystemSettings(folder=tmp_path).in_run_folder(tmp_path)
    FilesystemSender(tmp_path, served, 1).close()
    assert sorted(os.listdir(tmp_path)) == [".lock", ".tailrace"]
