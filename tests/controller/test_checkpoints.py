"""Checkpoints that are written while the run goes on, in virtual time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.slow_disk import SlowDisk
from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, SIM, Book, change, simulate
from tailrace.controller.base import RunComponents
from tailrace.controller.checkpoints import make_room
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.errors import CheckpointError
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import read_ledger
from tailrace.record.events import RoundStarted, Saved, Stepped
from tailrace.sim.trainer import STEPS_FILE, SimTrainer

SERIAL = SCHEDULES_BY_NAME["serial"]
EVERY_ROUND = change(SETTINGS, checkpoint_every=1)
ROUND_S = [event.time_s for event in simulate(SERIAL).of(RoundStarted)]
"""When each round starts if no checkpoint holds it up."""


def slow(write_s: float, fails: str = "") -> Callable[[], RunComponents]:
    return lambda: replace(simulated_parts(SIM, 0), trainer=SlowDisk(SIM.trainer, write_s, fails))


def test_the_run_goes_on_while_a_checkpoint_is_written_and_waits_for_the_last_one(tmp_path: Path) -> None:
    write_s = 0.5 * (ROUND_S[2] - ROUND_S[1])
    run = simulate(SERIAL, EVERY_ROUND, folder=tmp_path, book=Book(), parts=slow(write_s))
    starts = [event.time_s for event in run.of(RoundStarted)]
    assert starts == ROUND_S
    saved = run.of(Saved)
    assert [event.time_s for event in saved[:3]] == [start + write_s for start in starts]
    assert [Path(event.path).name for event in saved] == [f"round_{number:06d}" for number in range(4)]
    assert run.ended_s == saved[-1].time_s == run.of(Stepped)[-1].end_s + write_s
    assert run.ended.checkpoint == tmp_path / "round_000003"


def test_at_most_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    write_s = 3 * ROUND_S[2]
    run = simulate(SERIAL, EVERY_ROUND, folder=tmp_path, parts=slow(write_s))
    assert [event.time_s for event in run.of(Saved)] == [write_s * number for number in range(1, 5)]
    trainer = run.parts.trainer
    assert isinstance(trainer, SlowDisk) and trainer.most_writing == 1


def test_a_run_that_is_killed_while_it_writes_resumes_from_the_checkpoint_before(tmp_path: Path) -> None:
    write_s, book = 0.5 * (ROUND_S[2] - ROUND_S[1]), Book()
    parts = slow(write_s)
    killed_s = ROUND_S[2] + 0.9 * write_s
    simulate(SERIAL, EVERY_ROUND, folder=tmp_path, book=book, parts=parts, kill_at_s=killed_s)
    assert (tmp_path / "round_000002.partial").is_dir()
    resumed = simulate(SERIAL, EVERY_ROUND, folder=tmp_path, book=book, parts=parts)
    assert [event.round for event in resumed.of(RoundStarted)] == [1, 2]
    assert read_ledger(book.store).lives[2].step == 2, "of round 1"
    assert [event.stats.num_steps for event in resumed.of(Stepped)] == [3, 4, 5, 6]


def test_the_mark_has_the_state_of_the_moment_at_which_the_checkpoint_began(tmp_path: Path) -> None:
    pipelinerl, books = SCHEDULES_BY_NAME["pipelinerl"], []
    for number, write_s in enumerate((0.0, 0.8 * (ROUND_S[2] - ROUND_S[1]))):
        book = Book()
        folder = tmp_path / str(number)
        simulate(pipelinerl, EVERY_ROUND, folder=folder, book=book, parts=slow(write_s))
        books.append(read_ledger(book.store))
    assert books[0].checkpoints == books[1].checkpoints


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    book, parts = Book(), slow(0.1, fails="round_000002")
    with pytest.raises(CheckpointError, match=r"round_000002 cannot be written \(no space left\)"):
        simulate(SERIAL, EVERY_ROUND, folder=tmp_path, book=book, parts=parts)
    assert [mark.checkpoint for mark in read_ledger(book.store).checkpoints] == [
        "round_000000",
        "round_000001",
    ]


def test_an_interrupted_run_waits_for_its_checkpoint(tmp_path: Path) -> None:
    write_s, at_s = 10 * ROUND_S[2], ROUND_S[1] + 0.01
    run = simulate(SERIAL, EVERY_ROUND, folder=tmp_path, parts=slow(write_s), interrupt_at_s=at_s)
    assert run.ended.interrupted and run.ended.checkpoint == tmp_path / "round_000001"
    assert run.ended_s == run.of(Saved)[-1].time_s == 2 * write_s


@pytest.mark.parametrize("name", ["serial", "rolloutpipe", "pipelinerl"])
def test_a_run_that_is_preempted_while_it_saves_loses_nothing(name: str, tmp_path: Path) -> None:
    schedule, book = SCHEDULES_BY_NAME[name], Book()
    starts = [event.time_s for event in simulate(schedule).of(RoundStarted)]
    parts, at_s = slow(0.5 * (starts[2] - starts[1])), starts[1] + 0.2 * (starts[2] - starts[1])
    first = simulate(schedule, EVERY_ROUND, folder=tmp_path, book=book, parts=parts, interrupt_at_s=at_s)
    assert first.ended.interrupted and first.of(Saved)[-1].time_s > at_s
    last = simulate(schedule, EVERY_ROUND, folder=tmp_path, book=book, parts=parts)
    books = read_ledger(book.store)
    assert not last.ended.interrupted and len(books.lives) == 2
    assert all(training.undone is None for training in books.trainings.values()), "no step is undone"
    totals = totals_of(books)
    assert totals.num_known_tokens + books.held_tokens == book.num_generated
    assert "crash" not in totals.wasted_tokens


async def test_copies_of_a_user_and_links_are_no_old_checkpoints(tmp_path: Path) -> None:
    kept = [
        "round_000001_best",
        "round_000002.partial.bak",
        "round_000003.bak",
        "round_1",
        "round_notes.partial",
    ]
    for name in [*kept, "round_000001", "round_000002_step_000003", "round_000009.partial", "round_000003"]:
        (tmp_path / name).mkdir()
    (tmp_path / "round_000000").symlink_to("round_000001_best")
    settings = change(SETTINGS, keep_checkpoints=1)
    await make_room(SimTrainer(SIM.trainer), tmp_path / "round_000003", settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "round_000000", "round_000003"])


@pytest.mark.parametrize(
    ("keep", "optimizer", "models", "states"),
    [
        (2, 1, [5, 6], [6]),
        (2, 2, [5, 6], [5, 6]),
        (1, 1, [6], [6]),
        (9, 1, [1, 2, 3, 4, 5, 6], [6]),
        (9, 8, [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]),
        (0, 1, [0, 1, 2, 3, 4, 5, 6], [6]),
        (0, 0, [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_newest_checkpoints_keep_the_optimizer_and_the_untrained_start_goes(
    keep: int, optimizer: int, models: list[int], states: list[int], tmp_path: Path
) -> None:
    settings = change(EVERY_ROUND, rounds=6, keep_checkpoints=keep, keep_optimizer=optimizer)
    simulate(SERIAL, settings, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"round_{each:06d}" for each in models]
    found = sorted(path.parent.name for path in tmp_path.glob(f"*/{STEPS_FILE}"))
    assert found == [f"round_{each:06d}" for each in states]


def test_the_untrained_start_is_not_kept_as_the_best(tmp_path: Path) -> None:
    settings = change(EVERY_ROUND, rounds=1, eval_every=1, eval_prompts=4)
    simulate(SERIAL, settings, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["round_000001"]
