"""The count of tokens that samples gained, which a kill cannot take."""

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.contracts.engine import TokenCounter, count_in, counted_tokens
from tailrace.errors import LedgerError

KILLED = """
import os, signal, sys, time
from pathlib import Path
from tailrace.contracts.engine import TokenCounter
for number in range(100):
    path = Path(sys.argv[1]) / f"engine-{number}-1.count"
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        counter = TokenCounter(path)
        while True:
            counter.add(1000)
    while not (path.exists() and any(path.read_bytes())):
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
"""A hundred counters, each killed while it counts."""


def test_a_count_survives_sigkill_whole_and_the_next_one_goes_on_from_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True)
    counts = [count_in(path.read_bytes()) for path in tmp_path.iterdir()]
    assert len(counts) == 100 and min(counts) >= 1000
    TokenCounter(tmp_path / "engine-0-1.count").add(5)
    assert counted_tokens(tmp_path) == sum(counts) + 5


def test_counts_of_all_engines_and_lives_are_one_sum(tmp_path: Path) -> None:
    assert counted_tokens(tmp_path / "counts") == 0
    for number in range(3):
        TokenCounter(tmp_path / "counts" / f"engine-{number}-1.count").add(10 + number)
    assert counted_tokens(tmp_path / "counts") == 33


def test_a_file_that_is_no_count_is_named(tmp_path: Path) -> None:
    (tmp_path / "engine-0-1.count").write_bytes(b"123")
    with pytest.raises(
        LedgerError, match=r"engine-0-1\.count is damaged \(it has 3 bytes\); put a copy back"
    ):
        counted_tokens(tmp_path)


@pytest.mark.parametrize("bit", range(64))
def test_a_bit_of_a_count_that_flips_is_found(tmp_path: Path, bit: int) -> None:
    path = tmp_path / "engine-0-1.count"
    TokenCounter(path).add(123_456_789)
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"engine-0-1\.count is damaged \(its checksum differs\)"):
        counted_tokens(tmp_path)
