"""The rules of [run.groups]: which members are trained, what became of the others, and the bias of each rule.

Lengths are quasi-random (Sobol): their means are those of their distribution to a few thousandths. The
control group of each pair of groups has the lengths of the other one.
"""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import ceil, comb, exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from helpers.virtual import EXACT, SCHEDULES_BY_NAME, SIM, Book, Outcome, change, simulate, worlds
from tailrace import clock
from tailrace.config import RunConfig, config_of
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.run import Run
from tailrace.drivers.assembly.schedule import bind
from tailrace.drivers.assembly.simulation import run_virtual
from tailrace.errors import AllLate, ConfigError, RewardFailed
from tailrace.extras.plan.command import problem_of
from tailrace.record.events import GroupEnded, Recorder, RequestEnded, RequestStarted, Stepped
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary
from tailrace.rollout.members import GroupSettings, MemberRules
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import SimRewardSettings
from tailrace.types import Group, Prompt, Sample, SampleId

SIZE, PAIRS = 4, 512
TOLERANCE = 0.01
Law = Callable[[float], float]


def uniform(u: float) -> float:
    return 1000 * u


def exponential(u: float) -> float:
    return -200 * log(1 - u)


def share_below(law: Law, tokens: float) -> float:
    return tokens / 1000 if law is uniform else 1 - exp(-tokens / 200)


def mean_below(law: Law, tokens: float) -> float:
    return tokens / 2 if law is uniform else 200 - tokens * exp(-tokens / 200) / share_below(law, tokens)


def mean_of_first(law: Law, k: int) -> float:
    """Mean of the k smallest of SIZE lengths: (k + 1) / 2 (n + 1) of the range; Renyi's sums of spacings."""
    if law is uniform:
        return 1000 * (k + 1) / (2 * (SIZE + 1))
    return fmean(sum(200 / (SIZE - i) for i in range(j)) for j in range(1, k + 1))


def share_of_first_below(law: Law, k: int, tokens: float) -> float:
    """The j-th smallest is below if at least j are."""
    p = share_below(law, tokens)
    least = [
        sum(comb(SIZE, n) * p**n * (1 - p) ** (SIZE - n) for n in range(j, SIZE + 1)) for j in range(k + 1)
    ]
    return fmean(least[1:])


@cache
def quantiles() -> Any:
    from scipy.stats import qmc  # half a second, which other processes of the tests need not spend

    return qmc.Sobol(d=12, scramble=True, seed=0).random(PAIRS)


def length(law: Law, prompt: int, number: int) -> int:
    return max(1, ceil(law(float(quantiles()[prompt // 2 % PAIRS][number % 12]))))


class ShortIsRight:
    """Rewards of 1 for at most 300 tokens, else 0; those of the longest fail."""

    def __init__(self, fails_above: float) -> None:
        self._fails_above = fails_above

    async def score(self, sample: Sample) -> float:
        if sample.num_tokens > self._fails_above:
            raise RewardFailed("raised")
        return float(sample.num_tokens <= 300)


def ruled(law: Law, fails_above: float = 1e9, **rules: Any) -> Outcome:
    """A run with a control group beside each ruled one. A token is a second."""
    sim = change(
        EXACT, trainer=change(EXACT.trainer, tokens_per_s=1e9), engines=change(EXACT.engines, slots=9999)
    )
    made = worlds(sim, lambda sample: length(law, sample.prompt.index, sample.id.number))

    def parts() -> RunComponents:
        return replace(made(), rewards=ShortIsRight(fails_above))

    settings = RunSettings(rounds=4, group_size=SIZE, groups=GroupSettings(control=2, **rules))
    half = PAIRS // 2
    return simulate(
        partial(SCHEDULES["serial"], groups_per_round=half, groups_per_step=half), settings, sim, parts=parts
    )


def measured(outcome: Outcome) -> dict[str, float]:
    """What the run's own figures say: length over that of control groups, and the difference in reward."""
    meter = StepMeter(summary := Summary(), wall_clock=lambda: 0.0)
    for event in outcome.events:
        meter.on(event)
    bias = summary.summary().bias
    return {name: value for name, value in bias.items() if name.endswith("_bias")}


def trained(outcome: Outcome, *, control: bool = False) -> list[Sample]:
    samples = [sample for step in outcome.of(Stepped) for sample in step.samples]
    return [sample for sample in samples if (sample.group.has_rules is False) == control]


@pytest.mark.parametrize(
    ("law", "keep"),
    [
        (uniform, 1),
        (exponential, 1),
        *(
            pytest.param(law, keep, marks=pytest.mark.slow)
            for law in (uniform, exponential)
            for keep in (2, 3)
        ),
    ],
)
def test_the_bias_of_the_first_k_is_that_of_order_statistics(law: Law, keep: int) -> None:
    bias = measured(outcome := ruled(law, keep=keep))
    mean = mean_below(law, 1e9 if law is exponential else 1000)
    assert 1 + bias["length_bias"] == pytest.approx(mean_of_first(law, keep) / mean, rel=TOLERANCE)
    expected = share_of_first_below(law, keep, 300) - share_below(law, 300)
    assert bias["reward_bias"] == pytest.approx(expected, abs=TOLERANCE)
    groups = [sorted(length(law, 2 * pair, number) for number in range(SIZE)) for pair in range(PAIRS)]
    cut = sum(each[keep - 1] * (SIZE - keep) for each in groups)
    assert outcome.totals.wasted_tokens["raced"] == pytest.approx(cut, rel=TOLERANCE)
    assert len(trained(outcome)) == PAIRS * keep


@pytest.mark.parametrize("law", [uniform, pytest.param(exponential, marks=pytest.mark.slow)])
@pytest.mark.parametrize("replacements", [0, 8])
def test_the_bias_of_a_deadline_is_that_of_the_truncated_law(law: Law, replacements: int) -> None:
    bias = measured(outcome := ruled(law, deadline_s=600.5, replacements=replacements))
    mean = mean_below(law, 1e9 if law is exponential else 1000)
    assert 1 + bias["length_bias"] == pytest.approx(mean_below(law, 600) / mean, rel=TOLERANCE)
    expected = share_below(law, 300) * (1 / share_below(law, 600) - 1)
    assert bias["reward_bias"] == pytest.approx(expected, abs=TOLERANCE)
    lost = SIZE * PAIRS - len(trained(outcome))
    if replacements:
        assert lost < 0.01 * SIZE * PAIRS
    else:
        assert lost / (SIZE * PAIRS) == pytest.approx(1 - share_below(law, 600), abs=TOLERANCE)


@pytest.mark.parametrize("replacements", [0, 8])
def test_members_that_fail_bias_nothing_more_when_they_are_replaced(replacements: int) -> None:
    """Without a rule they are lost, so a control group has the truncated law, too."""
    outcome = ruled(uniform, 700, **({"replacements": 8} if replacements else {"deadline_s": 1e6}))
    bias = measured(outcome)
    assert bias == {
        "length_bias": pytest.approx(0, abs=TOLERANCE),
        "reward_bias": pytest.approx(0, abs=TOLERANCE),
    }
    assert fmean(sample.num_tokens for sample in trained(outcome)) == pytest.approx(350, rel=TOLERANCE)
    share = len(trained(outcome)) / (SIZE * PAIRS)
    assert share == pytest.approx(1.0 if replacements else 0.7, abs=TOLERANCE)
    assert len(trained(outcome, control=True)) / (SIZE * PAIRS) == pytest.approx(0.7, abs=TOLERANCE)


def test_k_of_the_members_with_rewards_that_fail_and_replacements_as_calculated_directly() -> None:
    """The first 3 of 4 that do not fail. The first failure costs none, because 4 are alive; each other
    launches the next sample."""
    outcome = ruled(exponential, 300, keep=3, replacements=8)
    kept = []
    for pair in range(PAIRS):
        lengths = [length(exponential, 2 * pair, number) for number in range(12)]
        first = sorted(tokens for tokens in lengths[:SIZE] if tokens <= 300)[:3]
        others = [tokens for tokens in lengths[SIZE:] if tokens <= 300]
        kept += first + others[: 3 - len(first)]
    found = [sample.num_tokens for sample in trained(outcome) if sample.prompt.index < 2 * PAIRS]
    assert sorted(found) == sorted(kept)
    assert len(kept) == pytest.approx(3 * PAIRS, rel=TOLERANCE)


# -- single groups, by hand --------------------------------------------------------------------------------


def one_group(table: dict[int, int], rounds: int = 1, schedule: Any = None, **rules: Any) -> Outcome:
    """A group of 3 whose members have these lengths by their number; then of all groups."""
    sim = change(EXACT, trainer=change(EXACT.trainer, tokens_per_s=1e9))
    settings = RunSettings(rounds=rounds, group_size=3, groups=GroupSettings(**rules))
    schedule = schedule or partial(SCHEDULES["serial"], groups_per_round=1, groups_per_step=1)
    return simulate(schedule, settings, sim, parts=worlds(sim, lambda sample: table[sample.id.number]))


def numbers(outcome: Outcome) -> list[int]:
    return sorted(sample.id.number for step in outcome.of(Stepped) for sample in step.samples)


def test_a_late_member_is_replaced_by_a_sample_with_a_seed_of_its_own_and_a_deadline_of_its_own() -> None:
    outcome = one_group({0: 5, 1: 20, 2: 7, 3: 8}, deadline_s=10.5, replacements=1)
    assert numbers(outcome) == [0, 2, 3]
    started = {event.sample.number: event.time_s for event in outcome.of(RequestStarted)}
    assert started == {0: 0, 1: 0, 2: 0, 3: 10.5}
    (step,) = outcome.of(Stepped)
    assert len({sample.seed for sample in step.samples}) == 3
    assert outcome.totals.wasted_tokens == {"late": 10}


def test_members_that_the_rules_do_not_require_make_no_race_of_a_rollout() -> None:
    assert not one_group({0: 5, 1: 6, 2: 7}, keep=2).run.pool.progress.is_race


def test_a_group_that_begins_anew_after_a_crash_has_all_its_members_again(tmp_path: Path) -> None:
    """A deadline had left two of three. All checkpoints are lost, and the tokens pruned."""
    sim = change(EXACT, trainer=change(EXACT.trainer, tokens_per_s=1e9))
    parts = worlds(sim, lambda sample: {0: 5, 1: 20, 2: 7}[sample.id.number])
    rules = GroupSettings(deadline_s=10.5)
    settings = RunSettings(rounds=3, group_size=3, checkpoint_every=1, groups=rules)
    schedule, book = partial(SCHEDULES["serial"], groups_per_round=1, groups_per_step=1), Book()
    simulate(schedule, settings, sim, parts=parts, folder=tmp_path, book=book)
    for checkpoint in tmp_path.glob("round_*"):
        shutil.rmtree(checkpoint)
    again = simulate(schedule, settings, sim, parts=parts, folder=tmp_path, book=book)
    begun = [event.sample[1:] for event in again.of(RequestStarted) if event.sample.prompt == 0]
    assert begun == [(1, 0), (1, 1), (1, 2)]
    assert again.totals.wasted_tokens["raced"] == 0
    assert again.totals.wasted_tokens["late"] == 6 * 10


def test_a_replacement_that_is_late_is_lost_when_none_is_left() -> None:
    outcome = one_group({0: 5, 1: 20, 2: 7, 3: 18}, deadline_s=10.5, replacements=1)
    assert numbers(outcome) == [0, 2]
    assert outcome.totals.wasted_tokens == {"late": 10 + 11}  # it joined in the middle of a decode step
    assert outcome.of(RequestEnded)[-1].time_s == pytest.approx(21.0)


def test_advantages_are_computed_over_the_members_that_are_there() -> None:
    outcome = one_group({0: 5, 1: 20, 2: 7}, deadline_s=10.5)
    (step,) = outcome.of(Stepped)
    assert sum(sample.advantage for sample in step.samples) == pytest.approx(0)
    assert {sample.group.num_required for sample in step.samples} == {2}


def test_a_group_without_a_member_in_time_is_dropped_and_another_prompt_drawn() -> None:
    sim = change(EXACT, trainer=change(EXACT.trainer, tokens_per_s=1e9))
    parts = worlds(sim, lambda sample: 20 if sample.prompt.index < 3 else 5)
    settings = RunSettings(rounds=1, group_size=2, groups=GroupSettings(deadline_s=10.5))
    outcome = simulate(
        partial(SCHEDULES["serial"], groups_per_round=2, groups_per_step=2), settings, sim, parts=parts
    )
    assert outcome.trained == [3, 4]
    dropped = [(event.prompt, event.reason) for event in outcome.of(GroupEnded) if event.fate == "dropped"]
    assert dropped == [(0, "late"), (1, "late"), (2, "late")]


def test_a_deadline_that_no_member_meets_ends_the_run() -> None:
    with pytest.raises(AllLate, match=r"100 groups in succession were late; raise run.groups.deadline_s"):
        one_group({0: 20, 1: 20, 2: 20}, deadline_s=10.5)
    with pytest.raises(AllLate):  # control groups are no sign that members can be in time
        one_group({0: 20, 1: 20, 2: 20}, rounds=500, deadline_s=10.5, control=2)


def test_a_parked_group_has_its_deadline_anew() -> None:
    async def parks(run: Run) -> None:
        run.declare(staleness=9)
        async for _ in run.rounds():
            run.pool.launch(run.prompts(1))
            for _ in range(2):
                await asyncio.sleep(8)
                await run.pool.park()
                run.pool.launch(run.parked.pop(1))
            await run.train(await run.pool.take(1))
            await run.publish()

    outcome = one_group({0: 5, 1: 20, 2: 27}, schedule=parks, deadline_s=10.5)
    assert numbers(outcome) == [0, 1]
    assert outcome.totals.wasted_tokens == {"late": 26}


# -- the rules by themselves -------------------------------------------------------------------------------


class Members:
    """A group that may launch so many samples, and what the rules did to it."""

    def __init__(
        self, num_launched: int, num_required: int, most: int, deadline_s: float | None = None
    ) -> None:
        self.group = Group(Prompt(0, [1]), num_required, [], has_rules=True)
        self.rules = MemberRules(deadline_s, self.launch, self.remove, lambda group: self.did.append("late"))
        self.did: list[str] = []
        self._most, self._num_launched = most, 0
        assert all(self.launch(self.group) for _ in range(num_launched))
        self.did.clear()

    def launch(self, group: Group) -> bool:
        if self._num_launched == self._most:
            return False
        group.samples.append(Sample(SampleId(0, 0, self._num_launched), group))
        self.did.append(f"launch {self._num_launched}")
        self._num_launched += 1
        return True

    def remove(self, sample: Sample, reason: str) -> None:
        sample.group.samples.remove(sample)
        self.did.append(f"remove {sample.id.number}: {reason}")


@pytest.mark.parametrize(
    ("num_required", "most", "did"),
    [
        (2, 3, ["remove 0: down"]),  # a spare one
        (3, 4, ["launch 3", "remove 0: down"]),
        (3, 3, []),  # it stays, without a reward
    ],
)
def test_a_member_that_failed_makes_room_if_there_is_another(
    num_required: int, most: int, did: list[str]
) -> None:
    members = Members(3, num_required, most)
    members.group.samples[0].failure = "down"
    members.rules.replace_failed(members.group)
    assert members.did == did


@pytest.mark.parametrize("is_ended", [False, True])
def test_late_members_are_removed_at_the_deadline_of_their_group(is_ended: bool) -> None:
    """A deadline counts from the first request. A group that leaves the pool has none."""

    async def main() -> list[str]:
        members = Members(3, 3, 4, deadline_s=10.0)
        members.group.samples[1].finish_reason = "stop"
        members.rules.begin(members.group)
        await asyncio.sleep(9)
        members.rules.begin(members.group)
        if is_ended:
            members.rules.end(members.group)
        await asyncio.sleep(2)
        return members.did

    did = [] if is_ended else ["remove 0: late", "remove 2: late", "launch 3", "late"]
    assert clock.run(main(), virtual=True) == did


# -- every schedule ----------------------------------------------------------------------------------------

RACES = ("tailbatch", "tailbatch_dapo", "tailbatch_async", "rollpacker")
TROUBLED = change(SIM, rewards=SimRewardSettings(failing=0.2))
RULES = GroupSettings(keep=3, deadline_s=60, replacements=2, control=4)


@pytest.mark.parametrize("name", [name for name in SCHEDULES_BY_NAME if name not in RACES])
def test_the_rules_hold_under_every_schedule(name: str) -> None:
    outcome = simulate(SCHEDULES_BY_NAME[name], RunSettings(rounds=3, group_size=4, groups=RULES), TROUBLED)
    groups: dict[Group, None] = dict.fromkeys(
        sample.group for step in outcome.of(Stepped) for sample in step.samples
    )
    assert {len(group.trainable) for group in groups if group.has_rules} <= {1, 2, 3}
    assert max(len(group.trainable) for group in groups if not group.has_rules) == 4
    assert all(group.has_rules == (group.prompt.index % 4 > 0) for group in groups)
    wasted = outcome.totals.wasted_tokens
    assert wasted["raced"] > 0
    assert set(wasted) <= {"raced", "late", "reward raised", "deferred", "low ess", "stale", "ready overflow"}


@pytest.mark.parametrize("name", RACES)
def test_a_schedule_that_races_members_itself_takes_no_rules(name: str) -> None:
    schedule = SCHEDULES_BY_NAME[name]
    assert isinstance(schedule, partial)
    settings = RunSettings(rounds=1, group_size=8, groups=GroupSettings(deadline_s=60))
    with pytest.raises(ConfigError, match="this schedule races the members of a group itself; remove"):
        bind(schedule.func, schedule.keywords, RunConfig(run=settings, schedule={}))


# -- what is refused ---------------------------------------------------------------------------------------

CONFIG = {"run": {"rounds": 1, "group_size": 4}, "schedule": {"name": "serial"}}


def test_a_deadline_shorter_than_a_decode_step_is_refused_before_a_simulation_starts() -> None:
    run = {"rounds": 1, "group_size": 4, "groups": {"deadline_s": 0.001}}
    config = config_of({**CONFIG, "run": run})
    with pytest.raises(ConfigError, match=r"run.groups.deadline_s = 0.001: no sample can meet it"):
        run_virtual(config, SCHEDULES["serial"], Recorder())


def test_the_planner_takes_no_rules() -> None:
    run = {"rounds": 1, "group_size": 4, "groups": {"keep": 2}}
    cluster = {"device": "h100-sxm", "devices": 8, "model": "qwen2.5-7b"}
    with pytest.raises(ConfigError, match="the planner predicts groups that wait for all of their members"):
        problem_of(config_of({**CONFIG, "run": run, "sim": {"cluster": cluster}}))
