"""Schedules with stale = "verify": tokens that would be too old are verified, or generated anew."""

import asyncio
import json
import random
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.played import Calls
from helpers.played import world as played
from helpers.small_run import train_here, write_small_run
from helpers.virtual import EXACT, Book, Outcome, change, reporting, simulate, worlds
from tailrace.clock import now
from tailrace.config import load_config
from tailrace.contracts import environments
from tailrace.contracts.environments import Policy
from tailrace.contracts.weights import Weights
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.run import Run
from tailrace.drivers.assembly.schedule import resolve
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.drivers.environments.settings import PythonSettings
from tailrace.errors import ConfigError, ScheduleError
from tailrace.kinds import kind_of
from tailrace.ledger.base import DRAFTED
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import Store, read_ledger
from tailrace.record.events import (
    Event,
    Published,
    RequestEnded,
    RequestStarted,
    SampleScored,
    Stepped,
    TokensWasted,
)
from tailrace.schedules import SCHEDULES
from tailrace.schedules.window import VerifiedWindow
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)
from tailrace.types import KV, Group, Prompt, Sample, SampleId

SURVIVALS = (0.0, 0.5, 0.95, 0.99, 1.0)


def random_run(seed: int):
    """A schedule with its parameters, a run and a world, drawn at random."""
    chance = random.Random(seed)
    U, max_cuts = chance.randint(1, 3), chance.randint(1, 4)
    many = chance.randint(U, (max_cuts + 1) * U)
    name, parameters = chance.choice(
        [
            ("tailrace", {"groups_per_step": U, "groups_in_flight": many}),
            ("bubblespec", {"groups_per_step": U, "groups_per_round": U * chance.randint(1, 3)}),
            ("april", {"groups_per_round": U, "groups_launched": many}),
            (
                "pipelinerl",
                {
                    "groups_per_step": U,
                    "in_flight_per_engine": chance.randint(1, 12),
                    "ring_groups": chance.randint(U, U + 4),
                    "ring_full": chance.choice(["block", "drop_oldest"]),
                    "scoring_groups": chance.choice([None, 1, 2]),
                },
            ),
        ]
    )
    engines = SimEngineSettings(
        count=2,
        slots=chance.choice([1, 3, 16]),
        kv_tokens=chance.choice([320, 10_000]),
        abort_s=chance.choice([0.0, 0.05, 1.0]),
        load_s=chance.choice([0.0, 0.5]),
        survival=chance.choice(SURVIVALS),
    )
    world = SimSettings(
        engines=engines,
        trainer=SimTrainerSettings(tokens_per_s=chance.choice([500.0, 50_000.0])),
        lengths=SimLengthSettings(
            median_tokens=40, sigma=chance.choice([0.0, 1.3]), max_tokens=300, prompt_tokens=10
        ),
        rewards=SimRewardSettings(
            median_s=chance.choice([0.0, 0.3]), failing=chance.choice([0.0, 0.3]), timeout_s=2.0
        ),
    )
    run = RunSettings(rounds=4, group_size=chance.randint(2, 3), seed=seed)
    bound = {"staleness": chance.choice([0, 1, 3]), "stale": "verify", "verify_max_cuts": max_cuts}
    bound = {} if name == "bubblespec" else bound
    return partial(SCHEDULES[name], **parameters, **bound), run, world


def test_in_200_worlds_each_trained_token_is_within_its_bound_and_each_sample_ends_within_its_cuts() -> None:
    cuts, changed, num_at_limit = set[int](), 0, 0
    for seed in range(200):
        schedule, run, world = random_run(seed)
        outcome = simulate(schedule, run, world)
        words = {"staleness": 0, "verify_max_cuts": 1} | schedule.keywords
        bound, max_cuts = words["staleness"], words["verify_max_cuts"]
        for step in outcome.of(Stepped):
            assert max(step.lags.publications, default=0) <= bound
            for sample in step.samples:
                assert sample.group.cuts <= max_cuts
                cuts.add(sample.group.cuts)
                num_at_limit += sample.group.cuts == max_cuts
        wasted = sum(each.num_tokens for each in outcome.of(TokensWasted) if each.reason == "changed")
        assert outcome.totals.wasted_tokens["changed"] == wasted
        assert wasted == 0 or world.engines.survival < 1
        changed += wasted
    assert changed > 10_000 and num_at_limit > 10 and cuts >= {0, 1, 2, 3}


def test_in_100_worlds_episodes_are_trained_whole_within_their_bound() -> None:
    """A call is made again only in an episode of which a turn has changed."""
    changed = num_again = 0
    for seed in range(100):
        schedule, run, world = random_run(seed)
        environment = Calls(turns=1 + seed % 4)
        outcome = simulate(schedule, run, world, parts=played(environment, world))
        words = {"staleness": 0, "verify_max_cuts": 1} | schedule.keywords
        for step in outcome.of(Stepped):
            assert max(step.lags.publications, default=0) <= words["staleness"]
            for sample in step.samples:
                assert sample.group.cuts <= words["verify_max_cuts"]
                assert len(sample.turns) == environment.turns and not sample.in_episode
                assert sample.turns[-1].num_tokens == sample.num_tokens
        cut = {event.sample for event in outcome.of(TokensWasted) if event.reason == "changed"}
        again = {sample for (sample, _, _), num in Counter(environment.answered).items() if num > 1}
        assert again <= cut
        changed, num_again = changed + len(cut), num_again + len(again)
    assert changed > 200 and num_again > 100, (changed, num_again)


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_an_ended_episode_that_does_not_change_keeps_its_reward_or_fails_if_it_is_not_repeated(
    is_repeatable: bool,
) -> None:
    """Each is played again for each publication for which it waits, and would get another reward. An
    environment that then ends after its first turn leaves turns that no engine has verified."""

    class Again(Calls):
        async def run(self, prompt: Prompt, policy: Policy) -> environments.Outcome:
            is_again = (policy.id, 0, 0) in self.answered
            self.turns = 1 if is_again and not is_repeatable else 3
            await super().run(prompt, policy)
            return environments.Outcome(0.75 if is_again else 0.5)

    schedule = partial(
        SCHEDULES["tailrace"], groups_per_step=1, groups_in_flight=4, staleness=0, stale="verify"
    )
    world = change(EXACT, engines=change(EXACT.engines, slots=8))
    outcome = simulate(schedule, RunSettings(rounds=6, group_size=2), world, parts=played(Again(), world))
    trained = [sample for step in outcome.of(Stepped) for sample in step.samples]
    assert [(sample.reward, len(sample.turns)) for sample in trained] == [(0.5, 3)] * 12
    scored = Counter((event.reward, event.failure) for event in outcome.of(SampleScored))
    num_failed = scored.pop((None, "environment not repeatable"), 0)
    assert [*scored] == [(0.5, None)] and (num_failed == 0) is is_repeatable
    num_samples = len({event.sample for event in outcome.of(RequestStarted)})
    assert scored[0.5, None] == num_samples
    assert len(outcome.of(RequestStarted)) > 3 * num_samples


def test_a_bound_of_0_waits_for_nothing_and_trains_tokens_of_the_published_weights_only() -> None:
    """The pool has four steps of groups, of which "wait" takes one with a bound of 0. No response changes, so
    none is generated twice, and each is scored once, although complete groups go back to the engines."""
    run = RunSettings(rounds=6, group_size=2)
    world = change(EXACT, engines=change(EXACT.engines, slots=16), lengths=change(EXACT.lengths, sigma=1.0))
    schedule = partial(
        SCHEDULES["tailrace"],
        groups_per_step=2,
        groups_in_flight=8,
        staleness=0,
        stale="verify",
        verify_max_cuts=3,
    )
    outcome = simulate(schedule, run, world)
    assert all({*step.lags.publications} == {0} for step in outcome.of(Stepped))
    scored = [event.sample for event in outcome.of(SampleScored)]
    assert len(scored) == len({*scored})
    ended = [event for event in outcome.of(RequestEnded) if event.outcome == "stop"]
    again = [event for event in ended if event.num_gained == 0]
    assert len(ended) - len(again) == len({event.sample for event in ended}) < len(ended)
    assert {sample.group.cuts for step in outcome.of(Stepped) for sample in step.samples} == {0}
    assert outcome.totals.wasted_tokens == {}
    assert {event.kv for event in outcome.of(Published)} == {"recompute"}


def test_a_response_that_changes_loses_its_end_its_reward_and_a_scoring_under_way() -> None:
    """Each update changes each first token. Rewards take longer than a round, so publications come while
    finished samples are scored: no reward of a text that is gone is used."""
    run = RunSettings(rounds=6, group_size=2)
    world = change(
        EXACT,
        engines=change(EXACT.engines, slots=16, survival=0.0),
        lengths=change(EXACT.lengths, sigma=1.0),
        rewards=change(EXACT.rewards, median_s=30.0),
    )
    schedule = partial(
        SCHEDULES["tailrace"],
        groups_per_step=1,
        groups_in_flight=4,
        staleness=0,
        stale="verify",
        verify_max_cuts=3,
    )
    outcome = simulate(schedule, run, world)
    state = dict[SampleId, str]()
    num_lost_rewards = num_lost_scorings = 0
    for event in outcome.events:
        match event:
            case RequestEnded(outcome="stop"):
                state[event.sample] = "ended"
            case SampleScored():
                assert state[event.sample] == "ended"
                state[event.sample] = "scored"
            case TokensWasted():
                num_lost_rewards += state.get(event.sample) == "scored"
                num_lost_scorings += state.get(event.sample) == "ended"
                state[event.sample] = "changed"
            case Stepped():
                assert {state[sample.id] for sample in event.samples} == {"scored"}
    assert num_lost_rewards > 0 < num_lost_scorings


class LateEngine(SimEngine):
    """Loads weights after some seconds, as a live engine: until then requests in flight go on with the old
    ones, and new requests wait. The pool learns after `end_s` that a request has ended."""

    delay_s = open_s = end_s = 0.0

    async def generate(self, sample: Sample) -> None:
        await asyncio.sleep(self.open_s - now())
        await super().generate(sample)
        await asyncio.sleep(self.end_s)

    async def load(self, weights: Weights, *, kv: KV) -> None:
        self.open_s = now() + self.delay_s
        await asyncio.sleep(self.delay_s)
        await super().load(weights, kv=kv)


def late(parts: RunComponents, *delays_s: float, end_s: float = 0.0) -> RunComponents:
    """Parts whose engines take so long to load."""
    for engine, delay_s in zip(parts.engines, delays_s, strict=True):
        engine.__class__, engine.delay_s, engine.end_s = LateEngine, delay_s, end_s
    return parts


class Members(Outcome):
    """Looks at the finished members after each event."""

    def on(self, event: Event) -> None:
        super().on(event)
        for group in self.run.pool.groups if hasattr(self, "run") else ():
            assert all(sample.ended for sample in group.kept if sample.fate is None)


@pytest.mark.parametrize(("seed", "end_s"), [(12, 0.0), (43, 0.0), (0, 0.7), (49, 0.7)])
def test_a_response_is_no_finished_member_before_its_request_has_ended(seed: int, end_s: float) -> None:
    """There may be a publication meanwhile, or another member ends. Else it would be served twice, or its
    group, whose reward is of an earlier verification, be trained while an engine verifies it."""
    schedule, run, world = random_run(seed)

    def parts() -> RunComponents:
        return late(simulated_parts(world, run.seed), 0.0, 2.0, end_s=end_s)

    outcome = simulate(schedule, change(run, rounds=6), world, parts=parts, into=Members())
    steps = outcome.of(Stepped)
    assert max(max(step.lags.publications) for step in steps) <= schedule.keywords["staleness"]


def test_a_verification_that_changes_nothing_wakes_a_trainer_that_waited_for_its_answer() -> None:
    """Group 1 has 1000 tokens, the others have 10. Its engine loads in 15 s, so the second publication is at
    25 s. Then group 1 may be cut, and is due. Its answer comes at 40 s; group 3 is complete at 35 s."""
    sim = change(
        EXACT, engines=change(EXACT.engines, slots=1), trainer=change(EXACT.trainer, tokens_per_s=1e9)
    )
    parts = worlds(sim, lambda sample: 1000 if sample.id.prompt == 1 else 10, count=2)
    few = {"groups_per_step": 1, "groups_in_flight": 2, "verify_max_cuts": 1}
    schedule = partial(SCHEDULES["tailrace"], **few, staleness=1, stale="verify")
    run = RunSettings(rounds=3, group_size=1)
    outcome = simulate(schedule, run, sim, parts=lambda: late(parts(), 0.0, 15.0))
    steps = [(round(step.end_s), step.samples[0].id.prompt) for step in outcome.of(Stepped)]
    assert steps == [(10, 0), (20, 2), (40, 3)]


def test_each_version_counts_as_one_cut_and_a_group_that_is_due_is_never_refused() -> None:
    """Engines load a version one after another, so a member may be cut by an older one after another member
    was by a newer one. A member that its group has discarded cuts it no more."""
    groups = [Group(Prompt(number, [1]), 2, []) for number in range(3)]
    for group in groups:
        group.samples = [Sample(SampleId(group.prompt.index, 0, number), group) for number in range(2)]
        for sample in group.samples:
            sample.grow(10, 0)
    first, second = groups[0].samples
    first.verify(5, 2)
    second.verify(5, 1)
    second.verify(3, 2)
    assert (groups[0].cuts, groups[0].last_cut) == (1, 2)
    groups[0].samples.remove(second)
    second.verify(1, 3)
    assert groups[0].cuts == 1
    for group in groups:
        group.cuts = 4
    pool = SimpleNamespace(groups=groups)
    run = SimpleNamespace(pool=pool, staleness=lambda group: 0, declared=0, version=3)
    assert VerifiedWindow(run, 1, 4, 3).select(groups, 1) == groups[:1]


def test_weights_for_some_engines_only_are_refused() -> None:
    """An engine that lacks them could not verify, and a finished response would be generated on."""

    async def schedule(run: Run) -> None:
        run.declare(staleness=0, stale="verify")
        async for _ in run.rounds():
            await run.publish(to=run.engines[:1])

    with pytest.raises(ScheduleError, match="each engine needs the newest weights"):
        simulate(schedule, RunSettings(rounds=1, group_size=1), EXACT)


def test_a_resumed_run_verifies_all_that_it_had(tmp_path: Path) -> None:
    """No reward and no token of the first life is trained before its new weights have drawn it again."""
    schedule = partial(SCHEDULES["april"], groups_per_round=2, groups_launched=6, staleness=0, stale="verify")
    world = change(
        EXACT, engines=change(EXACT.engines, slots=12, survival=0.9), lengths=change(EXACT.lengths, sigma=1.0)
    )
    book, run = Book(), RunSettings(rounds=5, group_size=2, checkpoint_every=1)
    for at_s in (60.0, 90.0, None):
        outcome = simulate(schedule, run, world, folder=tmp_path, book=book, kill_at_s=at_s)
        books = read_ledger(book.store)
    assert totals_of(books) == outcome.totals
    assert outcome.totals.wasted_tokens["changed"] > 0
    assert outcome.totals.wasted_tokens["interrupted"] == 0
    assert all({*step.lags.publications} == {0} for step in outcome.of(Stepped))


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            {"name": "tailrace", "groups_in_flight": 11, "staleness": 0, "verify_max_cuts": 4},
            "schedule.groups_in_flight = 11: groups of which 2 are trained in a step",
        ),
        ({"name": "april", "groups_launched": 4}, "schedule.staleness = None: with stale"),
    ],
    ids=["groups_in_flight", "staleness"],
)
def test_parameters_that_could_cut_a_response_for_ever_are_refused(
    words: dict[str, object], refusal: str, tmp_path: Path
) -> None:
    groups = {"groups_per_round" if words["name"] == "april" else "groups_per_step": 2}
    config = load_config(write_small_run(tmp_path))
    with pytest.raises(ConfigError, match=refusal):
        resolve(config.model_copy(update={"schedule": {**words, **groups, "stale": "verify"}}))


def test_engines_that_draw_nothing_again_effects_and_rewards_of_groups_are_refused(tmp_path: Path) -> None:
    words = {"name": "tailrace", "groups_per_step": 2, "groups_in_flight": 4, "staleness": 0}
    config = load_config(write_small_run(tmp_path))
    drafting = {"name": "bubblespec", "groups_per_step": 2, "groups_per_round": 2}
    verified = config.model_copy(update={"schedule": {**words, "stale": "verify"}})
    resolve(verified)
    for words, schedule in (("stale = 'verify'", verified.schedule), ("name = 'bubblespec'", drafting)):
        with pytest.raises(ConfigError, match=f"schedule.{words}: an engine .* cannot draw"):
            changes = {"engine": kind_of("engine", "vllm").settings(), "schedule": schedule}
            resolve(verified.model_copy(update=changes))
        played = PythonSettings(environment="a.py:A")
        with pytest.raises(ConfigError, match=r"environment.calls_have_effects = True: with schedule"):
            resolve(verified.model_copy(update={"environment": played, "schedule": schedule}))
        harmless = PythonSettings(environment="a.py:A", calls_have_effects=False)
        resolve(verified.model_copy(update={"environment": harmless, "schedule": schedule}))
        of_groups = verified.reward.model_copy(update={"batch": "group"})
        with pytest.raises(ConfigError, match=r"reward.batch = 'group': with schedule.* a member may change"):
            resolve(verified.model_copy(update={"reward": of_groups, "schedule": schedule}))


@pytest.mark.parametrize(
    ("name", "bound"),
    [("tailrace", 0), ("pipelinerl", 0)]
    + [
        pytest.param(name, bound, marks=pytest.mark.slow)
        for name, bound in (("tailrace", 1), ("pipelinerl", 3))
    ],
)
def test_a_live_run_trains_no_older_token_and_its_books_close(name: str, bound: int, tmp_path: Path) -> None:
    """More groups are in flight than the bound could train in time. A step publishes a version."""
    path = write_small_run(tmp_path)
    text = path.read_text().replace('name = "rolloutpipe"\ngroups_per_round = 4\n', f'name = "{name}"\n')
    path.write_text(text.replace("rounds = 3", "rounds = 6"))
    words = {"staleness": str(bound), "stale": "verify"}
    words |= (
        {"groups_in_flight": str(4 * (bound + 1))}
        if name == "tailrace"
        else {"in_flight_per_engine": "16", "ring_groups": "8"}
    )
    more = [word for key, value in words.items() for word in (f"--schedule.{key}", value)]
    assert train_here(path, *more, "--run.eval_every", "0", "--engine.max_num_seqs", "2") == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    tokens = summary["tokens"]
    assert tokens["trained"] > 0 and {*tokens["wasted"]} <= {"changed"}
    assert tokens["generated"] == tokens["trained"] + tokens["parked"] + sum(tokens["wasted"].values())
    assert summary["ages"]["staleness_max"] <= bound
    with closing(Store.open(tmp_path / "out" / "ledger.sqlite", only_read=True)) as store:
        books = read_ledger(store)
    for each in books.trainings.values():
        versions = [span.version for span in books.samples[each.id].spans]
        assert each.step - 1 - min(versions) <= bound and (bound or len({*versions}) == 1)


@pytest.mark.slow
def test_bubblespec_trains_the_samples_that_serial_does_although_updates_change_its_drafts(
    tmp_path: Path,
) -> None:
    """Live, in float32, with a learning rate at which an update changes some tokens: ids and rewards."""
    found = []
    for name in ("serial", "bubblespec"):
        (folder := tmp_path / name).mkdir()
        path = write_small_run(folder)
        path.write_text(
            path.read_text().replace('"rolloutpipe"', f'"{name}"').replace("rounds = 3", "rounds = 6")
        )
        words = {"run.eval_every": "0", "ledger.keep_tokens": "true", "trainer.learning_rate": "1e-2"}
        assert train_here(path, *(word for key, value in words.items() for word in (f"--{key}", value))) == 0
        with closing(Store.open(folder / "out" / "ledger.sqlite", only_read=True)) as store:
            books = read_ledger(store)
        trained = {each.id: books.samples[each.id] for each in books.trainings.values()}
        found.append(
            {
                id: (sample.reward, b"".join(row.ids for row in books.tokens[id]))
                for id, sample in trained.items()
            }
        )
        tokens = json.loads((folder / "out" / "summary.json").read_text())["tokens"]
    assert found[0] == found[1] and len(found[0]) == 6 * 4 * 2
    assert tokens["drafted"] > 0 < tokens["wasted"]["changed"]
    kept = ("trained", "parked", "drafted")
    assert tokens["generated"] == sum(tokens[state] for state in kept) + sum(tokens["wasted"].values())


def test_drafted_tokens_of_a_killed_run_are_counted_and_the_next_life_verifies_them(tmp_path: Path) -> None:
    schedule = partial(SCHEDULES["bubblespec"], groups_per_round=2, groups_per_step=2)
    world = change(
        EXACT, engines=change(EXACT.engines, survival=0.9), lengths=change(EXACT.lengths, sigma=1.0)
    )
    book, run = Book(flush_s=0.1), RunSettings(rounds=4, group_size=2, checkpoint_every=1)
    simulate(schedule, run, world, folder=tmp_path, book=book, kill_at_s=30.0, beside=reporting)
    books = read_ledger(book.store)
    drafted = [group.prompt for group in books.groups.values() if group.reason == DRAFTED]
    assert drafted == [2, 3]
    tokens = sum(each.num_tokens for each in books.samples.values() if each.prompt in drafted)
    assert books.drafted_tokens == tokens > 0
    outcome = simulate(schedule, run, world, folder=tmp_path, book=book)
    assert {2, 3} <= {*outcome.trained} and outcome.totals.wasted_tokens["changed"] > 0
    assert all({*step.lags.publications} == {0} for step in outcome.of(Stepped))
    known = outcome.totals.num_known_tokens + (books := read_ledger(book.store)).held_tokens
    assert known + books.drafted_tokens == book.num_generated and books.drafted_tokens > 0
