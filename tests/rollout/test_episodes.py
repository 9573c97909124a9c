"""Episodes in the pool: what is parked, moved or fails goes on from its record, in virtual time."""

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.played import CALL_S, OBSERVED, SHORT, Calls, episodes, world
from helpers.virtual import EXACT, SCHEDULES_BY_NAME, SETTINGS, SIM, Book, Death, Outcome, dying, simulate
from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.clock import now
from tailrace.contracts import environments as base
from tailrace.contracts.environments import EpisodeOver, Policy
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.run import Run
from tailrace.drivers.reward.kinds import NoFunctions
from tailrace.errors import EnvironmentBroken, EnvironmentFailed, LedgerError, WorkerDied
from tailrace.record.events import Recorder, RequestEnded, RequestStarted, SampleScored, Stepped
from tailrace.rollout.episodes import Episodes
from tailrace.schedules import SCHEDULES
from tailrace.types import Group, Prompt, Sample, SampleId

EPISODE_S = 10 + CALL_S + 10 + CALL_S + 10
"""Three turns of ten tokens, and two calls."""
ONE_GROUP = RunSettings(rounds=1, group_size=1)


async def one_group(run: Run) -> None:
    run.declare(staleness=0)
    async for _ in run.rounds():
        run.pool.launch(run.prompts(1))
        await run.train(await run.pool.take(1))
        await run.publish()


def the_sample(outcome: Outcome) -> Sample:
    ((sample,),) = [step.samples for step in outcome.of(Stepped)]
    return sample


def test_an_episode_is_turns_of_the_policy_with_the_environment_s_tokens_between_them() -> None:
    environment = Calls()
    outcome = simulate(one_group, ONE_GROUP, EXACT, parts=world(environment))
    sample = the_sample(outcome)
    assert [turn.num_tokens for turn in sample.turns] == [10, 20, 30]
    assert [len(turn.observation_ids) for turn in sample.turns] == [OBSERVED, OBSERVED, 0]
    assert (sample.num_tokens, sample.finish_reason, sample.in_episode) == (30, "stop", False)
    assert [event.time_s for event in outcome.of(SampleScored)] == [EPISODE_S]
    assert outcome.totals.trained_tokens == 30
    assert sample.reward_metrics == {"environment/turns": 3}


@pytest.mark.parametrize("moment_s", [0.5, 9.5, 10.5, 12.5, 15.5, 21.5, 22.5, 30.5])
def test_a_parked_episode_goes_on_without_repeating_a_turn_or_a_call(moment_s: float) -> None:
    """A call that is under way is awaited."""

    async def interrupted(run: Run) -> None:
        run.declare(staleness=0)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            await asyncio.sleep(moment_s)
            await run.pool.park()
            run.pool.launch(run.parked.pop(1))
            await run.train(await run.pool.take(1))
            await run.publish()

    environment = Calls()
    outcome = simulate(interrupted, ONE_GROUP, EXACT, parts=world(environment))
    assert sum(event.num_gained for event in outcome.of(RequestEnded)) == 30
    tokens = [event.num_tokens for event in outcome.of(RequestStarted)]
    assert tokens == sorted(tokens)
    assert environment.made == [(SampleId(0, 0, 0), turn, number) for turn in (0, 1) for number in (0, 1)]
    # A step of decoding is lost where the interruption came within it.
    assert outcome.of(SampleScored)[0].time_s <= EPISODE_S + 1


def test_a_call_that_takes_longer_than_the_grace_is_made_again() -> None:
    async def interrupted(run: Run) -> None:
        run.declare(staleness=0)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            await asyncio.sleep(10.5)
            await run.pool.park()
            assert now() == 11.5  # the grace
            run.pool.launch(run.parked.pop(1))
            await run.train(await run.pool.take(1))
            await run.publish()

    environment = Calls()
    simulate(interrupted, ONE_GROUP, EXACT, parts=world(environment, parking_timeout_s=1.0))
    assert Counter(environment.made) == Counter(environment.answered) + Counter(
        {(SampleId(0, 0, 0), 0, number): 1 for number in (0, 1)}
    )


@pytest.mark.parametrize(
    "name", ["serial", "rolloutpipe_eager", "april", "tailbatch", "rollpacker", "pipelinerl", "tailrace"]
)
def test_every_schedule_plays_episodes_and_repeats_no_turn_and_no_call(name: str) -> None:
    environment = Calls()
    engines_die = dying(Death(20.0, 0, 9.0), Death(31.0, 1, 3.0))
    outcome = simulate(
        SCHEDULES_BY_NAME[name], SETTINGS, SIM, parts=world(environment, SIM), beside=engines_die
    )
    assert outcome.run.overtime
    assert max(Counter(environment.made).values()) == 1
    samples = [sample for step in outcome.of(Stepped) for sample in step.samples]
    assert samples and all(len(sample.turns) == 3 and not sample.in_episode for sample in samples)
    assert all(sample.turns[-1].num_tokens == sample.num_tokens for sample in samples)
    gained = Counter[SampleId]()
    for event in outcome.of(RequestEnded):
        gained[event.sample] += event.num_gained
    assert all(gained[sample.id] == sample.num_tokens for sample in samples)


def test_an_episode_of_a_killed_run_goes_on_from_what_the_ledger_has(tmp_path: Path) -> None:
    environment, book = Calls(), Book()
    parts = world(environment, parking_timeout_s=0.0)  # a process that is killed awaits nothing
    run = RunSettings(rounds=1, group_size=2)
    april = partial(SCHEDULES["april"], groups_per_round=2, groups_launched=4)
    for kill_at_s in (7.0, 11.0, 9.0, 13.0):  # in a turn, in a call, in the next turn, after the next call
        simulate(april, run, EXACT, parts=parts, book=book, folder=tmp_path, kill_at_s=kill_at_s)
    outcome = simulate(april, run, EXACT, parts=parts, book=book, folder=tmp_path)
    assert outcome.run.overtime and len(outcome.trained) == 2
    assert max(Counter(environment.answered).values()) == 1
    first_starts = {event.sample: event.num_tokens for event in reversed(outcome.of(RequestStarted))}
    assert set(first_starts.values()) == {20}


def test_an_answer_is_in_the_ledger_before_it_is_used(tmp_path: Path) -> None:
    """However rarely the ledger is written, and although a commit takes time."""
    environment, book = Calls(), Book(flush_s=1000.0, commit_s=0.5)
    parts = world(environment, parking_timeout_s=0.0)
    # The turn ends at 10 and is written at 10.5; the calls end at 12.5 and are written at 13.
    simulate(one_group, ONE_GROUP, EXACT, parts=parts, book=book, folder=tmp_path, kill_at_s=13.1)
    assert len(environment.answered) == 2
    outcome = simulate(one_group, ONE_GROUP, EXACT, parts=parts, book=book, folder=tmp_path)
    assert max(Counter(environment.answered).values()) == 1
    assert [event.num_tokens for event in outcome.of(RequestStarted)] == [10, 20]


def test_an_environment_that_gives_rewards_needs_no_reward_function() -> None:
    environment = Calls(reward=0.25)
    parts = world(environment, must_reward=True)
    outcome = simulate(one_group, ONE_GROUP, EXACT, parts=lambda: replace(parts(), rewards=NoFunctions()))
    assert the_sample(outcome).reward == 0.25
    assert [(event.reward, event.failure) for event in outcome.of(SampleScored)] == [(0.25, None)]


class Cut:
    """Every episode of an odd sample has no room for a second turn, and its agent raises."""

    async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
        await policy.complete()
        if policy.id.number % 2 == 0:
            return base.Outcome(1.0)
        raise EpisodeOver from ValueError("context_length_exceeded")


def test_a_cut_episode_without_a_reward_fails_alone_and_says_what_its_agent_raised() -> None:
    run = RunSettings(rounds=2, group_size=4)
    parts = world(Cut(), must_reward=True)
    outcome = simulate(one_group, run, EXACT, parts=lambda: replace(parts(), rewards=NoFunctions()))
    assert [len(event.samples) for event in outcome.of(Stepped)] == [2, 2]
    failed = [event for event in outcome.of(SampleScored) if event.failure]
    assert {event.failure for event in failed} == {"environment no reward"} and len(failed) == 4
    assert all(event.detail.startswith("no room was left for another turn") for event in failed)
    assert all("ValueError('context_length_exceeded')" in event.detail for event in failed)


def test_an_environment_that_never_gives_a_reward_ends_a_run_without_reward_functions() -> None:
    parts = world(Calls(), must_reward=True, max_failures=3)
    run = RunSettings(rounds=1, group_size=4)
    with pytest.raises(
        EnvironmentBroken, match=r"the last 3 episodes .* no reward: the environment gave none"
    ):
        simulate(one_group, run, EXACT, parts=lambda: replace(parts(), rewards=NoFunctions()))


class Raising:
    """Every episode of an odd sample fails after its first turn."""

    def __init__(self, error: BaseException | base.Outcome) -> None:
        self.error = error

    async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
        await policy.complete()
        if policy.id.number % 2 == 0:
            return base.Outcome(1.0)
        if isinstance(self.error, base.Outcome):
            return self.error
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no"), "environment ValueError"),
        (EnvironmentFailed("browser closed", "why"), "environment browser closed"),
        (base.Outcome(float("nan")), "environment reward"),
        (base.Outcome(1.0, {"speed": float("inf")}), "environment metrics"),
        (asyncio.CancelledError(), "environment CancelledError"),
    ],
)
def test_an_environment_that_raises_fails_the_sample_and_the_group_goes_on(
    error: BaseException | base.Outcome, reason: str
) -> None:
    outcome = simulate(one_group, RunSettings(rounds=1, group_size=4), EXACT, parts=world(Raising(error)))
    (step,) = outcome.of(Stepped)
    assert sorted(sample.id.number for sample in step.samples) == [0, 2]
    assert outcome.totals.wasted_tokens == {reason: 20}
    failures = [event for event in outcome.of(SampleScored) if event.failure]
    assert [event.failure for event in failures] == [reason] * 2
    assert all(event.detail for event in failures)


def test_an_environment_that_always_raises_ends_the_run_with_the_first_cause() -> None:
    class Broken:
        async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
            raise KeyError("column")

    with pytest.raises(
        EnvironmentBroken, match=r"(?s)the last 7 episodes in sequence failed.*KeyError: 'column'"
    ):
        simulate(one_group, ONE_GROUP, EXACT, parts=world(Broken(), max_failures=7))


@dataclass
class Stubborn(Calls):
    """Makes something of its own of a cancellation."""

    answer: base.Outcome | Exception = field(default_factory=base.Outcome)

    async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
        try:
            return await super().run(prompt, policy)
        except asyncio.CancelledError:
            if isinstance(self.answer, base.Outcome):
                return self.answer
            raise self.answer from None


@pytest.mark.parametrize("answer", [base.Outcome(1.0), ValueError("the connection was closed")])
def test_what_an_environment_makes_of_being_parked_does_not_end_the_episode(
    answer: base.Outcome | Exception,
) -> None:
    async def interrupted(run: Run) -> None:
        run.declare(staleness=0)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            await asyncio.sleep(15.5)
            await run.pool.park()
            run.pool.launch(run.parked.pop(1))
            await run.train(await run.pool.take(1))
            await run.publish()

    sample = the_sample(simulate(interrupted, ONE_GROUP, EXACT, parts=world(Stubborn(answer=answer))))
    assert (sample.id, sample.failure) == (SampleId(0, 0, 0), None)
    assert [turn.num_tokens for turn in sample.turns] == [10, 20, 30]


def test_a_metric_is_stored_as_a_number_whatever_type_of_number_it_is(tmp_path: Path) -> None:
    environment = Raising(base.Outcome(1.0, {"speed": Fraction(1, 2)}))  # type: ignore[dict-item]
    run = RunSettings(rounds=1, group_size=2)
    outcome = simulate(one_group, run, EXACT, parts=world(environment), book=Book(), folder=tmp_path)
    assert outcome.of(Stepped)[0].samples[1].reward_metrics == {"environment/speed": 0.5}


def test_an_exit_in_a_task_of_an_environment_fails_the_episode() -> None:
    class Leaving:
        async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
            await policy.complete()
            await asyncio.wait_for(self.leave(), 5)
            return base.Outcome(1.0)

        async def leave(self) -> None:
            sys.exit(1)

    sample = played_alone(episodes(Leaving()), virtual=False)
    assert sample.failure == "environment SystemExit" and sample.ended


@pytest.mark.parametrize(
    ("episode_timeout_s", "turns", "failure"),
    [(2 * CALL_S - 0.5, 2, "environment timeout"), (2 * CALL_S + 0.5, 3, None)],
)
def test_the_time_limit_of_an_episode_does_not_count_generation(
    episode_timeout_s: float, turns: int, failure: str | None
) -> None:
    sample = played_alone(episodes(Calls(reward=1.0), episode_timeout_s=episode_timeout_s), virtual=True)
    assert (sample.failure, len(sample.turns)) == (failure, turns)


def test_an_environment_that_goes_on_after_its_time_fails_as_timeout() -> None:
    class Stubborn:
        async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
            await policy.complete()
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                await policy.complete([{"role": "user", "content": "go on"}])
            return base.Outcome(1.0)

    sample = played_alone(episodes(Stubborn(), episode_timeout_s=5), virtual=True)
    assert (sample.failure, len(sample.turns)) == ("environment timeout", 1)


def played_alone(episodes: Episodes, *, virtual: bool) -> Sample:
    """A sample whose turns have ten tokens each, and in virtual time take ten seconds each."""

    async def serve(sample: Sample) -> None:
        await asyncio.sleep(10 if virtual else 0)
        sample.grow(10, 0)
        sample.finish_reason = "stop"

    sample = Sample(SampleId(0, 0, 0), Group(Prompt(0, [1]), 1, []))
    clock.run(episodes.run(sample, serve, Recorder()), virtual=virtual)
    return sample


def test_an_episode_without_a_turn_fails() -> None:
    class Idle:
        async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
            return base.Outcome(1.0)

    with pytest.raises(EnvironmentBroken, match="no turn: it ended before the first turn of the policy"):
        simulate(one_group, ONE_GROUP, EXACT, parts=world(Idle(), max_failures=2))


def test_an_error_of_an_engine_is_no_failure_of_the_environment() -> None:
    class Swallowing:
        async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
            try:
                await policy.complete()
            except LedgerError as why:
                raise ValueError("hidden") from why
            return base.Outcome(1.0)

    def parts() -> RunComponents:
        made = world(Swallowing())()

        async def generate(sample: Sample) -> None:
            raise LedgerError("the engine is defective")

        made.engines[0].generate = generate  # type: ignore[method-assign]
        return made

    with pytest.raises(LedgerError, match="the engine is defective"):
        simulate(one_group, ONE_GROUP, EXACT, parts=parts)


@pytest.mark.parametrize(("limits", "num_turns"), [({"sampling": SHORT}, 2), ({"max_context_tokens": 27}, 2)])
def test_an_episode_without_room_for_another_turn_ends_and_counts_as_cut_off(
    limits: dict[str, Any], num_turns: int
) -> None:
    sample = the_sample(simulate(one_group, ONE_GROUP, EXACT, parts=world(Calls(), **limits)))
    assert (len(sample.turns), sample.finish_reason, sample.failure) == (num_turns, "length", None)


def test_an_environment_may_reward_an_episode_without_room() -> None:
    class Lenient(Calls):
        async def run(self, prompt: Prompt, policy: Policy) -> base.Outcome:
            try:
                return await super().run(prompt, policy)
            except EpisodeOver:
                return base.Outcome(0.5)

    sample = the_sample(simulate(one_group, ONE_GROUP, EXACT, parts=world(Lenient(), sampling=SHORT)))
    assert (sample.reward, sample.finish_reason) == (0.5, "length")


def test_evaluations_play_episodes_and_count_failures_as_zero() -> None:
    run = RunSettings(rounds=1, group_size=4, eval_every=1, eval_prompts=4, eval_samples=2, eval_greedy=False)
    outcome = simulate(one_group, run, EXACT, parts=world(Raising(ValueError("no"))))
    for evaluated in [event for event in outcome.events if type(event).__name__ == "Evaluated"]:
        assert [(sample.reward, sample.failure) for sample in evaluated.samples] == [
            *[(1.0, None), (0.0, "environment ValueError")] * 4
        ]
    assert all(event.sample.prompt >= 0 for event in outcome.of(SampleScored))


def test_an_error_of_the_reference_is_no_failure_of_the_environment() -> None:
    class Broken:
        async def logprobs(self, sample: Sample) -> list[float]:
            raise WorkerDied("reference", "killed")

    parts = world(Calls(reward=1.0), reference=Broken())
    with pytest.raises(WorkerDied, match="reference"):
        simulate(one_group, ONE_GROUP, EXACT, parts=parts)


def test_episodes_that_the_environment_rewards_have_log_probs_under_the_reference() -> None:
    asked: list[SampleId] = []

    class Reference:
        async def logprobs(self, sample: Sample) -> list[float]:
            asked.append(sample.id)
            return [-1.0] * sample.num_tokens

    algorithm = AlgorithmSettings.model_validate({"kl_coef": 0.1})
    parts = world(Calls(reward=1.0), reference=Reference())
    outcome = simulate(one_group, ONE_GROUP, EXACT, parts=parts, algorithm=algorithm)
    assert the_sample(outcome).reference_logprobs == [-1.0] * 30 and asked == [SampleId(0, 0, 0)]
