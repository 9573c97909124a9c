"""Runs that a signal ends in order, in virtual time: what is saved, and how they go on."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from signal import SIGTERM

import pytest

from helpers.slow_disk import SlowDisk
from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, SIM, Book, Outcome, change, simulate
from tailrace.controller.base import RunComponents
from tailrace.controller.run import Run
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.ledger.base import LedgerTables
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import read_ledger
from tailrace.record.events import BooksClosed, Evaluated, Published, RoundStarted, Saved, Stepped
from tailrace.sim.settings import SimEngineSettings, SimLengthSettings, SimTrainerSettings

EVALUATED = ("serial", "rolloutpipe", "rolloutpipe_eager", "conventional", "one_step_off")


def num_steps(folder: Path) -> int:
    return int((folder / "steps.txt").read_text())


def surviving(books: LedgerTables) -> Counter[str]:
    return Counter(str(training.id) for training in books.trainings.values() if training.undone is None)


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_an_interrupted_run_saves_every_step_and_goes_on_without_loss(name: str, tmp_path: Path) -> None:
    schedule, book = SCHEDULES_BY_NAME[name], Book()
    ended_s = simulate(schedule).ended_s
    lives: list[Outcome] = []
    for share in (0.4, 0.1, 0.2):
        life = simulate(schedule, folder=tmp_path, book=book, interrupt_at_s=share * ended_s)
        lives.append(life)
        assert life.ended.interrupted and len(life.of(BooksClosed)) == 1
        books = read_ledger(book.store)
        living = books.held_tokens + books.drafted_tokens
        assert totals_of(books).num_known_tokens + living == book.num_generated
        last_step = max((training.step for training in books.trainings.values()), default=0)
        if last_step:
            assert life.ended.checkpoint and num_steps(life.ended.checkpoint) == last_step
        assert all(training.undone is None for training in books.trainings.values()), "no step is undone"
    last = simulate(schedule, folder=tmp_path, book=book)
    assert not last.ended.interrupted and last.ended.checkpoint
    books = read_ledger(book.store)
    assert set(surviving(books).values()) == {1}, "each sample is trained once"
    assert "crash" not in totals_of(books).wasted_tokens
    steps = [step.stats.num_steps for life in [*lives, last] for step in life.of(Stepped)]
    assert steps == list(range(1, len(steps) + 1)), "the steps go on from one life to the next"


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", ["tailrace_on_policy", "sortedrl", "sortedrl_on_policy"])
def test_a_sorted_batch_that_was_interrupted_takes_as_many_rounds_as_without(
    name: str, share: float, tmp_path: Path
) -> None:
    schedule, settings, book = SCHEDULES_BY_NAME[name], change(SETTINGS, rounds=6), Book()
    ended_s = simulate(schedule, settings).ended_s
    life = simulate(schedule, settings, folder=tmp_path, book=book, interrupt_at_s=share * ended_s)
    last = simulate(schedule, settings, folder=tmp_path, book=book)
    assert len(life.of(Stepped)) + len(last.of(Stepped)) == 6
    assert last.totals.groups["trained"] == 6 * 8
    assert last.run.parked.groups == []


def test_a_checkpoint_within_a_round_is_a_new_version_when_steps_were_made_since_the_publication(
    tmp_path: Path,
) -> None:
    """Responses take 10 s. A step trains 4 groups of 4 responses of 10 tokens and a prompt token: 17.6 s."""
    sim = change(
        SIM,
        engines=SimEngineSettings(
            slots=1000, base_s=1.0, slope_s=0.0, prefill_tokens_per_s=1e30, abort_s=0.0, load_s=0.0
        ),
        trainer=SimTrainerSettings(tokens_per_s=10.0, step_s=0.0),
        lengths=SimLengthSettings(median_tokens=10, sigma=0.0, prompt_tokens=1),
    )
    rolloutpipe, book = SCHEDULES_BY_NAME["rolloutpipe"], Book()
    life = simulate(rolloutpipe, SETTINGS, sim, folder=tmp_path, book=book, interrupt_at_s=45.0)
    steps = len(life.of(Stepped))
    assert steps == 1, "the second one would end at 45.2 s"
    (saved,) = life.of(Saved)
    assert Path(saved.path).name == f"round_000000_step_{steps:06d}"
    assert (saved.round, saved.version) == (0, 1), "version 0 is published; the saved weights are newer"
    (row,) = read_ledger(book.store).checkpoints
    assert (row.round, row.version, row.step, row.partial_rollouts) == (0, 1, steps, [])
    again = simulate(rolloutpipe, SETTINGS, sim, folder=tmp_path, book=book, interrupt_at_s=0.5)
    assert again.ended.checkpoint == Path(saved.path) and not again.of(Saved), "nothing was added to it"
    wasted = totals_of(read_ledger(book.store)).wasted_tokens
    waiting = (16 - 4 * steps) * 4 * 10
    assert wasted == {"interrupted": waiting}, "tokens of version 0 are stale now and are generated again"


def test_before_the_first_step_nothing_is_saved_and_the_tokens_are_kept(tmp_path: Path) -> None:
    serial, book = SCHEDULES_BY_NAME["serial"], Book()
    life = simulate(serial, folder=tmp_path, book=book, interrupt_at_s=1.0)
    assert (life.ended.interrupted, life.ended.checkpoint) == (True, None)
    assert list(tmp_path.iterdir()) == []
    held = read_ledger(book.store).held_tokens
    assert held == book.num_generated > 0
    simulate(serial, folder=tmp_path, book=book)
    assert totals_of(read_ledger(book.store)).wasted_tokens == {}


def test_an_interruption_during_a_step_takes_effect_after_it(tmp_path: Path) -> None:
    slow = change(SIM, trainer=SimTrainerSettings(tokens_per_s=1e9, step_s=1000.0))
    life = simulate(SCHEDULES_BY_NAME["serial"], SETTINGS, slow, folder=tmp_path, interrupt_at_s=700.0)
    assert [step.stats.num_steps for step in life.of(Stepped)] == [1]
    assert life.ended_s > 1000.0
    assert life.ended.checkpoint and num_steps(life.ended.checkpoint) == 1


def test_an_interruption_after_the_schedule_has_ended_changes_nothing(tmp_path: Path) -> None:
    serial = SCHEDULES_BY_NAME["serial"]
    ended_s = simulate(serial, folder=tmp_path / "one").ended_s
    late = simulate(serial, folder=tmp_path / "other", interrupt_at_s=ended_s)
    assert not late.ended.interrupted
    assert late.ended.checkpoint == tmp_path / "other" / "round_000003"


def test_an_interrupted_evaluation_is_counted(tmp_path: Path) -> None:
    book = Book()
    settings = change(SETTINGS, eval_every=1, eval_prompts=8)
    simulate(SCHEDULES_BY_NAME["serial"], settings, folder=tmp_path, book=book, interrupt_at_s=0.5)
    totals = totals_of(read_ledger(book.store))
    assert totals.num_known_tokens == totals.evaluated_tokens == book.num_generated > 0


@pytest.mark.parametrize("keep", [1, 2, 4, 0])
def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int) -> None:
    (tmp_path / "round_000002_step_000004.partial").mkdir()  # left by a run that was killed
    settings = change(SETTINGS, checkpoint_every=1, keep_checkpoints=keep)
    simulate(SCHEDULES_BY_NAME["serial"], settings, folder=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"round_{number:06d}" for number in range(keep > 0, 4)][-keep:]


@pytest.mark.parametrize(
    "num_steps", [*range(1, 6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 13))]
)
@pytest.mark.parametrize("name", ["serial", "rolloutpipe_eager", "conventional", "pipelinerl"])
def test_the_steps_of_a_round_that_was_interrupted_count(name: str, num_steps: int, tmp_path: Path) -> None:
    schedule, settings, book = SCHEDULES_BY_NAME[name], change(SETTINGS, rounds=6), Book()
    whole = simulate(schedule, settings)
    ends_s = [step.end_s for step in whole.of(Stepped)]
    if num_steps >= len(ends_s):
        return
    simulate(schedule, settings, folder=tmp_path, book=book, interrupt_at_s=ends_s[num_steps - 1] + 0.01)
    last = simulate(schedule, settings, folder=tmp_path, book=book)
    assert last.ended.checkpoint and last.ended.checkpoint.name == "round_000006"
    assert last.of(Stepped)[-1].stats.num_steps == len(ends_s)
    books = read_ledger(book.store)
    assert totals_of(books).num_known_tokens + books.held_tokens == book.num_generated
    assert last.run.version == last.of(Published)[-1].version


def places(*lives: Outcome) -> list[tuple[int, int]]:
    """Step and round of each step, and (minus the steps so far, round) of each evaluation."""
    found, round, steps = list[tuple[int, int]](), 0, 0
    for event in chain.from_iterable(life.events for life in lives):
        match event:
            case RoundStarted():
                round = event.round
            case Stepped():
                steps = event.stats.num_steps
                found.append((steps, round))
            case Evaluated():
                found.append((-steps, event.round))
    return found


@pytest.mark.parametrize(
    ("name", "num_rounds"),
    [
        *((name, 1) for name in EVALUATED),
        ("serial", 3),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in EVALUATED[1:]),
    ],
)
def test_a_resumed_run_has_the_steps_and_evaluations_of_each_round_that_it_has_without_interruptions(
    name: str, num_rounds: int, tmp_path: Path
) -> None:
    schedule = SCHEDULES_BY_NAME[name]
    settings = change(SETTINGS, rounds=num_rounds, eval_every=1, eval_prompts=4)
    whole = simulate(schedule, settings)
    ends_s = [step.end_s for step in whole.of(Stepped)]
    for cut in range(1, len(ends_s)):
        folder, book = tmp_path / str(cut), Book()
        first = simulate(schedule, settings, folder=folder, book=book, interrupt_at_s=ends_s[cut - 1] + 0.001)
        assert first.of(Stepped)[-1].stats.num_steps == cut
        again = simulate(schedule, settings, folder=folder, book=book, interrupt_at_s=20.0)
        last = simulate(schedule, settings, folder=folder, book=book)
        assert sorted(set(places(first, again, last))) == sorted(set(places(whole))), cut
        trained = surviving(read_ledger(book.store))
        assert set(trained.values()) == {1}
        assert last.totals.num_known_tokens + last.run._ledger.held_tokens == book.num_generated


def test_two_checkpoints_and_the_one_of_the_best_evaluation_are_kept(tmp_path: Path) -> None:
    settings = change(
        SETTINGS, rounds=8, checkpoint_every=1, eval_every=1, eval_prompts=16, eval_greedy=False
    )
    run = simulate(SCHEDULES_BY_NAME["serial"], settings, folder=tmp_path)
    accuracies = {event.round: event.reward for event in run.of(Evaluated)}
    best = max(accuracies, key=lambda round: accuracies[round])
    assert best < 6, "otherwise this test shows nothing"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"round_{number:06d}" for number in (best, 7, 8)}


def test_a_checkpoint_of_a_life_that_was_rolled_back_does_not_take_the_place_of_a_newer_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "round_000009").mkdir()
    settings = change(SETTINGS, checkpoint_every=1)
    simulate(SCHEDULES_BY_NAME["serial"], settings, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round_000002", "round_000003"]


def test_a_signal_in_the_last_part_of_a_schedule_that_then_ends_does_not_undo_the_end(tmp_path: Path) -> None:
    """No task waits between the end of the part and the end of the schedule."""
    done = asyncio.Event()

    async def serial(run: Run) -> None:
        await SCHEDULES_BY_NAME["serial"](run)
        async with run._parts.interruption.protected():
            run._parts.interruption.request(SIGTERM)
            await asyncio.sleep(0)
        done.set()

    outcome = simulate(serial, folder=tmp_path, book=Book())
    assert done.is_set() and not outcome.ended.interrupted
    assert outcome.ended.checkpoint and len(outcome.of(BooksClosed)) == 1


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_signal_in_a_step_without_a_wait_after_it_does_not_interrupt_the_checkpoint_that_follows(
    num_rounds: int, tmp_path: Path
) -> None:
    """The checkpoint of the end, or one between two rounds."""

    def slow_disk() -> RunComponents:
        return replace(simulated_parts(SIM, 0), trainer=SlowDisk(SIM.trainer, 50.0))

    async def without_publication(run: Run) -> None:
        run.declare(staleness=2)
        async for round in run.rounds():
            run.pool.launch(run.prompts(2))
            await run.train(await run.pool.take(2))
            if round == 0:
                async with run._parts.interruption.protected():
                    run._parts.interruption.request(SIGTERM)
                    await asyncio.sleep(0)

    settings, parts = change(SETTINGS, rounds=num_rounds, checkpoint_every=1), slow_disk
    run = simulate(without_publication, settings, folder=tmp_path, book=Book(), parts=parts)
    assert run.ended.interrupted and run.ended.checkpoint and num_steps(run.ended.checkpoint) == 1
    assert not list(tmp_path.glob("*.partial")) and len(run.of(BooksClosed)) == 1
