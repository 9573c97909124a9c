"""The engines' own count of tokens, which a kill cannot take."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.errors import LedgerError
from tailrace.workers.counter import TokenCounter, counted_tokens

KILLED = """
import sys
from pathlib import Path
from tailrace.workers.counter import TokenCounter
counter = TokenCounter(Path(sys.argv[1]))
for n in range(1, 10**9):
    counter.set(n)
    if n == 1000:
        print("counted", flush=True)
"""


def test_a_count_survives_sigkill_and_the_next_one_goes_on_from_it(tmp_path: Path) -> None:
    path = tmp_path / "engine-0-1.count"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    counted = counted_tokens(tmp_path)
    assert counted >= 1000
    TokenCounter(path).set(5)
    assert counted_tokens(tmp_path) == counted + 5


def test_counts_of_all_engines_and_lives_are_one_sum(tmp_path: Path) -> None:
    assert counted_tokens(tmp_path / "counts") == 0
    for number in range(3):
        TokenCounter(tmp_path / "counts" / f"engine-{number}-1.count").set(10 + number)
    assert counted_tokens(tmp_path / "counts") == 33


def test_a_file_that_is_no_count_is_named(tmp_path: Path) -> None:
    (tmp_path / "engine-0-1.count").write_bytes(b"123")
    with pytest.raises(LedgerError, match=r"engine-0-1\.count is damaged; put a copy back"):
        counted_tokens(tmp_path)
