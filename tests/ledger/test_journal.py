"""The journal: what changed, no more; committed in order, and never on the critical path."""

import asyncio
import gc
import weakref
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, get_ident

import pytest

from helpers.memory_store import MemoryStore, commit_at_once
from helpers.virtual import EXACT, SETTINGS, Book, Outcome, change, simulate
from tailrace import clock
from tailrace.errors import LedgerError
from tailrace.ledger.base import CheckpointRow, GroupRow, LedgerRow, Origin, SampleRow, TokensRow, Transaction
from tailrace.ledger.journal import Journal, commits_on_thread
from tailrace.ledger.ledger import Ledger
from tailrace.ledger.recovery import first_life, totals_of
from tailrace.ledger.store import Store, read_ledger
from tailrace.record.events import Recorder, Stepped
from tailrace.schedules.serial import serial
from tailrace.types import Group, Prompt, Sample, SampleId, Span, Turn


class Cuts(MemoryStore):
    """Keeps the cuts too."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: list[Transaction] = []

    def commit(self, cut: Transaction) -> None:
        super().commit(cut)
        self.cuts.append(cut)


class Full(MemoryStore):
    """Takes so many cuts."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def commit(self, cut: Transaction) -> None:
        if self.room == 0:
            raise LedgerError("ledger cannot be written (disk full); make room on the disk, then --resume")
        self.room -= 1
        super().commit(cut)


def followed(store: Store) -> tuple[Journal, Ledger]:
    """A ledger, and the journal that commits its changes to the store at once."""
    starting_point = first_life()
    journal = Journal(partial(commit_at_once, store), starting_point, flush_s=1.0)
    ledger = Ledger(Recorder(), starting_point.totals, journal)
    journal.follow(ledger)
    return journal, ledger


def drawn(ledger: Ledger, *, in_episode: bool = False) -> Sample:
    """The only sample of a group that was drawn."""
    group = Group(Prompt(0, [1]), 1, [], num_launched=1)
    group.samples = [Sample(SampleId(0, 0, 0), group, in_episode=in_episode)]
    ledger.draw(group)
    return group.samples[0]


def verified_in(folder: Path) -> tuple[Store, Journal, Ledger, Sample]:
    """A store on the disk, and a sample whose verifications its ledger records."""
    store = Store.create(folder / "ledger.sqlite")
    store.commit(first_life().opening)
    journal, ledger = followed(store)
    sample = drawn(ledger)
    sample.group.on_verified = ledger.verify
    return store, journal, ledger, sample


@pytest.mark.virtual
async def test_a_cut_holds_what_changed_and_only_the_tokens_gained() -> None:
    store = Cuts()
    journal, ledger = followed(store)
    group = Group(Prompt(0, [1]), 2, [], num_launched=2)
    group.samples = [Sample(SampleId(0, 0, number), group) for number in range(2)]
    ledger.draw(group)
    await journal.finish()
    group.samples[1].extend([5, 6], [-0.5, -0.25], 0)
    await journal.finish()
    group.samples[1].extend([7], [-1.0], 0)
    group.deferrals += 1
    await journal.finish()
    await journal.finish()
    kinds = [[type(row).__name__ for row in cut.rows] for cut in store.cuts]
    assert kinds == [
        ["RunRow", "GroupRow", "SampleRow", "SampleRow"],
        ["SampleRow", "TokensRow"],
        ["GroupRow", "SampleRow", "TokensRow"],
    ]
    gained = store.cuts[2].rows[2]
    assert isinstance(gained, TokensRow) and (gained.start, len(gained.ids)) == (2, 4)


@pytest.mark.virtual
async def test_wasted_tokens_are_removed_and_their_number_stays() -> None:
    store = Cuts()
    journal, ledger = followed(store)
    sample = drawn(ledger)
    sample.extend([5, 6], [-0.5, -0.25], 0)
    await journal.finish()
    ledger.waste(sample, "low ess")
    await journal.finish()
    assert store.cuts[-1].pruned == [sample.id] and store.rows(TokensRow) == []
    rows: list[LedgerRow] = store.rows(SampleRow)
    assert isinstance(rows[0], SampleRow)
    assert (rows[0].num_tokens, rows[0].fate, rows[0].pruned) == (2, "low ess", True)


@pytest.mark.virtual
@pytest.mark.parametrize("commits_between", [True, False], ids=["apart", "in one commit"])
async def test_tokens_of_a_verified_sample_are_written_anew_and_those_that_changed_are_counted(
    tmp_path: Path, commits_between: bool
) -> None:
    store, journal, ledger, sample = verified_in(tmp_path)
    for ids in ([5, 6], [7, 8]):
        sample.extend(ids, [-0.5, -0.25], 0)
        await journal.finish() if commits_between else journal._collect_changes()
    sample.verify(3, 1, [-1.0, -2.0, -3.0])
    sample.extend([9], [-4.0], 1)
    await journal.finish()
    books = read_ledger(store)
    (row,) = [each for each in books.samples.values() if each.fate is None]
    assert row.spans == [Origin(1, 1, 4)]
    (tokens,) = books.tokens[sample.id]
    assert array("i", tokens.ids).tolist() == [5, 6, 7, 9]
    assert array("f", tokens.logprobs).tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert totals_of(books).wasted_tokens == ledger.totals.wasted_tokens == {"changed": 1}
    ledger.waste(sample, "low ess")
    await journal.finish()
    assert totals_of(read_ledger(store)).wasted_tokens == {"changed": 1, "low ess": 4}
    assert read_ledger(store).tokens == {}


@pytest.mark.virtual
async def test_a_sample_that_is_verified_after_its_group_discarded_it_is_written_anew_too(
    tmp_path: Path,
) -> None:
    """Its abort is under way. Else a kill would leave its old length and the tokens that it has lost."""
    store, journal, _, sample = verified_in(tmp_path)
    sample.extend([5, 6, 7, 8], [-0.5] * 4, 0)
    await journal.finish()
    sample.group.samples.remove(sample)
    sample.verify(1, 1, [-1.0])
    await journal.finish()
    books = read_ledger(store)
    assert (totals_of(books).num_known_tokens, books.held_tokens) == (3, 1)
    assert [array("i", tokens.ids).tolist() for tokens in books.tokens[sample.id]] == [[5]]


@pytest.mark.virtual
async def test_what_was_trained_is_not_kept_in_memory_and_two_marks_later_not_in_the_store(
    tmp_path: Path,
) -> None:
    store = Store.create(tmp_path / "ledger.sqlite")
    journal, ledger = followed(store)
    for step in range(1, 201):
        group = Group(Prompt(step, [1]), 1, [], num_launched=1)
        sample = Sample(SampleId(step, 0, 0), group, finish_reason="stop", text="text " * 100)
        group.samples = group.kept = [sample]
        ledger.draw(group)
        sample.extend([5, 6], [-0.5, -0.25], 0)
        ledger.train([sample], step)
        await journal.finish()
        if step == 1:
            after_one = size_of(journal)
    assert size_of(journal) <= after_one
    assert len(store.rows(TokensRow)) == 200, "a resume without a checkpoint trains all of them again"
    await journal.commit_checkpoint(CheckpointRow(1, 1, 0, 150, "round_000001", []))
    assert len(store.rows(TokensRow)) == 200, "the newest checkpoint may be damaged"
    await journal.commit_checkpoint(CheckpointRow(1, 2, 0, 200, "round_000002", []))
    assert [row.prompt for row in store.rows(TokensRow)] == list(range(151, 201))
    assert [row.prompt for row in store.rows(SampleRow) if not row.pruned] == list(range(151, 201))
    assert {row.text for row in store.rows(SampleRow) if row.pruned} == {""}


def size_of(journal: Journal) -> int:
    """How many things its containers hold."""
    return sum(len(held) for held in vars(journal).values() if isinstance(held, (list, dict, set)))


def test_the_round_in_which_a_group_was_drawn_is_told(tmp_path: Path) -> None:
    book = Book()
    simulate(partial(serial, groups_per_round=4, groups_per_step=2), SETTINGS, book=book, folder=tmp_path)
    rounds = [row.round for row in book.store.rows(GroupRow) if isinstance(row, GroupRow)]
    assert rounds == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_store_that_is_full_ends_the_run_with_its_error(room: int, tmp_path: Path) -> None:
    """room: the first cut opens the life."""
    outcome = Outcome()
    with pytest.raises(LedgerError, match="disk full"):
        simulate(
            partial(serial, groups_per_round=4, groups_per_step=2),
            change(SETTINGS, rounds=100),
            EXACT,
            book=Book(store=Full(room)),
            folder=tmp_path,
            into=outcome,
        )
    assert len(outcome.of(Stepped)) < 10


async def test_a_thread_commits_while_the_loop_goes_on() -> None:
    class Slow(Cuts):
        def __init__(self) -> None:
            super().__init__()
            self.threads: set[int] = set()
            self.go_on = Event()

        def commit(self, cut: Transaction) -> None:
            self.go_on.wait()
            self.threads.add(get_ident())
            super().commit(cut)

    store = Slow()
    with commits_on_thread(store) as commit:
        first, second = (
            commit(Transaction([])),
            commit(Transaction([GroupRow(0, 1, 0, 1, 1, 0, 0, [], None)])),
        )
        await asyncio.sleep(0)
        assert not first.done() and store.cuts == []
        store.go_on.set()
        await asyncio.gather(first, second)
    assert [len(cut.rows) for cut in store.cuts] == [0, 1]
    assert get_ident() not in store.threads and len(store.threads) == 1


@pytest.mark.virtual
async def test_each_change_of_an_episode_is_written() -> None:
    """A turn ends, a call begins, it answers, the environment's tokens follow, the episode ends."""
    store = Cuts()
    journal, ledger = followed(store)
    sample = drawn(ledger, in_episode=True)
    sample.extend([5, 6], [-0.5, -0.25], 0)
    sample.finish_reason = "stop"
    await journal.finish()
    turn = Turn(2, "stop", text="56")

    async def written(change: Callable[[], object]) -> SampleRow:
        change()
        await journal.finish()
        (row,) = store.cuts[-1].rows
        assert isinstance(row, SampleRow) and row.turns == sample.turns
        return row

    num_cuts = len(store.cuts)
    rows = [
        await written(lambda: sample.turns.append(turn)),
        await written(lambda: turn.results.append(None)),
        await written(lambda: turn.results.__setitem__(0, "7")),
        await written(lambda: turn.observation_ids.extend([8, 9])),
        await written(lambda: setattr(sample, "in_episode", False)),
    ]
    assert [row.in_episode for row in rows] == [True, True, True, True, False]
    await journal.finish()
    assert len(store.cuts) == num_cuts + 5, "nothing changed after that"
    ledger.waste(sample, "low ess")
    await journal.finish()
    (last,) = store.rows(SampleRow)
    assert isinstance(last, SampleRow) and last.pruned and last.turns == []


@pytest.mark.virtual
async def test_versions_that_are_corrected_after_a_commit_are_written() -> None:
    """The last chunk of an aborted request may only say which versions generated the tokens before it."""
    store = Cuts()
    journal, ledger = followed(store)
    sample = drawn(ledger)
    sample.extend([5] * 10, [-0.5] * 10, 7)
    await journal.finish()
    sample.attribute(0, [Span(3, 6), Span(7, 4)])
    await journal.finish()
    (row,) = store.rows(SampleRow)
    assert isinstance(row, SampleRow)
    assert row.spans == [Origin(1, 3, 6), Origin(1, 7, 4)]
    assert [type(row) for row in store.cuts[-1].rows] == [SampleRow], "no token is written twice"


class Text(str):
    """A text that can be found out to be forgotten."""


@pytest.mark.virtual
async def test_what_was_trained_and_committed_is_not_kept_in_memory() -> None:
    """Also in a run without checkpoints, where all tokens stay in the store."""

    class Forgetful(MemoryStore):
        def commit(self, cut: Transaction) -> None:
            """Keep nothing."""

    journal, ledger = followed(Forgetful())
    texts = []
    for index in range(3):
        group = Group(Prompt(index, [1]), 1, [], num_launched=1)
        sample = Sample(SampleId(index, 0, 0), group, text=Text("a long response"))
        group.samples = group.kept = [sample]
        texts.append(weakref.ref(sample.text))
        ledger.draw(group)
        sample.extend([5, 6], [-0.5, -0.25], 0)
        ledger.train([sample], index + 1)
        await journal.finish()
    del group, sample
    gc.collect()
    assert [text() for text in texts] == [None] * 3


@pytest.mark.virtual
async def test_those_who_wait_for_the_same_moment_share_a_commit() -> None:
    book = Book(store=Cuts(), commit_s=1.0)
    starting_point = first_life()
    journal = book.open(starting_point)
    ledger = Ledger(Recorder(), starting_point.totals, journal)
    journal.follow(ledger)

    def draw(prompt: int) -> None:
        ledger.draw(Group(Prompt(prompt, [1]), 1, [], num_launched=1))

    draw(0)
    first = [asyncio.create_task(journal.written()) for _ in range(3)]
    await asyncio.sleep(0.5)
    draw(1)  # while the first commit is under way
    second = [asyncio.create_task(journal.written()) for _ in range(3)]
    await asyncio.wait(first)
    assert clock.now() == 1.0
    await asyncio.wait(second)
    assert clock.now() == 2.0
    assert isinstance(book.store, Cuts)
    drawn = [[row.prompt for row in cut.rows if isinstance(row, GroupRow)] for cut in book.store.cuts]
    assert drawn[-2:] == [[0], [1]]


@pytest.mark.virtual
async def test_a_store_that_is_full_is_an_error_for_those_who_wait() -> None:
    starting_point = first_life()
    journal = Journal(partial(commit_at_once, Full(0)), starting_point, flush_s=1.0)
    ledger = Ledger(Recorder(), starting_point.totals, journal)
    journal.follow(ledger)
    ledger.draw(Group(Prompt(0, [1]), 1, [], num_launched=1))
    with pytest.raises(LedgerError, match="disk full"):
        await journal.written()
