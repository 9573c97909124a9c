"""A run that resumes itself after the death of its trainer."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from small_run import trained_prompts

from tailrace.engine.counter import counted_tokens
from tailrace.ledger.read import read_books
from tailrace.ledger.recovery import held_tokens_of, totals_of
from tailrace.ledger.sqlite import SqliteStore


def test_after_its_trainer_is_killed_a_run_goes_on_from_its_checkpoint_and_the_books_close(
    config_path: Path,
) -> None:
    folder = config_path.parent / "out"
    words = [sys.executable, "-m", "tailrace.cli", "train", str(config_path), "--output-dir", str(folder)]
    overrides = ["--run.rounds", "8", "--host.restarts", "1"]
    with subprocess.Popen(
        [*words, *overrides], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while not (folder / "checkpoints" / "round_000003").exists():
            assert process.poll() is None, "the run ended before its trainer could be killed"
            time.sleep(0.01)
        os.kill(trainer_of(process), signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "trainer (process" in err and "ended: signal SIGKILL" in err
    assert "tailrace: restart 1 of 1" in err
    assert trained_prompts(folder) == {prompt: 2 for prompt in range(32)}
    assert json.loads((folder / "summary.json").read_text())["groups"]["trained"] == 32
    with closing(SqliteStore.open(folder / "ledger.sqlite", only_read=True)) as store:
        books = read_books(store)
    totals = totals_of(books)
    assert len(books.lives) == 2 and books.lives[2].round >= 3 and totals.groups == {"trained": 32}
    assert totals.num_known_tokens + held_tokens_of(books) == counted_tokens(folder / "counts")


def trainer_of(process: "subprocess.Popen[str]") -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (found,) = (pid for pid in children if "trainer_child" in Path(f"/proc/{pid}/cmdline").read_text())
    return int(found)
