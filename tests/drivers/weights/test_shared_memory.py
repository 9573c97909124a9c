"""Published weights in shared memory: written as a whole, kept for readers, removed after a kill."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tailrace.contracts.weights import TensorInfo, Weights, new_link
from tailrace.drivers.weights.filesystem import FilesystemSender, shared_memory
from tailrace.drivers.weights.transports import WeightReceiver
from tailrace.errors import TransferFailed


@pytest.fixture
def sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FilesystemSender]:
    monkeypatch.setattr("tailrace.drivers.weights.filesystem.shared_memory", lambda: tmp_path)
    opened = FilesystemSender.in_shared_memory()
    yield opened
    opened.close()
    assert not opened.folder.exists()


def read(weights: Weights) -> dict[str, Tensor]:
    return WeightReceiver().receive(weights, new_link("engine-0"))


def test_what_is_written_is_read(sender: FilesystemSender) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(3, dtype=torch.bfloat16)}
    weights = sender.store(tensors, 7)
    manifest = (TensorInfo("a", (3, 2), "float32"), TensorInfo("b", (3,), "bfloat16"))
    assert weights == Weights(7, str(sender.folder / "version-7"), manifest)
    assert (weights.is_streamed, weights.num_bytes) == (False, 30)
    got = read(weights)
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert got["b"].dtype == torch.bfloat16


def test_the_last_two_versions_are_kept(sender: FilesystemSender) -> None:
    versions = [sender.store({"a": torch.full((2,), float(v))}, v) for v in range(5)]
    assert sorted(each.name for each in sender.folder.glob("[a-z]*")) == ["version-3", "version-4"]
    assert [read(weights)["a"].tolist() for weights in versions[3:]] == [[3.0] * 2, [4.0] * 2]
    with pytest.raises(TransferFailed, match=r"version 2 of the weights cannot be read: .*version-2"):
        read(versions[2])


def test_a_version_written_again_replaces_itself(sender: FilesystemSender) -> None:
    for value in (1.0, 2.0, 3.0):
        weights = sender.store({"a": torch.tensor([value])}, 0)
    assert read(weights)["a"].tolist() == [3.0]


def test_tensors_that_were_read_do_not_change_with_later_versions(sender: FilesystemSender) -> None:
    got = read(sender.store({"a": torch.zeros(4)}, 0))
    for version in (0, 1, 2, 3):
        sender.store({"a": torch.ones(4)}, version)
    assert got["a"].tolist() == [0.0] * 4


def test_a_version_that_cannot_be_written_names_the_file_and_leaves_nothing(
    sender: FilesystemSender,
) -> None:
    shutil.rmtree(sender.folder)
    with pytest.raises(
        TransferFailed, match=r"version-3 cannot be written .*--shm-size\); put it back, then --resume"
    ):
        sender.store({"a": torch.zeros(4)}, 3)


def test_tensors_outlive_their_file(sender: FilesystemSender) -> None:
    got = read(sender.store({"a": torch.arange(5.0)}, 0))
    shutil.rmtree(sender.folder)
    assert got["a"].tolist() == [0, 1, 2, 3, 4]


def test_shared_memory_is_a_folder_one_can_write_to() -> None:
    assert shared_memory().is_dir()
    assert os.access(shared_memory(), os.W_OK)


KILLED = """
import os, signal, sys
from pathlib import Path
from tailrace.drivers.weights import filesystem

filesystem.shared_memory = lambda: Path(sys.argv[1])
(filesystem.FilesystemSender.in_shared_memory().folder / "1.safetensors").write_bytes(b"weights")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_removed_and_what_lives_stays(
    tmp_path: Path, sender: FilesystemSender
) -> None:
    (tmp_path / "of-others").mkdir()
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.glob("*/1.safetensors"))) == 1
    mine = FilesystemSender.in_shared_memory()
    assert {path.name for path in tmp_path.iterdir()} == {"of-others", sender.folder.name, mine.folder.name}
    mine.close()
    assert {path.name for path in tmp_path.iterdir()} == {"of-others", sender.folder.name}
