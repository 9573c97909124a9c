"""Signals to real processes: the first one ends a run in order, the second one at once."""

import json
import os
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path

from helpers.processes import worker_of
from helpers.small_run import num_steps, start_training, wait_for_steps
from tailrace.config import load_config
from tailrace.contracts.engine import counted_tokens
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.resumption import opened
from tailrace.ledger.recovery import read_ledger, totals_of
from tailrace.ledger.store import Store


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
    assert "stopping: SIGTERM: saves a checkpoint when the step under way has ended" in terminated.stdout
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


def test_a_second_signal_ends_a_resumed_run_at_once(
    terminated: "subprocess.CompletedProcess[str]", interrupted: Path, tmp_path: Path
) -> None:
    """The trainer is stopped, so that the orderly end cannot come first."""
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


def test_sigint_while_workers_start_ends_well_and_leaves_nothing_in_the_way(config_path: Path) -> None:
    folder = RunFolder(config_path.parent / "out")
    process = start_training(config_path, folder.path)
    while not (folder.path / "logs" / "trainer.log").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    said = "tailrace: SIGINT before training began: there is nothing to save; start the run again"
    assert said_in(err)[-1] == said and "ready" not in err
    with opened(load_config(config_path), folder, resume=False) as (_, start):
        assert start.life == 1


def test_sighup_before_the_start_leaves_no_folder(config_path: Path) -> None:
    """It comes while the file with the reward function is imported."""
    rewards, imported = config_path.parent / "rewards.py", config_path.parent / "imported"
    rewards.write_text(f"import pathlib, time\npathlib.Path({str(imported)!r}).touch()\ntime.sleep(60)\n")
    process = start_training(config_path, config_path.parent / "out")
    while not imported.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGHUP)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 129 and "Traceback" not in err
    assert said_in(err)[1:] == ["tailrace: interrupted; nothing was saved"]
    assert not (config_path.parent / "out").exists()
