"""The trainer ahead: the next batch is handed over while it computes one."""

from functools import partial

import pytest

from tailrace import clock
from tailrace.errors import ScheduleError, StalenessError
from tailrace.parts import RunSettings
from tailrace.record.events import Accumulated, Published, RoundEnded, Stepped
from tailrace.run import Run
from virtual import EXACT, Outcome, change, simulate

ONE_ROUND = RunSettings(rounds=1, group_size=2)


async def three_steps(run: Run, returned: list[float], staleness: float = 2) -> None:
    """A round of three groups, a group a step, each published."""
    run.promise(staleness=staleness)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(3))
        groups = await run.pool.take(3)
        async with run.ahead(publish="keep") as ahead:
            for group in groups:
                await ahead.train([group])
                returned.append(clock.now())


def test_a_batch_is_handed_over_while_the_one_before_is_computed_and_all_are_trained_in_their_round() -> None:
    """22 s of gradients, 3 of a step, 2 of a publication: the trainer works without a gap from 10 s on."""
    returned: list[float] = []
    world = change(EXACT, trainer=change(EXACT.trainer, step_s=3.0, publish_s=2.0))
    outcome = simulate(partial(three_steps, returned=returned), ONE_ROUND, world)
    assert returned == [10, 10 + 27, 10 + 54]
    assert [(e.start_s, e.end_s) for e in outcome.of(Accumulated)] == [(10, 32), (37, 59), (64, 86)]
    assert [(e.start_s, e.end_s) for e in outcome.of(Stepped)] == [(32, 35), (59, 62), (86, 89)]
    assert [(e.start_s, e.end_s) for e in outcome.of(Published)] == [(35, 37), (62, 64), (89, 91)]
    assert outcome.trained == [0, 1, 2]
    assert [event.time_s for event in outcome.of(RoundEnded)] == [91]


def test_lags_are_those_of_the_weights_that_are_trained_not_of_those_when_a_batch_is_handed_over() -> None:
    steps = simulate(partial(three_steps, returned=[]), ONE_ROUND, EXACT).of(Stepped)
    assert [step.lags.publications for step in steps] == [{0: 20}, {1: 20}, {2: 20}]
    assert [step.lags.steps for step in steps] == [{0: 20}, {1: 20}, {2: 20}]
    assert [step.lags.carried for step in steps] == [0, 2, 2]


def test_what_will_be_too_old_when_its_turn_comes_is_refused_before_it_is_trained() -> None:
    outcome = Outcome()
    with pytest.raises(StalenessError, match=r"sample 2\.0/0 has tokens 2 publications old .* at most 1"):
        simulate(partial(three_steps, returned=[], staleness=1), ONE_ROUND, EXACT, into=outcome)
    assert [id.prompt for event in outcome.of(Accumulated) for id in event.samples] == [0, 0]


def test_publications_arrive_one_after_another_where_the_trainer_is_ahead_of_slow_engines() -> None:
    """A load takes 60 s and a step 22: each publication waits until the one before has arrived."""
    slow = change(EXACT, engines=change(EXACT.engines, load_s=60.0))
    outcome = simulate(partial(three_steps, returned=[]), ONE_ROUND, slow)
    assert [event.version for event in outcome.of(Published)] == [1, 2, 3]
    assert [event.end_s for event in outcome.of(Published)] == [32, 92, 152]
    assert [event.end_s for event in outcome.of(Stepped)] == [32, 54, 76]


def test_a_batch_that_is_handed_over_while_it_is_trained_is_refused() -> None:
    async def twice(run: Run) -> None:
        run.promise(staleness=1)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            groups = await run.pool.take(1)
            async with run.ahead(publish="keep") as ahead:
                await ahead.train(groups)
                await ahead.train(groups)

    with pytest.raises(ScheduleError, match=r"sample 0\.0/0 is to be trained twice"):
        simulate(twice, ONE_ROUND, EXACT)
