"""A run that resumes itself after the death of its trainer."""

import json
import os
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from helpers.processes import worker_of
from helpers.small_run import EXAMPLES, train_here, trained_prompts, wait_for_steps
from tailrace.contracts.engine import counted_tokens
from tailrace.ledger.recovery import read_ledger, totals_of
from tailrace.ledger.store import Store


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
