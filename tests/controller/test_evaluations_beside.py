"""Evaluations beside training: each point is of the version with which it began, and nobody waits for it."""

from functools import partial
from pathlib import Path

import pytest

from helpers.record_story import Collector, Story, pipelined_round, play
from helpers.virtual import (
    EXACT,
    SCHEDULES_BY_NAME,
    SIM,
    Book,
    Death,
    Outcome,
    change,
    dying,
    simulate,
)
from tailrace.config import config_of
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.placement import device_sharing
from tailrace.errors import ConfigError
from tailrace.record.events import Evaluated, Published, RequestStarted, RoundStarted, Stepped
from tailrace.record.metrics import JoinedRows
from tailrace.schedules import SCHEDULES

SERIAL = partial(SCHEDULES["serial"], groups_per_round=1, groups_per_step=1)
SETTINGS = RunSettings(rounds=3, group_size=2, eval_every=1, eval_prompts=3, eval_beside=True)


def by_hand(versions: int = 1, slots: int = 1000, **run: object) -> Outcome:
    """Responses take 10 s, a step 1 s; with two slots, held-out samples and those of training take turns."""
    engines = change(EXACT.engines, versions=versions, slots=slots)
    sim = change(EXACT, engines=engines, trainer=change(EXACT.trainer, tokens_per_s=22.0))
    return simulate(SERIAL, change(SETTINGS, **run), sim)


def times(outcome: Outcome) -> tuple[list[float], list[float], list[float]]:
    """Starts of rounds, ends of publications, and evaluations."""
    rounds = [event.time_s for event in outcome.of(RoundStarted)]
    publications = [event.end_s for event in outcome.of(Published)]
    return rounds, publications, [event.time_s for event in outcome.of(Evaluated)]


def test_a_round_begins_with_its_evaluation_and_not_after_it() -> None:
    assert times(by_hand(eval_beside=False))[0] == [10.0, 31.0, 52.0]
    outcome = by_hand()
    assert times(outcome) == ([0.0, 11.0, 22.0], [11.0, 22.0, 33.0], [10.0, 21.0, 32.0, 43.0])
    booked = [(event.round, event.version, event.step) for event in outcome.of(Evaluated)]
    assert booked == [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3)]


def test_only_a_publication_that_takes_the_version_from_the_engines_waits() -> None:
    """Six held-out samples and two of training on two slots take 40 s."""
    one = by_hand(versions=1, slots=2, eval_prompts=6, eval_every=2)
    assert times(one) == ([0.0, 40.0, 51.0], [40.0, 51.0, 91.0], [40.0, 91.0, 121.0])
    two = by_hand(versions=2, slots=2, eval_prompts=6, eval_every=2)
    rounds, publications, evaluations = times(two)
    assert (publications[0], rounds[1]) == (11.0, 11.0), "training goes on"
    assert evaluations[0] > publications[0]


def of_each(schedule: object, **run: object) -> Outcome:
    sim = change(SIM, trainer=change(SIM.trainer, tokens_per_s=200_000.0))
    settings = change(SETTINGS, group_size=4, eval_prompts=40, eval_every=2, **run)
    return simulate(schedule, settings, sim)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_each_point_is_of_one_version_under_every_schedule(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tailrace.controller import checkpoints

    kept, plain = [], checkpoints.held_out_samples

    def keep(*args: object, **how: object) -> object:
        kept.append(plain(*args, **how))  # type: ignore[arg-type]
        return kept[-1]

    monkeypatch.setattr(checkpoints, "held_out_samples", keep)
    outcome = of_each(SCHEDULES_BY_NAME[name])
    points = outcome.of(Evaluated)
    assert len(points) == len(kept) >= 3
    for point, samples in zip(points, kept, strict=True):
        assert {span.version for sample in samples for span in sample.spans} == {point.version}
        assert point.num_samples == 40
    steps = {step.stats.num_steps: step.end_s for step in outcome.of(Stepped)}
    assert all(steps.get(point.step or 0, 0.0) <= point.time_s for point in points)


def test_a_killed_run_has_each_point_once(tmp_path: Path) -> None:
    """No checkpoint is committed before the points of earlier rounds. Of the life that was killed those of
    earlier rounds count, as `rewind_records` keeps them."""
    how = {"checkpoint_every": 1, "rounds": 6}
    whole = of_each(SCHEDULES_BY_NAME["tailrace"], **how)
    expected = [(point.round, point.version, point.step) for point in whole.of(Evaluated)]
    settings = change(SETTINGS, group_size=4, eval_prompts=40, eval_every=2, **how)
    sim = change(SIM, trainer=change(SIM.trainer, tokens_per_s=200_000.0))
    for number, share in enumerate((0.2, 0.45, 0.7)):
        folder, book = tmp_path / str(number), Book()
        play_ = partial(simulate, SCHEDULES_BY_NAME["tailrace"], settings, sim, folder=folder, book=book)
        killed = play_(kill_at_s=share * whole.ended_s)
        assert killed.killed
        resumed = play_()
        begun = resumed.of(RoundStarted)[0].round
        kept = [point for point in killed.of(Evaluated) if point.round < begun]
        rounds = [point.round for point in [*kept, *resumed.of(Evaluated)]]
        assert rounds == [round for round, _, _ in expected]


def test_a_sample_whose_version_died_with_its_engine_is_left_out() -> None:
    """The engine comes back with the newest version alone."""
    sim = change(EXACT, engines=change(EXACT.engines, versions=2, slots=2))
    sim = change(sim, trainer=change(sim.trainer, tokens_per_s=22.0))
    settings = change(SETTINGS, eval_prompts=6, eval_every=3)
    outcome = simulate(SERIAL, settings, sim, beside=dying(Death(25.0, 0, 1.0)))
    first, last = outcome.of(Evaluated)
    assert (first.version, last.num_samples) == (0, 6) and first.num_samples < 6
    assert len(outcome.of(RoundStarted)) == 3


def test_engines_that_sleep_while_the_trainer_works_evaluate_before_the_round() -> None:
    config = config_of(
        {
            "run": {"rounds": 1, "group_size": 2, "eval_beside": True},
            "schedule": {"name": "serial", "groups_per_round": 1, "groups_per_step": 1},
            "placement": {"kind": "colocated"},
        }
    )
    with pytest.raises(ConfigError, match=r"run.eval_beside.*engines sleep.*disaggregated"):
        device_sharing(config)


def test_an_evaluation_within_a_round_leaves_the_round_with_its_last_step() -> None:
    story, written = Story(), list[dict[str, float]]()
    pipelined_round(story)
    story.tell(Evaluated(24.5, 0, 8, 0.5, 5.0, version=0, step=0))
    play(story.events, Collector(), JoinedRows(written.append))
    assert [("round/time_s" in row, row["step"], row.get("eval/version")) for row in written] == [
        (False, 1, None),
        (False, 0, 0),
        (True, 2, None),
    ]


def test_training_has_requests_while_an_evaluation_runs() -> None:
    outcome = by_hand(slots=4)
    at_once = [event.sample.is_held_out for event in outcome.of(RequestStarted) if event.time_s == 0.0]
    assert sorted(at_once) == [False, False, True, True, True]
