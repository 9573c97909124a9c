"""A run that goes on by itself after the death of its trainer: resumed, or with its engines as they are."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from helpers.processes import worker_of, workers_of
from helpers.small_run import EXAMPLES, train_here, trained_prompts, wait_for_steps, write_small_run
from tailrace.contracts.engine import counted_tokens
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import Store, read_ledger


def test_after_its_trainer_is_killed_while_it_writes_a_checkpoint_a_run_goes_on_from_the_one_before(
    config_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer file of 2 GiB, which is copied to a checkpoint, gives the time for the kill."""
    folder, model = config_path.parent / "out", config_path.parent / "model"
    shutil.copytree(EXAMPLES / "quickstart" / "model", model)
    large, written = model / "tokenizer_large", list[Path]()

    def kill_while_it_writes() -> None:
        wait_for_steps(folder, 5)
        trainer = worker_of(os.getpid(), "trainer")
        large.touch()
        os.truncate(large, 2**31)
        end_s = time.monotonic() + 60
        while not (found := [*folder.glob(f"checkpoints/*.partial/{large.name}")]):
            assert time.monotonic() < end_s
            time.sleep(0.005)
        written.extend(found)
        os.kill(trainer, signal.SIGKILL)
        large.unlink()

    words = ("--run.rounds", "8", "--host.restarts", "1", "--model.path", str(model))
    assert train_here(config_path, *words, meanwhile=kill_while_it_writes) == 0
    err = capfd.readouterr().err
    assert "trainer (process" in err and "ended: signal SIGKILL" in err
    assert "tailrace: restart 1 of 1" in err
    assert trained_prompts(folder) == {prompt: 2 for prompt in range(32)}
    assert json.loads((folder / "summary.json").read_text())["groups"]["trained"] == 32
    with closing(Store.open(folder / "ledger.sqlite", only_read=True)) as store:
        books = read_ledger(store)
    totals = totals_of(books)
    torn = int(written[0].parent.name.removeprefix("round_").removesuffix(".partial"))
    assert len(books.lives) == 2 and books.lives[2].round == torn - 1 and totals.groups == {"trained": 32}
    assert totals.num_known_tokens + books.held_tokens == counted_tokens(folder / "counts")


def killing(*at_steps: int) -> Callable[[Path], None]:
    """Kill the trainer after so many steps, each time a new process of it."""

    def kill(folder: Path) -> None:
        killed: set[int] = set()
        for steps in at_steps:
            wait_for_steps(folder, steps)
            end_s = time.monotonic() + 60
            while not (alive := workers_of(os.getpid(), "trainer") - killed):
                assert time.monotonic() < end_s
                time.sleep(0.005)
            os.kill(process := alive.pop(), signal.SIGKILL)
            killed.add(process)

    return kill


@pytest.mark.slow
def test_a_trainer_that_is_killed_starts_again_beside_its_engines_and_the_weights_have_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed between two checkpoints, twice. `serial` trains what a seed and the weights fix."""
    words = ("--run.rounds", "9", "--run.checkpoint_every", "4", "--trainer.restarts", "2")
    found = []
    for number, kill in enumerate((killing(), killing(3, 11))):
        (here := tmp_path / str(number)).mkdir()
        config, folder = write_small_run(here), here / "out"
        config.write_text(config.read_text().replace('"rolloutpipe"', '"serial"'))
        assert train_here(config, *words, meanwhile=partial(kill, folder)) == 0
        summary = json.loads((folder / "summary.json").read_text())
        with closing(Store.open(folder / "ledger.sqlite", only_read=True)) as store:
            books = read_ledger(store)
        assert len(books.lives) == 1 and totals_of(books).groups == {"trained": 36}
        assert trained_prompts(folder) == {prompt: 2 for prompt in range(36)}
        engines = [line for line in (folder / "events.jsonl").read_text().splitlines() if "dead" in line]
        assert engines == [], "the engine has gone on"
        found.append((summary["ettr"], (folder / "model" / "model.safetensors").read_bytes()))
    err = capfd.readouterr().err
    assert err.count("ended: signal SIGKILL") == 2 and "tailrace: restart 2 of 2" in err
    assert found[0][1] == found[1][1]
    assert found[0][0] > found[1][0] > 0


def test_a_run_goes_on_whose_trainer_and_engine_are_killed_at_once(
    config_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config_path.write_text(config_path.read_text().replace('"rolloutpipe"', '"serial"'))
    folder = config_path.parent / "out"

    def kill_both() -> None:
        wait_for_steps(folder, 4)
        for name in ("trainer", "engine-0"):
            os.kill(worker_of(os.getpid(), name), signal.SIGKILL)

    words = ("--run.rounds", "8", "--trainer.restarts", "1", "--engine.recovery_timeout_s", "30")
    assert train_here(config_path, *words, meanwhile=kill_both) == 0
    output = "".join(capfd.readouterr())
    assert "tailrace: restart 1 of 1" in output and "engine-0 is open: it was restarted" in output
    assert trained_prompts(folder) == {prompt: 2 for prompt in range(32)}


def test_a_trainer_that_dies_too_often_ends_the_run_with_the_cause(
    config_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kill = partial(killing(1, 3), config_path.parent / "out")
    words = ("--run.rounds", "8", "--trainer.restarts", "1")
    assert train_here(config_path, *words, meanwhile=kill) != 0
    err = capfd.readouterr().err
    assert "tailrace: restart 1 of 1" in err and err.count("ended: signal SIGKILL") == 2


@pytest.mark.parametrize("other", ["--weights.transport process_group", "--placement.kind colocated"])
def test_a_trainer_that_would_not_start_again_beside_its_engines_is_refused(
    config_path: Path, capfd: pytest.CaptureFixture[str], other: str
) -> None:
    assert train_here(config_path, "--trainer.restarts", "1", *other.split()) == 2
    err = capfd.readouterr().err
    assert 'trainer.restarts = 1: it needs placement.kind = "disaggregated", and no weights.transport' in err


def test_a_trainer_that_would_repeat_the_whole_run_is_refused(
    config_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train_here(config_path, "--trainer.restarts", "1", "--run.checkpoint_every", "0") == 2
    assert "trainer.restarts = 1: with run.checkpoint_every = 0" in capfd.readouterr().err
    assert not (config_path.parent / "out").exists()
