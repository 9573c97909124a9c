"""A bound on staleness that masks the tokens that are too old: no sample waits, no trained token is older."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

import pytest
from typing_extensions import override

from helpers.small_run import train_here, write_small_run
from helpers.virtual import EXACT, MASKED, SCHEDULES_BY_NAME, SIM, Book, change, simulate, worlds
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import load_config
from tailrace.controller.base import RunSettings
from tailrace.controller.run import Run
from tailrace.drivers.assembly.schedule import resolve
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.errors import ConfigError, StalenessError
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import Store, read_ledger
from tailrace.record.events import Stepped
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import SimRewardSettings
from tailrace.sim.trainer import SimTrainer
from tailrace.types import Sample

RUN = RunSettings(rounds=6, group_size=4)


class Inspector(SimTrainer):
    """A trainer that looks at each token of its input: the version of each one, and whether it is masked."""

    def __init__(self) -> None:
        super().__init__(SIM.trainer)
        self.ages, self.masked_ages = Counter[int](), Counter[int]()

    @override
    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        for sample in [sample for unit in units for sample in unit]:
            ages = [version - span.version for span in sample.spans for _ in range(span.num_tokens)]
            assert len(ages) == sample.num_tokens
            self.masked_ages.update(ages[: sample.num_masked])
            self.ages.update(ages[sample.num_masked :])
            if sample.num_masked:
                assert ages[sample.num_masked - 1] > 1, "the last masked token is too old"
        await super().accumulate(units, version=version, replicas=replicas)


@pytest.mark.parametrize("name", MASKED)
def test_the_trainer_gets_no_token_in_the_loss_that_is_older_than_the_bound(name: str) -> None:
    trainer = Inspector()
    outcome = simulate(
        SCHEDULES_BY_NAME[name], RUN, parts=lambda: replace(simulated_parts(SIM, 0), trainer=trainer)
    )
    assert max(trainer.ages) == 1 < max(trainer.masked_ages)
    assert trainer.ages.total() == outcome.totals.trained_tokens > 0
    assert trainer.masked_ages.total() == outcome.totals.masked_tokens > 0
    for step in outcome.of(Stepped):
        assert step.stats.num_tokens == sum(sample.num_loss_tokens for sample in step.samples)
        assert step.lags.publications.total() == step.stats.num_tokens


def test_a_long_sample_is_trained_when_it_ends_without_its_beginning_by_hand() -> None:
    """A token is a second, and training takes none. The sample of prompt 1 has 40 tokens, all others 10. A
    step trains one prompt. With "wait" and a bound of 1 the second step would wait for it. With "mask" the
    others go on: by its end after 40 s there were 3 publications, after 10, 20 and 30 s, and it is trained
    with the tokens of versions 2 and 3."""
    sim = change(EXACT, trainer=change(EXACT.trainer, tokens_per_s=1e30))
    parts = worlds(sim, lambda sample: 40 if sample.prompt.index == 1 else 10)
    tailrace = partial(SCHEDULES["tailrace"], groups_per_step=1, groups_in_flight=2, staleness=1)
    run = RunSettings(rounds=5, group_size=1)

    masked = simulate(partial(tailrace, stale="mask"), run, sim, parts=parts)
    assert masked.trained == [0, 2, 3, 1, 4]
    (long,) = [s for step in masked.of(Stepped) for s in step.samples if s.prompt.index == 1]
    assert [span.num_tokens for span in long.spans] == [10, 10, 10, 10]
    assert [span.version for span in long.loss_spans] == [2, 3] and long.num_masked == 20
    assert masked.totals.masked_tokens == long.num_masked
    assert [step.end_s for step in masked.of(Stepped)] == [10.0, 20.0, 30.0, 40.0, 40.0]

    waiting = simulate(tailrace, run, sim, parts=parts)
    assert waiting.trained[1] == 1 and waiting.of(Stepped)[1].end_s == 40.0
    assert waiting.totals.masked_tokens == 0


def test_groups_whose_tokens_are_all_masked_are_data() -> None:
    """Rewards take so long that each sample is too old when it has one."""
    sim = change(SIM, rewards=SimRewardSettings(workers=1000, median_s=2000.0, sigma=0.0, timeout_s=1e6))
    bounded = partial(SCHEDULES_BY_NAME["pipelinerl_masked"], staleness=0, scoring_groups=64, ring_groups=64)
    outcome = simulate(bounded, RUN, sim)
    empty = [step for step in outcome.of(Stepped) if not step.stats.num_tokens]
    assert empty and all(len(step.samples) == 32 for step in empty)
    assert {step.lags.mean for step in empty} == {0.0} == {step.stats.kl for step in empty}
    assert outcome.run.overtime and outcome.totals.masked_tokens > 0


@pytest.mark.parametrize("name", MASKED)
def test_no_response_waits_and_none_is_generated_twice(name: str) -> None:
    outcome = simulate(SCHEDULES_BY_NAME[name], RUN)
    assert outcome.totals.wasted_tokens == {} or set(outcome.totals.wasted_tokens) == {"ready overflow"}
    if name == "tailrace_masked":
        ready = {group for step in outcome.of(Stepped) for group in {s.group for s in step.samples}}
        assert len(ready) == outcome.totals.groups["trained"] == 6 * 8


def test_the_effective_sample_size_that_guards_a_batch_is_that_of_its_tokens_in_the_loss() -> None:
    sim = change(SIM, trainer=change(SIM.trainer, drift=1.0))
    found: dict[float, float] = {}

    async def schedule(run: Run, bound: float) -> None:
        run.declare(staleness=bound, stale="mask")
        run.pool.feed(run.prompts, room=16, full="block")
        async for number in run.rounds():
            groups = await run.pool.take(8)
            if number == 5:
                found[bound] = await run.ess(groups)
            await run.train(groups)
            await run.publish()

    for bound in (0.0, inf):
        simulate(partial(schedule, bound=bound), RUN, sim)
    assert found[0.0] == 1.0 > found[inf]


def test_without_a_mask_an_older_token_is_still_an_error() -> None:
    async def schedule(run: Run) -> None:
        run.declare(staleness=0)
        run.pool.feed(run.prompts, room=16, full="block")
        async for _ in run.rounds():
            await run.train(await run.pool.take(8))
            await run.publish()

    with pytest.raises(
        StalenessError, match=r"publications old and the schedule declared at most 0: .*, 0 masked"
    ):
        simulate(schedule, RUN)


def test_tokens_that_april_masks_because_they_are_carried_have_the_same_fate() -> None:
    april = SCHEDULES_BY_NAME["april"]
    plain, masking = (
        simulate(april, RUN, algorithm=AlgorithmSettings(mask_carried=mask)) for mask in (False, True)
    )
    assert plain.totals.masked_tokens == 0 < masking.totals.masked_tokens
    known = [each.totals.trained_tokens + each.totals.masked_tokens for each in (plain, masking)]
    assert known[0] == known[1]
    assert {max(step.lags.publications) for step in masking.of(Stepped)} == {0}


# -- after a kill --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKED)
def test_masked_tokens_are_accounted_for_after_a_kill_and_a_resume(name: str, tmp_path: Path) -> None:
    """What was trained after the last checkpoint is trained again, with the mask of that time."""
    book, run = Book(flush_s=0.2), change(RUN, checkpoint_every=2)
    clean = simulate(SCHEDULES_BY_NAME[name], run)
    for at_s in (0.55 * clean.ended_s, 0.35 * clean.ended_s, None):
        outcome = simulate(SCHEDULES_BY_NAME[name], run, folder=tmp_path, book=book, kill_at_s=at_s)
    books = read_ledger(book.store)
    assert max(books.lives) == 3 and outcome.run.overtime
    assert totals_of(books) == outcome.totals
    counted = [training for training in books.trainings.values() if training.undone is None]
    assert outcome.totals.masked_tokens == sum(training.masked for training in counted) > 0
    assert any(training.undone is not None for training in books.trainings.values())
    assert outcome.totals.num_known_tokens + books.held_tokens == book.num_generated
    assert len({training.id for training in counted}) == len(counted)


def test_groups_of_versions_that_a_kill_undid_go_on_and_are_masked_by_their_age(tmp_path: Path) -> None:
    """A schedule that waits restarts them, because they could be due too early."""
    tailrace, wasted = SCHEDULES["tailrace"], {}
    for stale in ("wait", "mask"):
        book, folder = Book(), tmp_path / stale
        schedule = partial(tailrace, groups_per_step=8, groups_in_flight=16, staleness=1, stale=stale)
        clean = simulate(schedule, RUN)
        for at_s in (0.7 * clean.ended_s, None):
            outcome = simulate(schedule, RUN, folder=folder, book=book, kill_at_s=at_s)
        assert totals_of(read_ledger(book.store)) == outcome.totals
        wasted[stale] = outcome.totals.wasted_tokens["interrupted"]
        assert max(max(step.lags.publications, default=0) for step in outcome.of(Stepped)) <= 1
    assert wasted["wait"] > 0 == wasted["mask"]


# -- configs and live runs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        {"name": "tailrace", "groups_in_flight": 24, "staleness": 1, "stale": "mask"},
        {"name": "pipelinerl", "in_flight_per_engine": 24, "ring_groups": 16, "staleness": 1},
    ],
    ids=lambda words: words["name"],
)
def test_a_loss_with_a_ratio_for_a_sequence_and_a_mask_contradict_each_other(
    words: dict[str, object], tmp_path: Path
) -> None:
    path = write_small_run(tmp_path)
    config = load_config(path).model_copy(update={"schedule": {"groups_per_step": 8, **words}})
    resolve(config)
    gspo = config.model_copy(update={"algorithm": AlgorithmSettings(name="gspo")})
    with pytest.raises(ConfigError, match=r"algorithm.loss = 'gspo': it has one ratio for a sequence"):
        resolve(gspo)


def test_a_bound_that_waits_needs_few_groups_in_flight_and_one_that_masks_does_not(tmp_path: Path) -> None:
    config = load_config(write_small_run(tmp_path))
    words = {"name": "tailrace", "groups_per_step": 2, "groups_in_flight": 8, "staleness": 1}
    with pytest.raises(ConfigError, match="8 groups in flight cannot be trained in 2 steps of 2"):
        resolve(config.model_copy(update={"schedule": words}))
    resolve(config.model_copy(update={"schedule": {**words, "stale": "mask"}}))


def test_a_live_run_masks_what_is_too_old_and_its_books_close(tmp_path: Path) -> None:
    """Twice as many groups are in flight as a bound of 0 could train in time without masks."""
    path = write_small_run(tmp_path)
    text = path.read_text().replace('name = "rolloutpipe"\ngroups_per_round = 4\n', 'name = "tailrace"\n')
    path.write_text(text.replace("rounds = 3", "rounds = 8"))
    words = {"groups_in_flight": "4", "staleness": "0", "stale": "mask"}
    more = [word for key, value in words.items() for word in (f"--schedule.{key}", value)]
    assert train_here(path, *more, "--run.eval_every", "0", "--engine.max_num_seqs", "2") == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    tokens = summary["tokens"]
    assert tokens["masked"] > 0 < tokens["trained"]
    assert tokens["generated"] == tokens["trained"] + tokens["masked"] + tokens["parked"]
    assert summary["ages"]["staleness_max"] == 0.0
    with closing(Store.open(tmp_path / "out" / "ledger.sqlite", only_read=True)) as store:
        totals = totals_of(read_ledger(store))
    assert (totals.trained_tokens, totals.masked_tokens) == (tokens["trained"], tokens["masked"])
