import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tailrace.weights.base import Weights
from tailrace.weights.shared import SharedWeights, WeightsReader, _Joined, own_folder, shared_memory


def read(weights: Weights) -> dict[str, torch.Tensor]:
    return WeightsReader().read(weights)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path / "weights")
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(3, dtype=torch.bfloat16)}
    weights = shared.write(tensors, 7)
    assert weights == Weights(7, str(tmp_path / "weights" / "7.safetensors"))
    got = read(weights)
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert got["b"].dtype == torch.bfloat16


def test_the_file_of_a_checkpoint_is_read_too(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert read(Weights(0, str(tmp_path / "model.safetensors")))["a"].tolist() == [0, 1, 2]


def test_the_last_three_versions_are_kept(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path)
    versions = [shared.write({"a": torch.full((2,), float(v))}, v) for v in range(5)]
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{v}.safetensors" for v in (2, 3, 4)]
    assert [read(weights)["a"].tolist() for weights in versions[2:]] == [[2.0] * 2, [3.0] * 2, [4.0] * 2]
    with pytest.raises(FileNotFoundError):
        read(versions[1])


def test_a_version_written_again_replaces_itself(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path)
    for value in (1.0, 2.0, 3.0):
        weights = shared.write({"a": torch.tensor([value])}, 0)
    assert read(weights)["a"].tolist() == [3.0]


def test_what_was_read_stays_when_its_file_is_written_over(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path)
    first = shared.write({"a": torch.zeros(4)}, 0)
    got, file = read(first), os.stat(first.location).st_ino
    for version in (1, 2):
        shared.write({"a": torch.ones(4)}, version)
    fourth = shared.write({"a": torch.full((4,), 2.0)}, 3)
    assert os.stat(fourth.location).st_ino == file  # the memory of the first
    assert got["a"].tolist() == [0.0] * 4


def test_a_version_that_is_written_over_while_it_is_read_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedWeights(tmp_path)
    first = shared.write({"a": torch.zeros(4)}, 0)

    def slowly(file: NDArray[np.uint8]) -> _Joined | None:
        monkeypatch.undo()
        for version in (1, 2, 3):
            shared.write({"a": torch.ones(4)}, version)
        return _Joined.of(file)

    monkeypatch.setattr(_Joined, "of", slowly)
    with pytest.raises(FileNotFoundError):
        read(first)


def test_a_reader_sees_each_version_though_files_come_again(tmp_path: Path) -> None:
    shared, reader = SharedWeights(tmp_path), WeightsReader()
    got = [reader.read(shared.write({"a": torch.full((4,), float(v))}, v))["a"] for v in range(7)]
    assert [tensor.tolist() for tensor in got] == [[float(v)] * 4 for v in range(7)]
    assert reader.read(shared.write({"a": torch.ones(2)}, 7))["a"].tolist() == [1.0, 1.0]
    assert len(reader._files) == 3  # no more memory is kept than the writer keeps


def test_tensors_of_other_shapes_and_names_get_files_of_their_own(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path)
    for version, tensors in enumerate(({"a": torch.ones(2)}, {"a": torch.ones(3)}, {"b": torch.ones(3)})):
        weights = shared.write(tensors, version)
    assert {name: tensor.tolist() for name, tensor in read(weights).items()} == {"b": [1.0, 1.0, 1.0]}


def test_tensors_outlive_their_file(tmp_path: Path) -> None:
    shared = SharedWeights(tmp_path / "weights")
    got = read(shared.write({"a": torch.arange(5)}, 0))
    shutil.rmtree(tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
    assert got["a"].tolist() == [0, 1, 2, 3, 4]


def test_shared_memory_is_a_folder_one_can_write_to() -> None:
    assert shared_memory().is_dir()
    assert os.access(shared_memory(), os.W_OK)


KILLED = """
import os, signal, sys
from pathlib import Path
from tailrace.weights import shared

shared.shared_memory = lambda: Path(sys.argv[1])
with shared.own_folder() as folder:
    (folder / "1.safetensors").write_bytes(b"weights")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_removed_and_what_lives_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.weights.shared.shared_memory", lambda: tmp_path)
    (tmp_path / "of-others").mkdir()
    with own_folder() as living:
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
        assert len(list(tmp_path.glob("*/1.safetensors"))) == 1
        with own_folder() as mine:
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
                ["of-others", living.name, mine.name]
            )
    assert [path.name for path in tmp_path.iterdir()] == ["of-others"]
