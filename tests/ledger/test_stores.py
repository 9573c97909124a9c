"""The store: what was committed is read, whole cuts only, and what is wrong is said with its remedy."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.errors import ConfigError, LedgerError
from tailrace.ledger.base import (
    FORMAT,
    CheckpointRow,
    GroupRow,
    LedgerRow,
    LedgerSettings,
    LifeRow,
    Origin,
    RunRow,
    SampleRow,
    TokensRow,
    TrainingRow,
    Transaction,
)
from tailrace.ledger.store import Store, create_store, has_begun, has_trained, open_store, read_ledger
from tailrace.types import SampleId, Turn

TWO = b"\x01\x00\x00\x00\x02\x00\x00\x00"
ROWS = [
    RunRow(FORMAT, 1, 5),
    LifeRow(1, 0, 0, 0, 0, 0, '{"run":{"seed":3}}'),
    CheckpointRow(1, 2, 2, 4, "round_000002", [0]),
    GroupRow(0, 1, 0, 2, 2, 0, 1, [1], None),
    SampleRow(0, 0, 0, [Origin(1, 0, 2)], None, "", None, None, None),
    SampleRow(
        *(0, 0, 1, [Origin(1, 0, 2), Origin(1, 1, 2)], "stop", "a\n\u00e4", 0.5, None, "trained"),
        turns=[Turn(2, "stop", ["\u00e4"], [7])],
        in_episode=True,
    ),
    TokensRow(0, 0, 0, 0, TWO, TWO),
    TokensRow(0, 0, 1, 0, TWO, TWO),
    TokensRow(0, 0, 1, 2, TWO, TWO),
    TrainingRow(1, 0, 0, 1, 3, 2),
]


def test_what_was_committed_is_what_the_next_life_reads(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "ledger.sqlite")
    store.commit(Transaction(ROWS))
    store.close()
    books = read_ledger(Store.open(tmp_path / "ledger.sqlite"))
    assert books.run == ROWS[0]
    assert list(books.lives.values()) == [ROWS[1]] and books.checkpoints == [ROWS[2]]
    assert books.groups == {0: ROWS[3]}
    assert list(books.samples.values()) == ROWS[4:6]
    assert books.tokens == {SampleId(0, 0, 0): [ROWS[6]], SampleId(0, 0, 1): ROWS[7:9]}
    assert list(books.trainings.values()) == [ROWS[9]]


def test_a_row_replaces_the_one_with_its_key_and_pruned_tokens_are_gone(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "ledger.sqlite")
    store.commit(Transaction(ROWS))
    dropped = GroupRow(0, 1, 0, 2, 2, 0, 1, [1], "dropped", "low ess")
    store.commit(Transaction([dropped], [SampleId(0, 0, 1)]))
    store.close()
    books = read_ledger(Store.open(tmp_path / "ledger.sqlite"))
    assert books.groups == {0: dropped}
    assert list(books.tokens) == [SampleId(0, 0, 0)]


def test_tokens_that_do_not_add_up_are_damage(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "ledger.sqlite")
    store.commit(Transaction([*ROWS, TokensRow(0, 0, 0, 2, TWO, TWO)]))
    with pytest.raises(
        LedgerError, match=r"damaged \(sample 0\.0/0 has 4 tokens stored, and produced 2\); put"
    ):
        read_ledger(store)


def test_turns_that_do_not_fit_the_tokens_are_damage(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "ledger.sqlite")
    turns = [Turn(3, "stop")]
    store.commit(
        Transaction([*ROWS, SampleRow(0, 0, 0, [Origin(1, 0, 2)], None, "", None, None, None, turns=turns)])
    )
    with pytest.raises(
        LedgerError, match=r"damaged \(the turns of sample 0\.0/0 end at \[3\] of 2 tokens\); put"
    ):
        read_ledger(store)


# -- the file ----------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A closed file of some pages."""
    path = tmp_path / "ledger.sqlite"
    store = Store.create(path)
    store.commit(Transaction(ROWS))
    groups = [GroupRow(prompt, 1, 0, 2, 2, 0, 0, [], None) for prompt in range(1, 500)]
    store.commit(Transaction([RunRow(FORMAT, 500, 0), *groups]))
    store.close()
    return path


def test_an_existing_ledger_is_not_overwritten(ledger: Path) -> None:
    before = ledger.read_bytes()
    with pytest.raises(
        LedgerError, match=r"ledger\.sqlite exists; add --resume, or choose another --output-dir"
    ):
        Store.create(ledger)
    assert ledger.read_bytes() == before


def test_a_missing_ledger_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.sqlite is missing; put a copy back"):
        Store.open(tmp_path / "ledger.sqlite")
    assert not (tmp_path / "ledger.sqlite").exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_ledger_is_damaged_and_stays_as_it_is(ledger: Path, share: float) -> None:
    whole = ledger.read_bytes()
    torn = whole[: int(len(whole) * share)]
    ledger.write_bytes(torn)
    with pytest.raises(
        LedgerError, match=r"ledger\.sqlite (is damaged|holds no ledger).*another --output-dir"
    ):
        read_ledger(Store.open(ledger))
    assert ledger.read_bytes() == torn


def test_a_corrupted_ledger_is_damaged_and_stays_as_it_is_or_is_read_as_it_was(ledger: Path) -> None:
    """SQLite looks at its pages and not at the values in them, which a single bit changes: the rows have
    checksums. Part of a page is nothing."""
    whole, chance, found = ledger.read_bytes(), random.Random(0), 0
    books = read_ledger(Store.open(ledger))
    for number in range(300):
        data, place = bytearray(whole), chance.randrange(len(whole))
        if number % 3:
            data[place] ^= 1 << chance.randrange(8)
        else:
            data[place : place + 8] = chance.randbytes(len(data[place : place + 8]))
        ledger.write_bytes(data)
        try:
            assert read_ledger(Store.open(ledger)) == books
        except LedgerError as why:
            assert "put a copy back, or begin a new run in another --output-dir" in str(why)
            assert ledger.read_bytes() == data
            found += 1
    assert found > 60


def test_a_file_that_is_something_else_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"[run]\nrounds = 3\n" * 1000)
    with pytest.raises(LedgerError, match=r"is damaged .*file is not a database"):
        Store.open(path)


def test_a_full_disk_is_an_error_that_undoes_the_cut_and_nothing_else(ledger: Path) -> None:
    store = Store.open(ledger)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    many = [TokensRow(0, 0, 0, place, TWO * 500, TWO * 500) for place in range(2, 99)]
    with pytest.raises(
        LedgerError, match=r"cannot be written \(.*full\); make room on the disk, then --resume"
    ):
        store.commit(Transaction([RunRow(FORMAT, 777, 0), *many]))
    assert read_ledger(store).run.num_drawn == 500
    store.close()
    assert read_ledger(Store.open(ledger)).run.num_drawn == 500


KILLED_WRITER = """
import sys
from pathlib import Path
from tailrace.ledger.base import FORMAT, Transaction, RunRow, GroupRow
from tailrace.ledger.store import Store
store = Store.open(Path(sys.argv[1]))
for n in range(500, 10**9):
    store.commit(Transaction([RunRow(FORMAT, n + 1, 0), GroupRow(n, 1, 0, 2, 2, 0, 0, [], None)]))
    print(n, flush=True)
"""


def test_what_was_committed_before_a_sigkill_is_there_and_cuts_are_whole(ledger: Path) -> None:
    words = [sys.executable, "-c", KILLED_WRITER, str(ledger)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(50):
            last = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    books = read_ledger(Store.open(ledger))
    assert books.run.num_drawn > last
    assert len(books.groups) == books.run.num_drawn


def test_a_ledger_of_another_format_is_refused(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "ledger.sqlite")
    store.commit(Transaction([RunRow(FORMAT + 1, 0, 0)]))
    with pytest.raises(LedgerError, match=r"no ledger that this version of tailrace reads \(format 11\)"):
        read_ledger(store)


# -- what a config names -----------------------------------------------------------------------------


def test_a_run_that_was_kept_nowhere_cannot_be_resumed(tmp_path: Path) -> None:
    settings = LedgerSettings(kind="memory")
    assert create_store(settings, tmp_path) is None
    with pytest.raises(ConfigError, match="the ledger of the run ended with its process; begin a new run"):
        open_store(settings, tmp_path)


# -- runs that never began ---------------------------------------------------------------------------

OPENED = [RunRow(FORMAT, 0, 0), LifeRow(1, 0, 0, 0, 0, 0)]
DRAWN = [RunRow(FORMAT, 1, 0)]
MARKED = [CheckpointRow(1, 0, 0, 0, "round_000000", [])]
STEPPED = [CheckpointRow(1, 1, 1, 4, "round_000001", [])]
TRAINED = [TrainingRow(1, 0, 0, 0, 1, 0)]


@pytest.mark.parametrize(
    ("rows", "begun", "trained"),
    [
        ([], False, False),
        (OPENED, False, False),
        (DRAWN, True, False),
        (MARKED, True, False),
        (STEPPED, True, True),
        ([*DRAWN, *TRAINED], True, True),
    ],
)
def test_a_run_that_drew_prompts_can_be_resumed_and_one_that_trained_is_not_replaced(
    tmp_path: Path, rows: list[LedgerRow], begun: bool, trained: bool
) -> None:
    settings = LedgerSettings()
    assert not has_begun(settings, tmp_path, tmp_path / "checkpoints")
    store = create_store(settings, tmp_path)
    assert store is not None
    store.commit(Transaction([*OPENED, *rows] if rows else []))
    store.close()
    assert has_begun(settings, tmp_path, tmp_path / "checkpoints") == begun
    assert has_trained(settings, tmp_path, tmp_path / "checkpoints") == trained
    if trained:
        with pytest.raises(LedgerError, match="exists; add --resume"):
            create_store(settings, tmp_path)
    else:
        again = create_store(settings, tmp_path)
        assert again is not None and again.rows(LifeRow) == []
        again.close()


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_a_run_with_a_checkpoint_has_begun_whatever_its_ledger_says(tmp_path: Path, kind: str) -> None:
    settings = LedgerSettings.model_validate({"kind": kind})
    (tmp_path / "checkpoints" / "round_000001").mkdir(parents=True)
    assert has_begun(settings, tmp_path, tmp_path / "checkpoints")
    assert has_trained(settings, tmp_path, tmp_path / "checkpoints")


def test_a_ledger_that_was_not_initialised_is_replaced(tmp_path: Path) -> None:
    """What a process leaves that is killed while it creates the file."""
    (tmp_path / "ledger.sqlite").touch()
    assert not has_begun(LedgerSettings(), tmp_path, tmp_path / "checkpoints")
    store = create_store(LedgerSettings(), tmp_path)
    assert store is not None
    store.commit(Transaction(OPENED))
    assert store.rows(RunRow) == OPENED[:1]
    store.close()
