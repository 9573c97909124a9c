"""A run that resumes itself after the death of its trainer."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from small_run import EXAMPLES, trained_prompts

from helpers.processes import worker_of
from tailrace.engine.base import counted_tokens
from tailrace.ledger.recovery import held_tokens_of, read_books, totals_of
from tailrace.ledger.sqlite import SqliteStore


def test_after_its_trainer_is_killed_while_it_writes_a_checkpoint_a_run_goes_on_from_the_one_before(
    config_path: Path,
) -> None:
    """A tokenizer file of 2 GiB, which is copied to a checkpoint, gives the time for the kill."""
    folder, model = config_path.parent / "out", config_path.parent / "model"
    shutil.copytree(EXAMPLES / "quickstart" / "model", model)
    large = model / "tokenizer_large"
    words = [sys.executable, "-m", "tailrace.cli", "train", str(config_path), "--output-dir", str(folder)]
    overrides = ["--run.rounds", "8", "--host.restarts", "1", "--model.path", str(model)]
    with subprocess.Popen(
        [*words, *overrides], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        trainer = None
        while not (written := [*folder.glob(f"checkpoints/*.partial/{large.name}")]):
            assert process.poll() is None, "the run ended before its trainer could be killed"
            if trainer is None and (folder / "checkpoints" / "round_000002").exists():
                trainer = worker_of(process.pid, "trainer")
                large.touch()
                os.truncate(large, 2**31)
            time.sleep(0.005)
        assert trainer
        os.kill(trainer, signal.SIGKILL)
        large.unlink()
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "trainer (process" in err and "ended: signal SIGKILL" in err
    assert "tailrace: restart 1 of 1" in err
    assert trained_prompts(folder) == {prompt: 2 for prompt in range(32)}
    assert json.loads((folder / "summary.json").read_text())["groups"]["trained"] == 32
    with closing(SqliteStore.open(folder / "ledger.sqlite", only_read=True)) as store:
        books = read_books(store)
    totals = totals_of(books)
    torn = int(written[0].parent.name.removeprefix("round_").removesuffix(".partial"))
    assert len(books.lives) == 2 and books.lives[2].round == torn - 1 and totals.groups == {"trained": 32}
    assert totals.num_known_tokens + held_tokens_of(books) == counted_tokens(folder / "counts")
