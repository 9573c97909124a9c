"""A run: what it refuses, what it says while it waits, and that it goes on after it was killed."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path

import pytest

from helpers.virtual import (
    EXACT,
    FLUSHING,
    SCHEDULES_BY_NAME,
    SETTINGS,
    SIM,
    ZERO_VARIANCE,
    Book,
    Death,
    Outcome,
    change,
    dying,
    reporting,
    simulate,
    worlds,
)
from tailrace.algo.advantages import group_advantages
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.trainer import StepStats
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.execution import execute
from tailrace.controller.run import Run
from tailrace.controller.watchdog import watch_controller_lag
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.errors import (
    BadRow,
    ConfigError,
    GroupsLost,
    LedgerError,
    NotFinite,
    ScheduleError,
    StalenessError,
    Stuck,
)
from tailrace.ledger.store import read_ledger
from tailrace.record.events import (
    Accumulated,
    ControllerLag,
    Evaluated,
    Event,
    GroupEnded,
    Published,
    Recorder,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    RowSkipped,
    Saved,
    Stepped,
    Waiting,
)
from tailrace.schedules.serial import serial
from tailrace.sim.trainer import SimTrainer
from tailrace.types import Group, Prompt, Sample, SampleId, Span, noise_seed

pytestmark = pytest.mark.virtual

ONE_ROUND = RunSettings(rounds=1, group_size=2)
ONE_VERSION = change(EXACT, engines=change(EXACT.engines, versions=1))


# -- killed and resumed ----------------------------------------------------------------------------


def lives(
    name: str,
    settings: RunSettings,
    kills: Iterator[float],
    folder: Path,
    algorithm: AlgorithmSettings | None = None,
) -> tuple[list[Event], Outcome, Book]:
    """Run, be killed, resume, until it ends: what happened in the lineage of checkpoints that led to the
    end, what a kill undid left out; the last life; and what is written of all."""
    lineage: list[Event] = []
    book = Book()
    while True:
        outcome = simulate(
            SCHEDULES_BY_NAME[name],
            settings,
            SIM,
            folder=folder,
            book=book,
            kill_at_s=next(kills, None),
            algorithm=algorithm,
        )
        if not outcome.killed:
            return lineage + outcome.events, outcome, book
        saves = [index for index, event in enumerate(outcome.events) if isinstance(event, Saved)]
        lineage += outcome.events[: saves[-1]] if saves else []


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_a_run_killed_at_any_moment_and_resumed_trains_as_many_groups_and_none_twice(
    name: str, every: int, tmp_path: Path
) -> None:
    settings = change(SETTINGS, checkpoint_every=every)
    algorithm = ZERO_VARIANCE if every == 2 else AlgorithmSettings()
    whole = simulate(SCHEDULES_BY_NAME[name], settings, algorithm=algorithm)
    chance = random.Random(f"{name} {every}")
    kills = iter([chance.uniform(0, whole.ended_s), chance.uniform(0, whole.ended_s / 2)])
    lineage, last, _ = lives(name, settings, kills, tmp_path, algorithm)
    trained = [event.prompt for event in lineage if isinstance(event, GroupEnded) and event.fate == "trained"]
    assert last.totals.groups["trained"] == len(trained) == len(set(trained))
    if name in FLUSHING:
        assert last.run.parked.groups == []
        return
    assert len(trained) == whole.totals.groups["trained"]
    steps = [event.stats.num_steps for event in lineage if isinstance(event, Stepped)]
    assert steps == list(range(1, len(whole.of(Stepped)) + 1))
    rounds = [event.round for event in lineage if isinstance(event, RoundEnded)]
    assert rounds == list(range(SETTINGS.rounds))


def test_serial_trains_the_same_prompts_after_a_crash(tmp_path: Path) -> None:
    settings = change(SETTINGS, checkpoint_every=1)
    whole = simulate(SCHEDULES_BY_NAME["serial"], settings)
    for number, share in enumerate((0.05, 0.33, 0.5, 0.77, 0.99)):
        lineage, last, _ = lives("serial", settings, iter([whole.ended_s * share]), tmp_path / str(number))
        trained = {event.prompt for event in lineage if isinstance(event, GroupEnded)}
        assert trained == set(whole.trained) and set(last.totals.wasted_tokens) <= {"crash"}


def test_what_was_trained_since_the_last_checkpoint_is_trained_again_from_its_tokens(tmp_path: Path) -> None:
    settings = change(SETTINGS, checkpoint_every=2)
    whole = simulate(SCHEDULES_BY_NAME["serial"], settings)
    first_round_s = whole.of(RoundEnded)[0].time_s
    lineage, last, book = lives("serial", settings, iter([first_round_s + 1.1]), tmp_path)
    again = {training.id for training in read_ledger(book.store).trainings.values() if training.undone == 2}
    first = [event for event in lineage if isinstance(event, Stepped)][:2]
    assert again == {sample.id for event in first for sample in event.samples}
    assert not any(event.sample in again for event in last.of(RequestStarted))


def test_a_finished_run_is_resumed_to_be_longer(tmp_path: Path) -> None:
    short, longer = (change(SETTINGS, rounds=rounds, checkpoint_every=1) for rounds in (2, 3))
    book = Book()
    simulate(SCHEDULES_BY_NAME["rolloutpipe"], short, folder=tmp_path, book=book)
    again = simulate(SCHEDULES_BY_NAME["rolloutpipe"], longer, folder=tmp_path, book=book)
    assert [event.round for event in again.of(RoundStarted)] == [2]
    assert again.totals.groups["trained"] == 48 and again.of(Stepped)[-1].stats.num_steps == 12


def test_groups_that_a_crash_interrupted_come_first_and_go_on_from_their_tokens(tmp_path: Path) -> None:
    settings, book = change(SETTINGS, checkpoint_every=1), Book()
    schedule = SCHEDULES_BY_NAME["pipelinerl"]
    killed_s = simulate(schedule, settings).of(RoundEnded)[1].time_s
    simulate(schedule, settings, folder=tmp_path, book=book, kill_at_s=killed_s, beside=reporting)
    interrupted = {group.prompt for group in read_ledger(book.store).groups.values() if group.fate is None}
    resumed = simulate(schedule, settings, folder=tmp_path, book=book)
    origins = [
        [origin.life for origin in sample.spans] for sample in read_ledger(book.store).samples.values()
    ]
    assert any(set(lives) == {1, 2} for lives in origins)
    asked = dict.fromkeys(event.sample.prompt for event in resumed.of(RequestStarted))
    assert set(list(asked)[:4]) <= interrupted
    assert set(resumed.totals.wasted_tokens) <= {"crash"}


def test_a_checkpoint_that_the_kill_left_without_a_mark_does_not_count(tmp_path: Path) -> None:
    settings, book = change(SETTINGS, checkpoint_every=1), Book(commit_s=1.0)
    whole = simulate(
        SCHEDULES_BY_NAME["serial"], settings, folder=tmp_path / "whole", book=Book(commit_s=1.0)
    )
    saved_s = whole.of(Saved)[1].time_s
    killed = {"folder": tmp_path, "book": book, "kill_at_s": saved_s - 0.5}
    simulate(SCHEDULES_BY_NAME["serial"], settings, **killed)  # type: ignore[arg-type]
    assert (tmp_path / "round_000001").is_dir()
    resumed = simulate(SCHEDULES_BY_NAME["serial"], settings, folder=tmp_path, book=book)
    assert [event.round for event in resumed.of(RoundStarted)] == [0, 1, 2]


# -- what a schedule may not do ----------------------------------------------------------------------


@pytest.mark.parametrize("verb", [Run.accumulate, Run.train])
def test_tokens_older_than_declared_are_refused_before_they_are_trained(
    verb: Callable[[Run, list[Group]], Awaitable[None]],
) -> None:
    async def one_too_old(run: Run) -> None:
        run.declare(staleness=1)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            groups = await run.pool.take(2)
            await run.publish()
            await run.accumulate(groups[:1])
            await run.publish()
            await verb(run, groups[1:])

    outcome = Outcome()
    with pytest.raises(StalenessError, match=r"sample 1\.0/0 has tokens 2 publications old .* at most 1"):
        simulate(one_too_old, ONE_ROUND, EXACT, into=outcome)
    assert len(outcome.of(Accumulated)) == 1 and outcome.of(Stepped) == []


def test_a_publication_to_no_engine_is_refused() -> None:
    async def to_nobody(run: Run) -> None:
        run.declare(staleness=0)
        async for _ in run.rounds():
            await run.publish(to=[])

    with pytest.raises(ScheduleError, match=r'names no engine; name one, or write to="idle"'):
        simulate(to_nobody, ONE_ROUND, EXACT)


def test_a_move_to_an_engine_of_another_version_is_refused() -> None:
    async def astray(run: Run) -> None:
        run.declare(staleness=1, pinned=1)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            await asyncio.sleep(1)
            await run.publish(to=run.engines[1:])
            await asyncio.sleep(1)
            sample, _ = run.serving(run.engines[0])  # the other one came here before the load
            run.move(sample, run.engines[1])

    wrong = r"sample 0\.0/0 cannot move to engine-1, which serves \(1,\) and not version \(0,\)"
    with pytest.raises(ScheduleError, match=wrong):
        simulate(astray, ONE_ROUND, EXACT, parts=worlds(ONE_VERSION, lambda sample: 10, count=2))


def test_a_pinned_sample_whose_version_is_gone_begins_again_with_its_noise_and_its_tokens_are_counted() -> (
    None
):
    async def everywhere(run: Run) -> None:
        run.declare(staleness=1, pinned=1)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            await asyncio.sleep(4)
            await run.publish()
            await run.train(await run.pool.take(1))

    outcome = simulate(everywhere, ONE_ROUND, EXACT, parts=worlds(ONE_VERSION, lambda sample: 10, count=2))
    (step,) = outcome.of(Stepped)
    assert [sample.spans for sample in step.samples] == [[Span(1, 10)]] * 2
    assert [sample.id[1:] for sample in step.samples] == [(1, 0), (2, 1)]
    assert [sample.seed for sample in step.samples] == [noise_seed(0, SampleId(0, 0, n)) for n in range(2)]
    assert outcome.totals.wasted_tokens == {"version gone": 2 * 4}
    assert [event.time_s for event in outcome.of(RequestStarted)] == [0, 0, 4, 4]


def test_a_run_that_ends_while_a_sample_moves_serves_it_no_more() -> None:
    async def broken(run: Run) -> None:
        run.declare(staleness=1, pinned=1)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            await asyncio.sleep(4)
            (sample,) = run.serving(run.engines[0])
            run.move(sample, run.engines[1])
            raise ScheduleError("a defect")

    outcome = Outcome()
    with pytest.raises(ScheduleError, match="a defect"):
        simulate(
            broken, ONE_ROUND, EXACT, into=outcome, parts=worlds(ONE_VERSION, lambda sample: 10, count=2)
        )
    assert [event.time_s for event in outcome.of(RequestStarted)] == [0, 0]
    assert [event.outcome for event in outcome.of(RequestEnded)] == ["cancelled"] * 2


def test_a_pinned_sample_with_tokens_of_two_versions_is_refused() -> None:
    async def late(run: Run) -> None:
        run.declare(staleness=1)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            await asyncio.sleep(4)
            await run.publish()
            groups = await run.pool.take(1)
            run.declare(staleness=1, pinned=1)
            await run.train(groups)

    with pytest.raises(StalenessError, match=r"sample 0\.0/0 is pinned and has tokens of \[Span\("):
        simulate(late, ONE_ROUND, EXACT)


def test_groups_that_were_taken_and_forgotten_are_named() -> None:
    async def forgetful(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(4))
            await run.train((await run.pool.take(4))[2:])

    with pytest.raises(GroupsLost, match=r"prompts \[0, 1\] were taken and neither trained"):
        simulate(forgetful, ONE_ROUND, EXACT)


def test_what_is_trained_twice_is_found() -> None:
    async def eager(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            groups = await run.pool.take(2)
            await run.train(groups)
            await run.train(groups)

    with pytest.raises(LedgerError, match=r"sample 0\.0/0 ended twice: trained, then trained"):
        simulate(eager, ONE_ROUND, EXACT)


def test_what_is_handed_over_twice_before_its_step_is_refused() -> None:
    async def twice(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            groups = await run.pool.take(2)
            await run.accumulate(groups)
            await run.accumulate(groups[1:])

    with pytest.raises(ScheduleError, match=r"sample 1\.0/0 is to be trained twice; train each group once"):
        simulate(twice, ONE_ROUND, EXACT)


def test_a_round_that_ends_without_the_step_is_refused() -> None:
    async def stepless(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            await run.accumulate(await run.pool.take(2))

    with pytest.raises(ScheduleError, match=r"round 0 ended with 4 samples accumulated and no step"):
        simulate(stepless, ONE_ROUND, EXACT)


# -- losses that are not finite -------------------------------------------------------------------


def losing(*lost: int, loss: float = nan) -> Callable[[], RunComponents]:
    """Parts whose trainer has this loss, and no finite gradient, in these steps."""

    class Trainer(SimTrainer):
        async def step(self) -> StepStats:
            stats = await super().step()
            return replace(stats, loss=loss, skipped=True) if stats.num_steps in lost else stats

    return lambda: replace(simulated_parts(EXACT, seed=0), trainer=Trainer(EXACT.trainer))


TEN_STEPS = partial(serial, groups_per_round=4, groups_per_step=2)
TEN_STEPS_SETTINGS = RunSettings(rounds=5, group_size=2, checkpoint_every=1, keep_checkpoints=0)


@pytest.mark.parametrize("loss", [nan, 0.5])
def test_three_steps_in_sequence_without_a_finite_gradient_end_the_run_and_name_the_first(
    loss: float, tmp_path: Path
) -> None:
    outcome, book, parts = Outcome(), Book(), losing(2, 3, 6, 7, 8, 9, loss=loss)
    with pytest.raises(NotFinite, match="step 6 was the first of 3 without a finite loss or gradient"):
        simulate(TEN_STEPS, TEN_STEPS_SETTINGS, EXACT, parts=parts, into=outcome, book=book, folder=tmp_path)
    assert [event.stats.num_steps for event in outcome.of(Stepped)] == [*range(1, 9)]
    book.num_generated += sum(usage.num_generated for usage in outcome.usages)
    last = simulate(TEN_STEPS, TEN_STEPS_SETTINGS, EXACT, book=book, folder=tmp_path)
    assert last.of(Stepped)[0].stats.num_steps == (5 if loss is nan else 7)
    assert last.of(Stepped)[-1].stats.num_steps == 10


def test_weights_without_a_finite_loss_are_not_saved_not_even_at_the_end(tmp_path: Path) -> None:
    parts = losing(2, 4, 9, 10)
    with pytest.raises(NotFinite, match="step 9 was the first of 2 without"):
        simulate(TEN_STEPS, TEN_STEPS_SETTINGS, EXACT, parts=parts, book=Book(), folder=tmp_path)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == ["round_000000", "round_000003", "round_000004"]


# -- training --------------------------------------------------------------------------------------


def test_gradients_step_and_publication_begin_one_after_another() -> None:
    async def once(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            await run.train(await run.pool.take(2))
            await run.publish()

    world = change(EXACT, trainer=change(EXACT.trainer, step_s=3.0, publish_s=2.0))
    outcome = simulate(once, ONE_ROUND, world)
    assert [(event.start_s, event.end_s) for event in outcome.of(Accumulated)] == [(10, 54)]
    assert [(event.start_s, event.end_s) for event in outcome.of(Stepped)] == [(54, 57)]
    assert [(event.start_s, event.end_s) for event in outcome.of(Published)] == [(57, 59)]
    assert outcome.trained == [0, 1]


# -- publishing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["serial", "rolloutpipe_eager", "streamrl", "pipelinerl"])
def test_advantages_over_a_step_wait_for_its_last_sample_however_a_schedule_streams_it(name: str) -> None:
    settings = change(SETTINGS, group_size=1)
    outcome = simulate(SCHEDULES_BY_NAME[name], settings, algorithm=AlgorithmSettings(name="one_sample"))
    accumulated = iter(outcome.of(Accumulated))
    for step in outcome.of(Stepped):
        rewards = [sample.reward for sample in step.samples if sample.reward is not None]
        expected = group_advantages(rewards, scale="group")
        assert [sample.advantage for sample in step.samples] == pytest.approx(expected)
        assert step.start_s == next(accumulated).end_s
    assert next(accumulated, None) is None


def test_training_goes_on_while_weights_arrive_and_the_next_publication_waits_for_them() -> None:
    async def twice(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(2))
            groups = await run.pool.take(2)
            await run.publish()
            await run.train(groups)
            await run.publish()

    slow = change(EXACT, engines=change(EXACT.engines, load_s=30.0))
    outcome = simulate(twice, ONE_ROUND, slow)
    assert [event.start_s for event in outcome.of(Stepped)] == [10 + 44]
    assert [(event.start_s, event.end_s) for event in outcome.of(Published)] == [(10, 10), (54, 54)]
    slower = change(EXACT, engines=change(EXACT.engines, load_s=50.0))
    waiting = simulate(twice, ONE_ROUND, slower)
    assert [(event.start_s, event.end_s) for event in waiting.of(Published)] == [(10, 10), (54, 60)]


def test_a_group_without_tokens_may_be_a_publication_old_until_the_weights_have_arrived() -> None:
    ages: list[tuple[int, ...]] = []

    async def looking(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(before := run.prompts(1))
            await run.publish()
            run.pool.launch(after := run.prompts(1))
            ages.append((run.staleness(before[0]), run.staleness(after[0])))
            await asyncio.sleep(4)
            ages.append((run.staleness(before[0]), run.staleness(after[0])))
            await run.train(await run.pool.take(2))

    simulate(looking, ONE_ROUND, change(EXACT, engines=change(EXACT.engines, load_s=3.0)))
    assert ages == [(1, 0), (0, 0)]


# -- waiting -----------------------------------------------------------------------------------------


def test_a_long_wait_says_what_it_waits_for_and_in_the_end_gives_up() -> None:
    async def choosy(run: Run) -> None:
        run.pool.launch(run.prompts(2))
        async for _ in run.rounds():
            await run.pool.take(2, lambda ready, wanted: [])

    settings, outcome = change(ONE_ROUND, step_warning_timeout_s=10.0, step_timeout_s=25.0), Outcome()
    with pytest.raises(Stuck, match=r"no optimizer step for 25 s: the pool: 2 complete groups \(2 there\)"):
        simulate(choosy, settings, EXACT, into=outcome)
    waits = [(event.time_s, event.quiet_s) for event in outcome.of(Waiting)]
    assert waits == [(10, 10), (20, 20), (25, 25)]


def test_a_step_is_what_patience_waits_for() -> None:
    settings = RunSettings(rounds=3, group_size=2, step_warning_timeout_s=40.0, step_timeout_s=100.0)
    outcome = simulate(
        partial(serial, groups_per_round=2, groups_per_step=2), settings, EXACT
    )  # a step every 10 + 44 s
    assert [(event.time_s, event.quiet_s) for event in outcome.of(Waiting)] == [(40, 40), (94, 40), (148, 40)]


# -- between rounds ----------------------------------------------------------------------------------


def test_evaluations_stand_at_the_start_between_rounds_and_at_the_end_outside_the_books() -> None:
    settings = change(SETTINGS, eval_every=2, eval_prompts=10)
    outcome = simulate(SCHEDULES_BY_NAME["serial"], settings)
    evaluated = [(event.round, event.num_samples) for event in outcome.of(Evaluated)]
    assert evaluated == [(0, 10), (2, 10), (3, 10)]
    assert outcome.trained == simulate(SCHEDULES_BY_NAME["serial"]).trained


def test_an_evaluation_survives_that_all_engines_are_away() -> None:
    settings = change(ONE_ROUND, eval_every=1, eval_prompts=4)
    beside = dying(Death(0.0, 0, 20.0))
    outcome = simulate(partial(serial, groups_per_round=2, groups_per_step=2), settings, EXACT, beside=beside)
    assert [event.time_s for event in outcome.of(Evaluated)] == [30, 94]


def test_rows_without_a_prompt_are_counted_and_the_next_one_is_drawn() -> None:
    class Rows:
        def __getitem__(self, index: int) -> Prompt:
            if index % 3 == 1:
                raise BadRow("no prompt")
            return Prompt(index, [1])

    def parts() -> RunComponents:
        return replace(simulated_parts(EXACT, seed=0), prompts=Rows(), held_out=Rows())

    outcome = simulate(
        partial(serial, groups_per_round=4, groups_per_step=2),
        change(ONE_ROUND, eval_every=1),
        EXACT,
        parts=parts,
    )
    assert outcome.trained == [0, 2, 3, 5]
    skipped = [(event.prompt, event.reason) for event in outcome.of(RowSkipped)]
    assert [each for each in skipped if each[0] >= 0] == [(1, "no prompt"), (4, "no prompt")]
    assert (-2, "no prompt") in skipped  # of an evaluation
    assert outcome.totals.num_drawn == 6 and outcome.totals.groups == {"trained": 4, "dropped": 2}


def test_data_without_any_usable_row_ends_the_run_and_says_so() -> None:
    class NoRows:
        def __getitem__(self, index: int) -> Prompt:
            raise BadRow("no prompt")

    def parts() -> RunComponents:
        return replace(simulated_parts(EXACT, seed=0), prompts=NoRows())

    with pytest.raises(
        ConfigError, match="data = 'no prompt': 10000 rows in succession have no usable prompt"
    ):
        simulate(partial(serial, groups_per_round=4, groups_per_step=2), ONE_ROUND, EXACT, parts=parts)


# -- the rest of the vocabulary ------------------------------------------------------------------------


def test_loose_samples_train_in_a_seeded_order_and_their_groups_end_with_the_last() -> None:
    """Conventional RL of PipelineRL's paper: B samples a step, shuffled over the round."""
    orders: list[list[str]] = []

    async def conventional(run: Run) -> None:
        async for _ in run.rounds():
            run.pool.launch(run.prompts(4))
            samples = run.shuffled(await run.pool.take(4))
            orders.append([str(sample.id) for sample in samples])
            await run.train(samples[:5])
            await run.train(samples[5:])
            await run.publish()

    first, second = (simulate(conventional, RunSettings(rounds=2, group_size=2), EXACT) for _ in range(2))
    assert orders[:2] == orders[2:] and orders[0] != sorted(orders[0])
    assert first.trace == second.trace
    assert first.totals.groups == {"trained": 8}


def test_the_noise_of_every_sample_is_its_own_and_another_run_s_is_other() -> None:
    seeds: list[set[int]] = []

    async def look(run: Run) -> None:
        async for _ in run.rounds():
            groups = run.prompts(5)
            run.restart(run.prompts(0))
            seeds.append({sample.seed for group in groups for sample in group.samples})
            run.pool.launch(groups)
            await run.train(await run.pool.take(5))

    for seed in (0, 0, 1):
        simulate(look, change(ONE_ROUND, seed=seed), EXACT)
    assert [len(drawn) for drawn in seeds] == [10] * 3
    assert seeds[0] == seeds[1] and not seeds[0] & seeds[2]


def test_the_watchdog_and_everything_else_end_with_the_schedule() -> None:
    leftovers: list[int] = []

    async def short(run: Run) -> None:
        run.pool.feed(run.prompts, room=4, full="hold")
        async for _ in run.rounds():
            await run.train(await run.pool.take(1))
        asyncio.get_running_loop().call_later(1000, lambda: leftovers.append(len(asyncio.all_tasks())))

    outcome = simulate(short, ONE_ROUND, EXACT)
    assert outcome.ended_s < 1000 and leftovers == []


async def test_nothing_is_recorded_after_a_run_has_failed() -> None:
    """The workers of a failed run take seconds to end, in which the loop goes on."""
    recorded: list[Event] = []

    class File:
        closed = False

        def on(self, event: Event) -> None:
            assert not self.closed
            recorded.append(event)

        def close(self) -> None:
            self.closed = True

    class Rewards:
        async def score(self, sample: Sample) -> float:
            raise KeyError("the reward")

    recorder = Recorder(File())
    failing = partial(serial, groups_per_round=4, groups_per_step=2)
    parts = replace(simulated_parts(EXACT, seed=0), rewards=Rewards())
    with pytest.raises(KeyError, match="the reward"):
        await execute(failing, parts, ONE_ROUND, recorder, beside=[watch_controller_lag(recorder)])
    await asyncio.sleep(10)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert any(isinstance(event, ControllerLag) for event in recorded)
