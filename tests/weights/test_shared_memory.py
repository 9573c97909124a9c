"""Published weights in shared memory: written as a whole, kept for readers, removed after a kill."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tailrace.weights.base import Weights
from tailrace.weights.shared_memory import SharedWeights, own_folder, read_weights, shared_memory


def test_what_is_written_is_read(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path / "weights")
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(3, dtype=torch.bfloat16)}
    weights = shared.write(tensors, 7)
    assert weights == Weights(7, str(tmp_path / "weights" / "7.safetensors"))
    got = read_weights(weights)
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert got["b"].dtype == torch.bfloat16


def test_the_file_of_a_checkpoint_is_read_too(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_weights(Weights(0, str(tmp_path / "model.safetensors")))["a"].tolist() == [0, 1, 2]


def test_the_last_two_versions_are_kept(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path)
    versions = [shared.write({"a": torch.full((2,), float(v))}, v) for v in range(5)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["3.safetensors", "4.safetensors"]
    assert [read_weights(weights)["a"].tolist() for weights in versions[3:]] == [[3.0] * 2, [4.0] * 2]
    with pytest.raises(FileNotFoundError):
        read_weights(versions[2])


def test_a_version_written_again_replaces_itself(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path)
    for value in (1.0, 2.0, 3.0):
        weights = shared.write({"a": torch.tensor([value])}, 0)
    assert read_weights(weights)["a"].tolist() == [3.0]


def test_tensors_that_were_read_do_not_change_with_later_versions(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path)
    got = read_weights(shared.write({"a": torch.zeros(4)}, 0))
    for version in (0, 1, 2, 3):
        shared.write({"a": torch.ones(4)}, version)
    assert got["a"].tolist() == [0.0] * 4


def test_a_version_that_cannot_be_written_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path / "weights")
    shutil.rmtree(tmp_path / "weights")
    with pytest.raises(OSError, match=r"weights/3\.safetensors: .*--shm-size"):
        shared.write({"a": torch.zeros(4)}, 3)


def test_tensors_outlive_their_file(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path / "weights")
    got = read_weights(shared.write({"a": torch.arange(5)}, 0))
    shutil.rmtree(tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
    assert got["a"].tolist() == [0, 1, 2, 3, 4]


def test_shared_memory_is_a_folder_one_can_write_to() -> None:
    assert shared_memory().is_dir()
    assert os.access(shared_memory(), os.W_OK)


KILLED = """
import os, signal, sys
from pathlib import Path
from tailrace.weights import shared_memory as shared

shared.shared_memory = lambda: Path(sys.argv[1])
with shared.own_folder() as folder:
    (folder / "1.safetensors").write_bytes(b"weights")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_removed_and_what_lives_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.weights.shared_memory.shared_memory", lambda: tmp_path)
    (tmp_path / "of-others").mkdir()
    with own_folder() as living:
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
        assert len(list(tmp_path.glob("*/1.safetensors"))) == 1
        with own_folder() as mine:
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
                ["of-others", living.name, mine.name]
            )
    assert [path.name for path in tmp_path.iterdir()] == ["of-others"]
