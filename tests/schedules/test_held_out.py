"""Evaluations of every schedule: each held-out token is of the version under which it is booked."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import pytest

from helpers.virtual import SCHEDULES_BY_NAME, SIM, Outcome, change, simulate
from tailrace.contracts.reward import Rewards
from tailrace.controller import checkpoints
from tailrace.controller.base import RunSettings
from tailrace.controller.run import Run
from tailrace.record.events import Evaluated, EvaluatedSample
from tailrace.rollout.evaluation import evaluate
from tailrace.rollout.router import Router
from tailrace.schedules import SCHEDULES
from tailrace.types import Sample

FAST = change(SIM, trainer={**SIM.trainer.model_dump(), "tokens_per_s": 200_000.0})
"""Publications come so fast that engines are still on older versions when a round begins."""
SETTINGS = RunSettings(rounds=3, group_size=4, eval_every=1, eval_prompts=40)

Schedule = Callable[[Run], Awaitable[None]]


async def to_one_engine(run: Run) -> None:
    """The first engine alone gets the weights of every second round, and requests go on with new weights."""
    run.declare(staleness=1)
    async for number in run.rounds():
        run.pool.launch(run.prompts(8))
        await run.train([group async for groups in run.pool.stream(8) for group in groups])
        await run.publish(to=None if number % 2 else run.engines[:1])


async def when_idle(run: Run) -> None:
    """Engines load when they are idle, and samples go on with new weights."""
    run.declare(staleness=3)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(12 - len(run.pool)))
        await run.train([group async for groups in run.pool.stream(4) for group in groups])
        await run.publish(to="idle")


ALL: dict[str, Schedule] = {
    **SCHEDULES_BY_NAME,
    "dora_small_steps": partial(SCHEDULES["dora"], groups_per_step=4, groups_in_flight=6, staleness=4),
    "laminar_large_steps": partial(SCHEDULES["laminar"], groups_per_step=24, groups_in_flight=26),
    "to_one_engine": to_one_engine,
    "when_idle": when_idle,
}


def evaluated(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> tuple[Outcome, list[list[Sample]]]:
    """A run with an evaluation before each round and at the end, and the samples of each."""
    kept, outcome = list[list[Sample]](), Outcome()

    async def evaluate_and_keep(
        samples: Sequence[Sample], router: Router, rewards: Rewards
    ) -> list[EvaluatedSample]:
        state = outcome.run._state
        assert state.steps_at[state.version] == state.num_steps, "the step under which it is booked"
        kept.append([*samples])
        booked = state.version
        result = await evaluate(samples, router, rewards)
        assert state.version == booked
        assert {span.version for sample in samples for span in sample.spans} == {booked}
        return result

    monkeypatch.setattr(checkpoints, "evaluate", evaluate_and_keep)
    return simulate(schedule, SETTINGS, FAST, into=outcome), kept


@pytest.mark.parametrize("name", ALL)
def test_each_held_out_token_is_of_the_version_under_which_it_is_booked(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    outcome, evaluations = evaluated(monkeypatch, ALL[name])
    assert len(evaluations) == len(outcome.of(Evaluated)) >= SETTINGS.rounds + 1
    assert all(sample.finish_reason and sample.num_tokens for samples in evaluations for sample in samples)


def test_held_out_samples_use_up_no_batch_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first round all samples that began were held out."""
    begun: list[list[int]] = []

    async def looking(run: Run) -> None:
        run.declare(staleness=0, pinned=1)
        async for _ in run.rounds():
            begun.append([*run.router.versions.num_begun])

    evaluated(monkeypatch, looking)
    assert begun[0] == [0] * SIM.engines.count
