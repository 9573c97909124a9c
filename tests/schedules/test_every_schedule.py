"""What must hold for every schedule of the package, whatever its order of the verbs."""

import ast
import hashlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from pydantic_core import to_jsonable_python

from helpers.virtual import (
    EXACT,
    FLUSHING,
    ON_POLICY,
    PINNED,
    SCHEDULES_BY_NAME,
    SETTINGS,
    SIM,
    ZERO_VARIANCE,
    Death,
    change,
    dying,
    regenerated,
    simulate,
)
from tailrace import schedules
from tailrace.config import RunConfig
from tailrace.drivers.assembly.schedule import bind
from tailrace.record.events import EngineStateChanged, RequestStarted, RoundEnded, Stepped
from tailrace.record.run_log import LogWriter
from tailrace.rollout.order import ORDERS, Order
from tailrace.schedules import SCHEDULES

EVERY = pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
TROUBLED = change(SIM, rewards=change(SIM.rewards, failing=0.15, hanging=0.1, timeout_s=5.0))


def digests() -> dict[str, str]:
    """One number for the bytes of each schedule's run log, in a world with faults and filtered groups."""
    settings = change(SETTINGS, rounds=2)
    beside = dying(Death(20.0, 1, 9.0), Death(31.0, 0, 3.0))
    found = {}
    with TemporaryDirectory() as folder:
        for name, schedule in SCHEDULES_BY_NAME.items():
            file = Path(folder) / name / "events.jsonl"
            writer = LogWriter(file)
            outcome = simulate(schedule, settings, TROUBLED, algorithm=ZERO_VARIANCE, beside=beside)
            for event in outcome.events:
                writer.on(event)
            writer.close()
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def test_the_same_seed_gives_the_same_bytes_of_the_run_log_whatever_the_hash_seed() -> None:
    code = (
        f"import sys, json; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}; "
        "import test_every_schedule; print(json.dumps(test_every_schedule.digests()))"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == digests()


@pytest.mark.parametrize("name", ON_POLICY)
def test_an_on_policy_schedule_trains_only_tokens_of_the_round_s_version(name: str) -> None:
    outcome = simulate(SCHEDULES_BY_NAME[name])
    version = 0
    ends = iter(outcome.of(RoundEnded))
    round_ends_s = next(ends).time_s
    for step in outcome.of(Stepped):
        while step.end_s > round_ends_s:
            version, round_ends_s = version + 1, next(ends).time_s
        assert all([span.version for span in sample.spans] == [version] for sample in step.samples)
        assert list(step.lags.publications) == [0]


@EVERY
def test_no_sample_is_trained_twice_and_spans_are_true(name: str) -> None:
    outcome = simulate(SCHEDULES_BY_NAME[name])
    samples = [sample for step in outcome.of(Stepped) for sample in step.samples]
    assert max(Counter(sample.id for sample in samples).values()) == 1
    for sample in samples:
        versions = [span.version for span in sample.spans]
        assert versions == sorted(set(versions))
        assert sum(span.num_tokens for span in sample.spans) == sample.num_tokens
    assert outcome.totals.trained_tokens == sum(sample.num_loss_tokens for sample in samples)
    assert outcome.totals.masked_tokens == sum(sample.num_masked for sample in samples)


@EVERY
def test_everything_at_one_instant(name: str) -> None:
    """All responses of one length and rewards of no time: every completion is a tie."""
    ties = change(EXACT, trainer=change(EXACT.trainer, tokens_per_s=1000.0))
    outcome = simulate(SCHEDULES_BY_NAME[name], sim=ties)
    assert outcome.run.overtime
    if name == "april":  # 16 groups end together: 8 are trained, 8 are parked complete and come first
        assert sorted(outcome.trained) == list(range(24))
        assert [group.complete for group in outcome.run.parked.groups] == [True] * 8
        assert outcome.totals.wasted_tokens == {}


@EVERY
def test_rewards_that_fail_cost_their_samples_and_rewards_that_time_out_are_zero(name: str) -> None:
    outcome = simulate(SCHEDULES_BY_NAME[name], sim=TROUBLED)
    assert outcome.run.overtime
    assert outcome.totals.wasted_tokens["reward raised"] > 0
    timed_out = [s for step in outcome.of(Stepped) for s in step.samples if s.timed_out]
    assert timed_out and all(sample.reward == 0.0 for sample in timed_out)
    sizes = Counter(sample.prompt.index for step in outcome.of(Stepped) for sample in step.samples)
    assert min(sizes.values()) < 4 and max(sizes.values()) == 4  # a group is trained with the other samples


@EVERY
@pytest.mark.parametrize("order", ["longest_first", "probe_first"])
def test_every_schedule_takes_another_order_of_the_queue(name: str, order: Order) -> None:
    schedule, config = SCHEDULES_BY_NAME[name], RunConfig(run=SETTINGS, sim=SIM, schedule={})
    assert isinstance(schedule, partial)
    if (name, order) == ("rolloutpipe_frontier", "probe_first"):
        return  # its groups would wait for the probes of all others
    bound = bind(schedule.func, {**to_jsonable_python(schedule.keywords), "order": order}, config)
    few = change(SIM, engines=change(SIM.engines, slots=6), lengths=change(SIM.lengths, rows=20))
    outcome = simulate(bound, sim=few)
    assert outcome.run.overtime and outcome.run.pool.order is ORDERS[order]


@cache
def undisturbed(name: str) -> tuple[float, int]:
    """When a schedule ends without faults, and how many groups it has trained by then."""
    outcome = simulate(SCHEDULES_BY_NAME[name])
    return outcome.ended_s, outcome.totals.groups["trained"]


@EVERY
def test_filtered_groups_are_replaced(name: str) -> None:
    outcome = simulate(SCHEDULES_BY_NAME[name], algorithm=ZERO_VARIANCE)
    assert outcome.totals.groups["filtered"] > 0 and outcome.totals.wasted_tokens["zero variance"] > 0
    if name in FLUSHING:
        assert outcome.run.parked.groups == []  # how many there were at the end is chance
    else:
        assert outcome.totals.groups["trained"] == undisturbed(name)[1]
    for step in outcome.of(Stepped):
        for sample in step.samples:
            assert len({kept.reward for kept in sample.group.trainable}) > 1


@EVERY
def test_dead_engines_cost_no_token_and_break_no_bound(name: str) -> None:
    ended_s, _ = undisturbed(name)
    moments = [ended_s * share for share in (0.1, 0.3, 0.31, 0.6)]
    deaths = [Death(at_s, number % 2, ended_s / 20) for number, at_s in enumerate(moments)]
    outcome = simulate(SCHEDULES_BY_NAME[name], beside=dying(*deaths))
    assert outcome.run.overtime
    resumed = [event for event in outcome.of(RequestStarted) if event.num_tokens > 0]
    assert resumed and regenerated(outcome.events, verifies=outcome.run.verifies) == []
    states = Counter((event.engine, event.state) for event in outcome.of(EngineStateChanged))
    assert states == {(f"engine-{number}", state): 2 for number in (0, 1) for state in ("dead", "open")}
    assert not any("engine" in reason for reason in outcome.totals.wasted_tokens)


@EVERY
def test_all_engines_dead_at_once_is_a_pause(name: str) -> None:
    ended_s, num_trained = undisturbed(name)
    for share in (0.05, 0.5, 0.95):  # among them while nothing is served and while weights are published
        at_s = ended_s * share
        outcome = simulate(SCHEDULES_BY_NAME[name], beside=dying(Death(at_s, 0, 30.0), Death(at_s, 1, 31.0)))
        assert outcome.run.overtime
        if name in FLUSHING:
            assert outcome.run.parked.groups == []  # how many there were at the end is chance
        else:
            assert outcome.totals.groups["trained"] == num_trained


@EVERY
def test_every_bound_of_staleness_is_kept_with_a_small_cache_that_preempts(name: str) -> None:
    sim = change(SIM, engines=change(SIM.engines, kv_tokens=7_000))
    outcome = simulate(SCHEDULES_BY_NAME[name], sim=sim)
    assert sum(usage.num_preempted for usage in outcome.usages) > 0
    assert outcome.run.overtime


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", PINNED)
def test_every_sample_of_a_pinned_schedule_has_one_version(name: str, seed: int) -> None:
    chance = random.Random(seed)
    count, versions = chance.randint(2, 4), 3 if name == "trl_async" else chance.randint(1, 3)
    sizes = {"count": count, "slots": chance.randint(4, 24), "versions": versions}
    sim = change(
        SIM,
        engines=change(SIM.engines, **sizes, kv_tokens=chance.choice([7_000, 10**7])),
        trainer=change(SIM.trainer, tokens_per_s=chance.uniform(2_000.0, 50_000.0)),
        lengths=change(SIM.lengths, sigma=chance.uniform(0.3, 1.8)),
    )
    deaths = [Death(chance.uniform(0, 200), chance.randrange(count), chance.uniform(1, 20)) for _ in range(3)]
    outcome = simulate(SCHEDULES_BY_NAME[name], change(SETTINGS, rounds=6), sim, beside=dying(*deaths))
    steps = outcome.of(Stepped)
    assert {len(sample.spans) for step in steps for sample in step.samples} == {1}
    assert 1 <= max(max(step.lags.publications) for step in steps) <= 2
    assert outcome.run.overtime


def test_eager_trains_the_prompts_of_plain_rolloutpipe() -> None:
    eager = partial(SCHEDULES["rolloutpipe_eager"], groups_per_round=16, groups_per_step=4)
    plain = partial(SCHEDULES["rolloutpipe"], groups_per_round=16, groups_per_step=4)
    first, second = simulate(eager), simulate(plain)
    assert sorted(first.trained) == sorted(second.trained)
    assert [len(step.samples) for step in first.of(Stepped)] == [16] * 12
    assert first.ended_s <= second.ended_s


FILES = sorted({Path(inspect.getfile(schedule)) for schedule in SCHEDULES.values()})


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_schedule_s_file_is_a_screen_that_names_its_paper_and_section(file: Path) -> None:
    text = file.read_text()
    assert 10 <= len(text.splitlines()) <= 140
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"\bsection \d|\bAlgorithm \d|\d\.\d", doc), doc
    assert re.search(r"et al\. 20\d\d|arXiv \d{4}\.\d{5}", doc) or file.stem == "serial", doc


def test_no_other_file_knows_a_schedule_of_ours_by_name() -> None:
    """No flag and no hook for one of them elsewhere: only the table and the commands' words name them."""
    package = Path(schedules.__file__).parents[1]
    for room in ("rollout", "ledger", "sim", "drivers/engine", "drivers/trainer", "drivers/reward"):
        for file in (package / room).rglob("*.py"):
            names = [node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)]
            assert not set(names) & set(SCHEDULES), file
