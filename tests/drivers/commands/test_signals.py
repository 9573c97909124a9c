"""Signals to real processes: the first one ends a run in order, the second one at once."""

import json
import os
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from helpers.processes import children_of, worker_of
from helpers.small_run import num_steps, start_training, train_here, wait_for_steps, write_small_run
from tailrace.config import load_config
from tailrace.contracts.engine import counted_tokens
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.resumption import opened
from tailrace.drivers.assembly.running import STOPPING
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import Store, read_ledger


@pytest.fixture(scope="module")
def terminated(tmp_path_factory: pytest.TempPathFactory) -> "subprocess.CompletedProcess[str]":
    """A run in `out`, beside its config, that SIGTERM ended in its first round. The signal went to its
    workers, to its process group and, as from GNU timeout, once more to itself."""
    config = write_small_run(tmp_path_factory.mktemp("terminated"))
    folder = config.parent / "out"
    process = start_training(config, folder)
    wait_for_steps(folder, 3, process)
    children = children_of(process.pid)
    for pid in [*children, *(worker for child in children for worker in children_of(child))]:
        os.kill(pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([str(folder)], process.returncode, out, err)


@pytest.fixture(scope="module")
def interrupted(terminated: "subprocess.CompletedProcess[str]") -> Path:
    """The output directory of that run. Tests only read it."""
    return Path(terminated.args[0])


def said_in(err: str) -> list[str]:
    """The messages that follow the table of what the run takes from the machine."""
    return [line for line in err.splitlines() if line.startswith("tailrace: ")]


def test_sigterm_saves_the_weights_and_says_where(
    terminated: "subprocess.CompletedProcess[str]", interrupted: Path
) -> None:
    """It came to the process group and to every worker."""
    assert terminated.returncode == 143
    steps = num_steps(interrupted)
    checkpoint = interrupted / "checkpoints" / f"round_000000_step_{steps:06d}"
    assert RunFolder(interrupted).newest_checkpoint() == checkpoint
    saved = f"saved {checkpoint}, its model in {interrupted / 'model'}"
    *before, said = said_in(terminated.stderr)
    assert "tailrace: reward: digits (weight 1): tailrace's signature, given completion" in before
    assert before[-1].startswith("tailrace: the workers are ready after ")
    assert said == f"tailrace: SIGTERM: {saved}; --resume continues from there"
    assert f"stopping: {STOPPING.format('SIGTERM')}" in terminated.stdout
    assert json.loads((interrupted / "summary.json").read_text())["steps"] == steps
    assert b'"BooksClosed"' in (interrupted / "events.jsonl").read_bytes()


def test_the_ledger_of_an_interrupted_run_knows_every_token(interrupted: Path) -> None:
    with closing(Store.open(interrupted / "ledger.sqlite", only_read=True)) as store:
        books = read_ledger(store)
    totals = totals_of(books)
    assert totals.num_known_tokens + books.held_tokens == counted_tokens(interrupted / "counts")
    assert len(books.groups) == 128 and set(totals.wasted_tokens) == set()
    steps = num_steps(interrupted)
    assert totals.groups == {"trained": 2 * steps}
    (row,) = books.checkpoints
    assert (row.round, row.version, row.step) == (0, 1, steps)


@pytest.mark.slow  # tests/drivers/assembly/test_signals_received.py sends the same to a process without torch
def test_a_second_signal_ends_a_resumed_run_at_once(
    terminated: "subprocess.CompletedProcess[str]", interrupted: Path, tmp_path: Path
) -> None:
    """The trainer is stopped, so that the orderly end cannot come first. SIGTERM is no second signal: Slurm
    repeats it at the end of the grace time."""
    folder = tmp_path / "out"
    subprocess.run(["cp", "-r", interrupted, folder], check=True)
    before = num_steps(folder)
    process = start_training(interrupted.parent / "run.toml", folder, "--resume")
    wait_for_steps(folder, before + 2, process)
    trainer = worker_of(process.pid, "trainer")
    os.kill(trainer, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)  # the same request: it came twice
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGHUP)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 129
    said = "SIGHUP again: ended at once, and nothing more is saved; --resume continues from the newest"
    assert said_in(err)[-1] == f"tailrace: {said} checkpoint" and "leaked" not in err
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)), "the steps before the interruption are still there"
    with closing(Store.open(folder / "ledger.sqlite", only_read=True)) as store:
        assert len(read_ledger(store).lives) == 2


INTERRUPTS = """
import os, time
from pathlib import Path

if (os.getpid() == {controller}) == {in_controller}:
    try:
        Path(__file__).with_name("interrupted").mkdir()
    except FileExistsError:
        pass
    else:
        os.kill({controller}, {number})
    time.sleep(60)

def digits(completion):
    return 1.0
"""
"""A file with a reward function that sends a signal to the run that imports it."""


def test_sigint_while_workers_start_ends_well_and_leaves_nothing_in_the_way(
    config_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rewards = config_path.parent / "rewards.py"
    whole, number = rewards.read_text(), int(signal.SIGINT)
    rewards.write_text(INTERRUPTS.format(controller=os.getpid(), in_controller=False, number=number))
    assert train_here(config_path) == 130
    err = capfd.readouterr().err
    said = "tailrace: SIGINT before training began: there is nothing to save; start the run again"
    assert said_in(err)[-1] == said and "ready" not in err
    rewards.write_text(whole)
    folder = RunFolder(config_path.parent / "out")
    with opened(load_config(config_path), folder, resume=False) as (_, start):
        assert start.life == 1


def test_sigterm_before_the_start_leaves_no_folder(
    config_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It comes while the file with the reward function is imported."""
    number = int(signal.SIGTERM)
    (config_path.parent / "rewards.py").write_text(
        INTERRUPTS.format(controller=os.getpid(), in_controller=True, number=number)
    )
    assert train_here(config_path) == 143
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert said_in(err)[1:] == ["tailrace: interrupted; nothing was saved"]
    assert not (config_path.parent / "out").exists()
