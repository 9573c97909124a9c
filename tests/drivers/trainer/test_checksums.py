"""Checkpoints that keep their model and give up the state of the optimizer."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from tailrace.drivers.trainer import checksums
from tailrace.drivers.trainer.checksums import CHECKSUMS_FILE, is_retired, remedy, retire, seal, verify
from tailrace.errors import CheckpointError

STATE = ("trainer/shard-1.safetensors", "trainer/shard-2.safetensors")


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"round_{step:06d}"
    (path / "trainer").mkdir(parents=True)
    for name in ("model.safetensors", *STATE):
        (path / name).write_bytes(f"{name} {step}".encode())
    seal(path, step)
    return path


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)


def test_an_older_checkpoint_keeps_its_model_and_is_whole_without_its_state(pair: tuple[Path, Path]) -> None:
    older, newest = pair
    retire([older], newest)
    retire([older], newest)
    assert names(older) == [CHECKSUMS_FILE, "model.safetensors"]
    assert verify(older, "", step=1) and is_retired(older)
    assert {*STATE} < {*names(newest)} and not is_retired(newest)


@pytest.mark.parametrize("call", ["write_bytes", "replace", "unlink", "rmdir"])
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_is_whole(call: str, pair: tuple[Path, Path]) -> None:
    older, newest = pair
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, call, Mock(side_effect=KeyboardInterrupt))
        retire([older], newest)
    assert verify(older, "", step=1)
    assert is_retired(older) == (call in ("unlink", "rmdir"))
    assert is_retired(older) or {*STATE} < {*names(older)}
    retire([older], newest)
    assert not (older / "trainer").exists() and is_retired(older) and verify(older, "", step=1)


def test_nothing_goes_while_the_newest_one_is_damaged(pair: tuple[Path, Path]) -> None:
    older, newest = pair
    (newest / STATE[0]).write_bytes(b"0")
    with pytest.raises(CheckpointError, match=f"remove {newest} and resume again: .* from {older.name}$"):
        retire([older], newest)
    assert {*STATE} < {*names(older)}


def test_what_a_run_did_not_write_stays(pair: tuple[Path, Path], tmp_path: Path) -> None:
    older, newest = pair
    (older / "trainer" / "notes.txt").write_text("mine")
    unsealed, linked, mine = (checkpoint(tmp_path / name, 1) for name in ("unsealed", "linked", "mine"))
    (unsealed / CHECKSUMS_FILE).unlink()
    for file in (linked / "trainer").iterdir():
        file.unlink()
    (linked / "trainer").rmdir()
    (linked / "trainer").symlink_to(mine / "trainer")
    retire([older, unsealed, linked], newest)
    assert names(older / "trainer") == ["notes.txt"]
    assert {*STATE} < {*names(unsealed)} and {*STATE} < {*names(mine)}


def test_the_remedy_names_a_checkpoint_from_which_the_run_can_go_on(pair: tuple[Path, Path]) -> None:
    older, newest = pair
    assert remedy(newest) == f"remove {newest} and resume again: the run goes on from {older.name}"
    retire([older], newest)
    weights = f"begin a new run in another --output-dir with --model.path {older}"
    assert remedy(newest) == f"put a copy of it back, or {weights}"
    assert remedy(older) == "put a copy of it back, or begin a new run in another --output-dir"


def test_checksums_of_an_earlier_release_are_read_and_keep_their_form(pair: tuple[Path, Path]) -> None:
    content = (pair[0] / CHECKSUMS_FILE).read_bytes()
    assert b"retired" not in content and checksums.read_checksums(pair[0] / CHECKSUMS_FILE).retired == []
