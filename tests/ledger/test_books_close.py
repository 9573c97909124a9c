"""The first of what must always hold, for random worlds.

Every run ends with its books checked by `Run.finish`; here hypothesis draws the schedule, the lengths, the
failures, the filter, the engines that die, how fast the ledger is written, and the moments at which the whole
run is killed and resumed; and what the store says is checked against the life that ended.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.slow_disk import SlowDisk
from helpers.virtual import (
    ON_POLICY,
    PINNED,
    Book,
    Death,
    Outcome,
    beside_each_other,
    change,
    dying,
    regenerated,
    reporting,
    simulate,
)
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.trainer import StepStats
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.ledger.base import LedgerTables, distance
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import read_ledger
from tailrace.record.events import RoundStarted, Stepped
from tailrace.rollout.admission import AtMost, Frontier, FrontierFirst
from tailrace.rollout.members import GroupSettings
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)
from tailrace.types import SampleId

ADMISSIONS = st.one_of(
    st.builds(AtMost, requests_per_engine=st.sampled_from([None, 1, 5])),
    st.builds(Frontier, groups=st.integers(1, 4)),
    st.builds(FrontierFirst, groups=st.integers(1, 4)),
)
KVS = st.sampled_from(["keep", "recompute"])
FACTORS = st.sampled_from([1.0, 1.25, 2.0])


@st.composite
def schedules(draw: st.DrawFn) -> partial:  # type: ignore[type-arg]
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    U = draw(st.integers(1, 3))
    match name:
        case "serial" | "one_step_off" | "seer" | "sortedrl" | "sortedrl_on_policy" | "bubblespec":
            parameters = {"groups_per_round": U * draw(st.integers(1, 3)), "groups_per_step": U}
        case "rolloutpipe" | "rolloutpipe_eager":
            parameters = {
                "groups_per_round": U * draw(st.integers(1, 3)),
                "groups_per_step": U,
                "admission": draw(ADMISSIONS),
            }
            parameters["max_tokens_per_batch"] = draw(st.sampled_from([50, 5000]))
        case "april":
            parameters = {"groups_per_round": U, "groups_launched": U + draw(st.integers(0, 4))}
            bound = draw(st.sampled_from([None, 4]))  # with U = 1 and 5 launched, 4 is the least
            parameters |= {"staleness": bound, "kv": draw(KVS)}
            if bound and draw(st.booleans()):
                parameters |= {"stale": "verify", "staleness": draw(st.integers(0, 2))}
        case "april_dapo":
            parameters = {"groups_per_round": U, "groups_per_draw": draw(st.integers(1, 4)), "kv": draw(KVS)}
        case "tailbatch" | "rollpacker" | "tailbatch_async":
            parameters = {
                "groups_per_round": U,
                "prompt_speculation": draw(FACTORS),
                "response_speculation": draw(FACTORS),
            }
        case "tailbatch_dapo":
            parameters = {
                "groups_per_round": U,
                "requests_per_engine": draw(st.integers(1, 12)),
                "response_speculation": draw(FACTORS),
            }
        case "streamrl" | "streamrl_async" | "periodic_asynchrony":
            parameters = {"groups_per_round": U}
        case "windowed_fifo":
            in_flight, window = U + draw(st.integers(0, 4)), draw(st.integers(1, 6))
            parameters = {"groups_per_step": U, "groups_in_flight": in_flight, "window": window}
        case "conventional":
            parameters = {"groups_per_step": U, "steps_per_round": draw(st.integers(1, 3))}
        case "dora" | "laminar" | "trl_async":
            bound = draw(st.integers(0, 1))
            in_flight = draw(st.integers(U, (bound + 1) * U))
            parameters = {"groups_per_step": U, "groups_in_flight": in_flight, "staleness": bound}
        case "tinker_async":
            parameters = {"groups_per_step": U, "steps_off_policy": draw(st.integers(0, 3))}
        case "tailrace":
            bound = draw(st.integers(0, 3))
            stale = draw(st.sampled_from(["wait", "mask", "verify"]))
            in_flight = draw(st.integers(U, (bound + 1 if stale == "wait" else 4) * U))
            parameters = {
                "groups_per_step": U,
                "groups_in_flight": in_flight,
                "staleness": bound,
                "stale": stale,
                "kv": draw(KVS),
            }
        case "tailrace_on_policy":
            parameters = {
                "groups_per_round": U,
                "prompt_speculation": draw(FACTORS),
                "rounds_sorted": draw(st.integers(1, 3)),
            }
        case "pipelinerl":
            parameters = {
                "groups_per_step": U,
                "in_flight_per_engine": draw(st.integers(1, 12)),
                "ring_groups": U + draw(st.integers(0, 4)),
            }
            parameters["ring_full"] = draw(st.sampled_from(["block", "drop_oldest"]))
            parameters["scoring_groups"] = draw(st.sampled_from([None, 1, 2]))
            parameters |= {"kv": draw(KVS), "min_ess": draw(st.sampled_from([0.0, 0.9]))}
            parameters["staleness"] = draw(st.sampled_from([None, 0, 1, 3]))
            if parameters["staleness"] is not None and draw(st.booleans()):
                parameters["stale"] = "verify"
        case _:
            raise AssertionError(f"{name} is not drawn")
    return partial(SCHEDULES[name], **parameters)


RULES = st.builds(
    GroupSettings,
    keep=st.sampled_from([None, 2]),
    deadline_s=st.sampled_from([None, 0.5, 3.0]),
    replacements=st.integers(0, 3),
)
RUNS = st.builds(
    RunSettings,
    groups=st.one_of(st.just(GroupSettings()), RULES),
    rounds=st.sampled_from([4, 3, 2, 1]),
    group_size=st.integers(2, 3),
    seed=st.integers(0, 1000),
    checkpoint_every=st.integers(1, 2),
    eval_every=st.integers(0, 2),
    eval_prompts=st.just(3),
)
ALGORITHMS = st.builds(
    AlgorithmSettings,
    advantage=st.sampled_from(["group", "batch"]),
    filter=st.sampled_from(["none", "zero_variance"]),
    kl_coef=st.sampled_from([0.0, 0.1]),
    kl_in=st.sampled_from(["loss", "reward"]),
)
WORLDS = st.builds(
    SimSettings,
    engines=st.builds(
        SimEngineSettings,
        count=st.just(2),
        slots=st.sampled_from([1, 3, 16]),
        versions=st.just(2),
        kv_tokens=st.sampled_from([320, 10_000]),
        abort_s=st.sampled_from([0.0, 0.05, 1.0]),
        load_s=st.sampled_from([0.0, 0.5]),
        survival=st.sampled_from([0.95, 0.0, 0.99, 1.0]),
    ),
    trainer=st.builds(SimTrainerSettings, tokens_per_s=st.sampled_from([500.0, 50_000.0])),
    lengths=st.builds(
        SimLengthSettings,
        median_tokens=st.just(40),
        sigma=st.sampled_from([0.0, 1.3]),
        correlation=st.sampled_from([0.0, 0.7, 1.0]),
        max_tokens=st.just(300),
        prompt_tokens=st.just(10),
        rows=st.sampled_from([None, 5]),
    ),
    rewards=st.builds(
        SimRewardSettings,
        median_s=st.sampled_from([0.0, 0.3]),
        failing=st.sampled_from([0.0, 0.3]),
        hanging=st.sampled_from([0.0, 0.1]),
        timeout_s=st.just(2.0),
    ),
)
DEATHS = st.lists(st.builds(Death, st.floats(0, 8), st.integers(0, 1), st.floats(0, 4)), max_size=3)


class Kill(NamedTuple):
    """The whole run is killed; and its newest checkpoint may be removed."""

    at_s: float
    loses_newest: bool


KILLS = st.lists(
    st.builds(Kill, st.integers(1, 300).map(lambda n: n / 40), st.integers(0, 5).map(lambda n: n == 0)),
    min_size=1,
    max_size=4,
)
BOOKS = st.builds(Book, commit_s=st.sampled_from([0.0, 0.01, 1.0]), flush_s=st.sampled_from([0.05, 0.2, 5.0]))
WRITES = st.sampled_from([0.0, 0.2, 1.0])
"""Seconds in which a checkpoint is written."""


FIXED = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
drawn = given(schedules(), RUNS, ALGORITHMS, WORLDS, DEATHS, KILLS, BOOKS, WRITES)


@FIXED
@drawn
def test_the_books_close_in_every_world(
    schedule: partial,  # type: ignore[type-arg]
    run: RunSettings,
    algorithm: AlgorithmSettings,
    world: SimSettings,
    deaths: list[Death],
    kills: list[Kill],
    book: Book,
    write_s: float,
) -> None:
    if schedule.keywords.get("response_speculation", 1.0) > 1 or algorithm.filter != "none":
        run = change(run, groups=GroupSettings())  # its groups are races; or it filters those of one member
    if any(kill.loses_newest for kill in kills):
        run = change(run, keep_optimizer=0)  # it goes on from an older one
    lives: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kill in [*kills, None]:
            outcome = simulate(
                schedule,
                run,
                world,
                folder=folder,
                book=book,
                kill_at_s=kill.at_s if kill else None,
                beside=beside_each_other(dying(*deaths), reporting),
                parts=lambda: replace(
                    simulated_parts(world, run.seed, reference=algorithm.needs_reference),
                    trainer=Witness(world.trainer, write_s),
                ),
                algorithm=algorithm,
            )
            assert regenerated(outcome.events, verifies=outcome.run.verifies) == []
            books = read_ledger(book.store)
            assert set(books.groups) == set(range(books.run.num_drawn)), "a prompt was lost"
            assert lives.items() <= (lives := _lives_of(books)).items(), "a prompt was drawn twice"
            if schedule.func.__name__ in ON_POLICY:
                _check_on_policy(outcome, books)
            if schedule.func.__name__ in PINNED:
                _check_pinned(books)
            if not outcome.killed:
                break
            if kill and kill.loses_newest and (newest := max(folder.glob("round_??????"), default=None)):
                shutil.rmtree(newest)
    assert outcome.run.overtime
    totals = outcome.totals
    assert totals_of(books) == totals
    assert totals.num_known_tokens + books.held_tokens + books.drafted_tokens == book.num_generated
    assert books.drafted_tokens == outcome.run._ledger.drafted_tokens
    assert totals.num_drawn == totals.groups.total() + sum(g.fate is None for g in books.groups.values())
    _check_lineage(books)
    witness = outcome.parts.trainer
    assert isinstance(witness, Witness)
    trained = [training.id for training in books.trainings.values() if training.undone is None]
    assert sorted(trained) == sorted(witness.trained)


test_the_books_close_in_hundreds_of_worlds = pytest.mark.slow(
    settings(FIXED, max_examples=300)(drawn(test_the_books_close_in_every_world.hypothesis.inner_test))
)


class Witness(SlowDisk):
    """Whose weights are the list of what they were trained on."""

    def __init__(self, cost: SimTrainerSettings, write_s: float) -> None:
        super().__init__(cost, write_s)
        self.trained: list[SampleId] = []

    async def step(self) -> StepStats:
        stats = await super().step()
        self.trained += stats.samples
        return stats

    async def save(self, folder: Path) -> Awaitable[None]:
        written, trained = await super().save(folder), msgspec.json.encode(self.trained)

        async def write() -> None:
            await written
            (folder / "trained").write_bytes(trained)

        return asyncio.ensure_future(write())

    async def restore(self, folder: Path) -> None:
        await super().restore(folder)
        self.trained = msgspec.json.decode((folder / "trained").read_bytes(), type=list[SampleId])


def _lives_of(books: LedgerTables) -> dict[int, int]:
    """In which life each prompt was drawn."""
    return {prompt: group.life for prompt, group in books.groups.items()}


def _check_lineage(books: LedgerTables) -> None:
    """Of what the last checkpoint's ancestors trained, each sample once, in steps without a gap."""
    trained = [training for training in books.trainings.values() if training.undone is None]
    ids = [training.id for training in trained]
    assert len(ids) == len(set(ids)), "a sample was trained twice"
    assert set(ids) == {id for id, sample in books.samples.items() if sample.fate == "trained"}
    assert all(0 <= training.masked <= books.samples[training.id].num_tokens for training in trained)
    steps = {training.step for training in trained}
    assert steps == set(range(1, len(steps) + 1))
    for prompt, group in books.groups.items():
        members = [sample for sample in books.samples.values() if sample.prompt == prompt]
        fates = {sample.fate for sample in members if sample.num_tokens}
        assert ("trained" in fates) == (group.fate == "trained")
        assert group.fate is None or None not in fates


def _check_pinned(books: LedgerTables) -> None:
    """Every sample has tokens of one version, which a life that goes on from it has under another number."""
    for sample in books.samples.values():
        for origin in sample.spans:
            first = sample.spans[0]
            assert distance(books.lives, (origin.life, origin.version), (first.life, first.version)) == 0


def _check_on_policy(outcome: Outcome, books: LedgerTables) -> None:
    """Whatever was trained was produced by the very publication that the round began with."""
    life = max(books.lives)
    for event in outcome.events:
        if isinstance(event, RoundStarted):
            version = event.version
        elif isinstance(event, Stepped):
            rows = [books.samples[sample.id] for sample in event.samples if sample.id in books.samples]
            for origin in [origin for row in rows for origin in row.spans]:
                assert distance(books.lives, (life, version), (origin.life, origin.version)) == 0
