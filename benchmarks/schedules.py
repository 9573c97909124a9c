"""All schedules in virtual time: how fast, how stale, what is wasted, what is biased.

    python benchmarks/schedules.py [--rounds 60] [--only NAME]
    python benchmarks/schedules.py --equal-devices [--sigma 1.3] [--reward-s 0.3]
    python benchmarks/schedules.py --planner 40 [--seed 0] [--json FILE]
    python benchmarks/schedules.py --race 20 [--seed 0] [--only "NAME;NAME"] [--json FILE]

One setting, in which engines and trainer have devices of their own: 64 groups of 8 samples a step, 512
prompts that are repeated every epoch. The first two epochs (16 rounds) are not counted, because length
histories fill and the population in flight settles in them. The length bias is the mean trained length over
the mean length of all responses to the same prompts, minus 1. The two columns after it are `bias/length`, the
run's own estimate, and `bias/delay`, the rounds by which long responses are trained later.

--equal-devices gives every schedule the same eight H100 and Qwen2.5-7B ([sim.cluster]). Schedules that stop
and go have all devices in turn, at the cost of a switch. Those that generate while they train divide them,
and have the best of three divisions. The on-policy ones also try the elastic placement. It asks three things:
how much faster is tailrace than april, is tailrace_on_policy faster than RollPacker's race of prompts, and
what leads when a reward takes 30 s?

--race draws clusters and length models at random, and asks which schedule is the fastest in each class,
where the lag of a trained token in optimizer steps is at most 0, 1 or 3, or has no bound. It has every
schedule with several parameters, on every division of the devices, as the planner does. A candidate is left
out if it is predicted to take 1.1 times as long as another one of its schedule. One whose length bias is
above 2% cannot win, nor one that masks more than half of its tokens ("masked": tailrace and pipelinerl with
a bound that masks stale tokens, which the planner does not propose; a step of theirs trains fewer tokens).
Results accumulate in FILE (results/race-SEED.json): what it has of a cluster is not measured again. --only
names schedules, separated by ";"; those that a cluster lacks are measured.

--planner asks how good the planner is on such clusters, each with one of these bounds, over 32 optimizer
steps, with the planner's own limits of mean lag and effective sample size. The regret is the time of a step
of its choice over that of the fastest candidate, minus 1. The speed-up is the processor time of exhaustive
search over that of the planner, both summed over the clusters. FILE (results/planner-SEED.json) keeps the
exhaustive search of each cluster, which is not repeated; the planner always is.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from common import run
from tailrace.controller.base import RunSettings
from tailrace.errors import ConfigError
from tailrace.extras.plan.candidates import Candidate, Work
from tailrace.extras.plan.plan import METERED, Measured, Problem, measure
from tailrace.extras.plan.search import search
from tailrace.rollout.placement import DeviceSharing, Kind
from tailrace.schedules import SCHEDULES, Schedule
from tailrace.sim.cluster import rates
from tailrace.sim.settings import (
    SimClusterSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)

OURS = ("tailrace", "tailrace_on_policy", "tailrace, masked", "pipelinerl, masked")
GROUPS, GROUP_SIZE, ROWS, WARM_UP_ROUNDS = 64, 8, 512, 16
LENGTHS = SimLengthSettings(median_tokens=1230.0, sigma=1.3, max_tokens=16_384, rows=ROWS)
SEPARATE = SimSettings(
    engines=SimEngineSettings(count=4), trainer=SimTrainerSettings(tokens_per_s=60_000.0), lengths=LENGTHS
)
CLUSTER = SimClusterSettings(device="H100", model="Qwen2.5-7B", devices=8)
SPLITS = (4, 5, 6)
"""Of eight devices, those that generate."""
LAGS = (0, 1, 3, math.inf)
MASKED = (1, 3)
"""Bounds of the candidates that mask."""
RESULTS = Path(__file__).parent / "results"
LOSES = 1.1
MAX_MASKED = 0.5
"""Share of the tokens that are masked, above which a candidate cannot win."""
DEVICES = ("A100-40G", "H100", "H200", "MI300X")
MODELS = ("Qwen3-1.7B", "Qwen3-4B", "Qwen2.5-7B", "Qwen3-8B")


def bound(name: str, **parameters: Any) -> Schedule:
    return partial(SCHEDULES[name], **parameters)


def round_of(name: str, **parameters: Any) -> Schedule:
    return bound(name, groups_per_round=GROUPS, **parameters)


def tailrace(in_flight: int, staleness: int) -> Schedule:
    return bound("tailrace", groups_per_step=GROUPS, groups_in_flight=in_flight, staleness=staleness)


def pipelinerl(in_flight: int, engines: int = 4, scoring: int = 2 * GROUPS) -> Schedule:
    """in_flight, scoring: groups that are decoded, and scored, at a time."""
    requests = in_flight * GROUP_SIZE // engines
    ring = {"ring_groups": 2 * GROUPS, "ring_full": "block", "scoring_groups": scoring}
    return bound("pipelinerl", groups_per_step=GROUPS, in_flight_per_engine=requests, **ring)


CANDIDATES: dict[str, Schedule] = {
    "serial": round_of("serial", groups_per_step=GROUPS),
    "rolloutpipe, 4 steps a round": round_of("rolloutpipe", groups_per_step=GROUPS // 4),
    "rolloutpipe_eager, 1 step a round": round_of("rolloutpipe_eager", groups_per_step=GROUPS),
    "tailbatch, prompts 1.25": round_of("tailbatch", response_speculation=1.0),
    "tailbatch, both 1.25": round_of("tailbatch"),
    "tailbatch_async, prompts 1.25": round_of("tailbatch_async", response_speculation=1.0),
    "rollpacker, prompts 1.25": round_of("rollpacker", response_speculation=1.0),
    "rollpacker, both 1.25": round_of("rollpacker"),
    "tailrace_on_policy, sorted only": round_of("tailrace_on_policy", prompt_speculation=1.0),
    "tailrace_on_policy, race 2": round_of("tailrace_on_policy"),
    "conventional, 8 steps a round": bound("conventional", groups_per_step=GROUPS, steps_per_round=8),
    "pipelinerl, 1.25x in flight": pipelinerl(80),
    "pipelinerl, 2x in flight": pipelinerl(128),
    "april, 1.5x": round_of("april", groups_launched=96),
    "april, 2x": round_of("april", groups_launched=128),
    "tailrace, 1.25x, bound 2": tailrace(80, 2),
    "tailrace, 1.5x, bound 2": tailrace(96, 2),
    "tailrace, 1.5x, bound 4": tailrace(96, 4),
    "tailrace, 2x, bound 4": tailrace(128, 4),
    "tailrace, 3x, bound 8": tailrace(192, 8),
}
APRIL = ("april, 1.5x", "april, 2x")
TAILRACE = ("tailrace, 1.5x, bound 2", "tailrace, 2x, bound 4")
"""With the same groups in flight as APRIL."""
ON_POLICY = ("rollpacker, prompts 1.25", "tailrace_on_policy, race 2")
SLOW_S = 10.0
"""From such rewards on, more groups wait for them than the scorers of `pipelinerl` have by default."""
SCORED, AS_MANY = "pipelinerl, 1.5x, 8x scored", "tailrace, 6.7x, bound 32"
"""The two have as many groups alive with rewards of 30 s."""
Fixed = tuple[Schedule, SimSettings, Kind]


def words(sim: SimSettings) -> str:
    """The rates of a set-up."""
    engine, trainer = sim.engines, sim.trainer
    step = f"{1e3 * engine.base_s:.2f} ms, {1e6 * engine.slope_s:.1f} us a request"
    return f"{engine.count} engines ({step}), trainer {trainer.tokens_per_s:,.0f} tokens/s"


def table(candidates: Mapping[str, Fixed], rounds: int) -> dict[str, float]:
    """Run and print all; return their samples a second."""
    head = ("samples/s", "of the 1st", "lag", "max", "wasted", "bias", "metered", "delay", "deferred")
    print(f"{'':46}" + "".join(f"{word:>11}" for word in head))
    rates: dict[str, float] = {}
    for name, (schedule, sim, kind) in candidates.items():
        found = measure(
            schedule,
            sim,
            RunSettings(rounds=rounds, group_size=GROUP_SIZE),
            sharing=DeviceSharing(kind),
            replicas=2 if kind == "elastic" else 1,
            warm_up_rounds=WARM_UP_ROUNDS,
        )
        rates[name] = found["samples_per_s"]
        print(
            f"{name:46}{rates[name]:11.2f}{rates[name] / next(iter(rates.values())):11.2f}"
            f"{found['lag_mean']:11.2f}{found['lag_max']:11.0f}{found['waste_share']:11.1%}"
            f"{found['length_bias']:+11.1%}{found['bias/length']:+11.1%}{found['bias/delay']:11.2f}"
            f"{found['deferrals_max']:11.0f}",
            flush=True,
        )
    return rates


def on_cluster(sigma: float, reward_s: float, rollout_devices: int | None) -> SimSettings:
    cluster = CLUSTER.changed(rollout_devices=rollout_devices)
    rewards = SimRewardSettings(median_s=reward_s, workers=10_000, timeout_s=20 * max(reward_s, 1.0))
    lengths = LENGTHS.changed(sigma=sigma)
    return rates(SimSettings(cluster=cluster, lengths=lengths, rewards=rewards))


def on_equal_devices(rounds: int, sigma: float, reward_s: float, only: str) -> None:
    in_turn = on_cluster(sigma, reward_s, None)
    print(f"8 H100, Qwen2.5-7B\nin turn: {words(in_turn)}\n4 + 4: {words(on_cluster(sigma, reward_s, 4))}")
    candidates: dict[str, Fixed] = {
        f"{name}, in turn": (CANDIDATES[name], in_turn, "colocated") for name in (*APRIL, *ON_POLICY)
    }
    candidates |= {f"{name}, elastic": (CANDIDATES[name], in_turn, "elastic") for name in ON_POLICY}
    for number in SPLITS:
        split = on_cluster(sigma, reward_s, number)
        apart = {name: CANDIDATES[name] for name in (*TAILRACE, *ON_POLICY)}
        apart |= {f"pipelinerl, {share / GROUPS:g}x": pipelinerl(share, number) for share in (96, 128)}
        if reward_s >= SLOW_S:
            apart |= {SCORED: pipelinerl(96, number, 8 * GROUPS), AS_MANY: tailrace(430, 32)}
        devices = f"{number} + {CLUSTER.devices - number}"
        candidates |= {f"{name}, {devices}": (each, split, "disaggregated") for name, each in apart.items()}
    found = table({name: each for name, each in candidates.items() if only in name}, rounds)

    def best(start: str) -> float:
        return max((rate for name, rate in found.items() if name.startswith(start)), default=math.nan)

    for april, ours in zip(APRIL, TAILRACE, strict=True):
        print(f"{ours} over {april}: {best(ours) / best(april):.2f}x")
    print(f"{ON_POLICY[0]} over tailrace_on_policy: {best(ON_POLICY[0]) / best('tailrace_on_policy'):.2f}x")
    print(f"pipelinerl over the best of tailrace: {best('pipelinerl') / max(map(best, TAILRACE)):.2f}x")
    if reward_s >= SLOW_S:
        print(f"{SCORED} over {AS_MANY}: {best(SCORED) / best(AS_MANY):.2f}x")


def between(chance: random.Random, low: float, high: float) -> float:
    return math.exp(chance.uniform(math.log(low), math.log(high)))


def drawn(chance: random.Random) -> tuple[str, Problem]:
    """A cluster in words and as a problem: rates and times on a logarithmic scale."""
    device, model, devices = chance.choice(DEVICES), chance.choice(MODELS), chance.choice([2, 3, 4, 6])
    groups, group_size = chance.choice([(4, 2), (3, 3), (2, 4)])
    median_tokens = round(between(chance, 200, 2000))
    lag = chance.choice(LAGS)
    lengths = SimLengthSettings(
        median_tokens=median_tokens,
        sigma=chance.uniform(0.3, 1.5),
        correlation=chance.uniform(0.2, 0.95),
        max_tokens=min(median_tokens * chance.choice([8, 16, 32]), 32_000),
        rows=chance.choice([None, 6 * groups]),
    )
    efficiency = between(chance, 0.04, 0.5)
    sim = SimSettings(
        cluster=SimClusterSettings(
            device=device, model=model, devices=devices, training_efficiency=efficiency
        ),
        engines=SimEngineSettings(slots=chance.choice([4, 8, 16, 32]), versions=4),
        lengths=lengths,
        rewards=SimRewardSettings(workers=1024, median_s=between(chance, 0.05, 10.0), timeout_s=300.0),
    )
    words = (
        f"{devices} x {device}, {model}, {groups} x {group_size} a step, {median_tokens} tokens, sigma "
        f"{lengths.sigma:.2f}, lag up to {lag:g}"
    )
    return words, Problem(sim, RunSettings(rounds=1, group_size=group_size), groups, max_lag=lag)


def fitting(number: int, seed: int) -> tuple[str, Problem]:
    """The cluster of a number. One that no candidate fits is not counted."""
    chance = random.Random(f"cluster {seed} {number}")
    while True:
        words, problem = drawn(chance)
        with suppress(ConfigError):
            problem.candidates()
            return words, problem


Class = dict[str, dict[str, Any]]
"""The fastest candidate of each schedule within a bound on lag, without length bias where it has one."""


def schedule_of(work: Work) -> str:
    masks = "stale" in work.parameters or (work.schedule == "pipelinerl" and work.lag < math.inf)
    return f"{work.schedule}, masked" if masks else work.schedule


def masked(unmasked: Mapping[Candidate, SimSettings]) -> dict[Candidate, SimSettings]:
    """The candidates that mask what is older than a bound, with as many groups in flight as others have."""
    found: dict[Candidate, SimSettings] = {}
    for each, sim in unmasked.items():
        work = each.work
        if (work.schedule, work.lag) not in (("tailrace", max(MASKED)), ("pipelinerl", math.inf)):
            continue
        for lag in MASKED:
            bound = {"staleness": lag} | ({"stale": "mask"} if work.schedule == "tailrace" else {})
            label = f"{work.label.partition(', staleness')[0]}, {lag} masked"
            bounded = replace(work, parameters={**work.parameters, **bound}, label=label, lag=lag)
            found[replace(each, work=bounded)] = sim
    return found


def may_win(problem: Problem, each: Measured) -> bool:
    return not problem.is_biased(each) and each.figures["masked_share"] <= MAX_MASKED


def token_s(each: Measured) -> float:
    return each.step_s / max(1e-9, 1.0 - each.figures["masked_share"])


def first_of(of_class: Class, time: Callable[[Mapping[str, Any]], float]) -> float:
    return min((time(each) for each in of_class.values() if each["may_win"]), default=math.nan)


def time_of(row: Mapping[str, Any]) -> float:
    """Seconds of a step."""
    return float(row["step_s"])


def token_time(row: Mapping[str, Any]) -> float:
    """Seconds of a step over the share of its tokens that are trained, of the best candidate in that."""
    return float(row["token_s"])


def classes(problem: Problem, measured: Iterable[Measured]) -> dict[str, Class]:
    assert problem.sim.cluster
    found: dict[str, Class] = {f"lag {lag:g}": {} for lag in LAGS}
    for each in sorted(measured, key=lambda each: (not may_win(problem, each), each.step_s)):
        work = each.candidate.work
        row: dict[str, Any] = {
            "candidate": each.candidate.name(problem.sim.cluster.devices),
            "kind": each.candidate.kind,
        }
        row |= {key: float(f"{each.figures[key]:.5g}") for key in FIGURES}
        row |= {"may_win": may_win(problem, each), "token_s": math.inf}
        for lag in LAGS:
            if work.lag <= lag:
                first = found[f"lag {lag:g}"].setdefault(schedule_of(work), row.copy())
                first["token_s"] = min(first["token_s"], token_s(each))
    return found


FIGURES = ("step_s", "lag_mean", "waste_share", "masked_share", "length_bias", *METERED)


def ours_over_theirs(of_class: Class) -> float:
    """Time of the fastest of tailrace's own schedules over that of the fastest published one."""
    ours, theirs = (
        first_of({name: each for name, each in of_class.items() if (name in OURS) is own}, time_of)
        for own in (True, False)
    )
    return ours / theirs


PLANNED_STEPS = 32


def against_exhaustive(number: int, seed: int, path: Path) -> None:
    """The regret of the planner on each cluster."""
    found: dict[str, dict[str, Any]] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    for each in range(number):
        words, problem = fitting(each, seed)
        problem = replace(problem, steps=PLANNED_STEPS)
        assert problem.sim.cluster
        devices, row = problem.sim.cluster.devices, found.setdefault(str(each), {"cluster": words})
        began_s = time.process_time()
        plan = search(problem)
        row["planner_s"] = round(time.process_time() - began_s, 2)
        row |= {"choice": plan.best.candidate.name(devices), "step_s": plan.best.step_s}
        if "fastest" not in row:
            began_s = time.process_time()
            best = search(problem, whole=True).best
            row["exhaustive_s"] = round(time.process_time() - began_s, 2)
            row |= {"fastest": best.candidate.name(devices), "fastest_step_s": best.step_s}
        row["regret"] = round(row["step_s"] / row["fastest_step_s"] - 1.0, 5)
        rows = b",\n".join(
            msgspec.json.encode(key) + b": " + msgspec.json.encode(found[key]) for key in found
        )
        path.write_bytes(b"{\n" + rows + b"\n}\n")
        print(f"{each}: {words}: {row['choice']}, regret {row['regret']:.1%}", flush=True)
    regrets = [found[str(each)]["regret"] for each in range(number)]
    times = sum(row["exhaustive_s"] for row in found.values()) / sum(
        row["planner_s"] for row in found.values()
    )
    print(
        f"regret: worst {max(regrets):.1%}, above 5% in {sum(each > 0.05 for each in regrets)} of {number}; "
    )
    print(f"processor time of the exhaustive search over that of the planner: {times:.1f}")


def metered_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """The medians of the bias meter. Rows of an earlier release have none."""
    found = [[row[name] for row in rows if name in row] for name in METERED]
    return "".join(
        f"{median(each):{form}}" if each else f"{'-':>9}"
        for each, form in zip(found, ("+9.1%", "9.2f"), strict=True)
    )


def print_class(name: str, races: Sequence[Class]) -> None:
    print(f"\n{name} at most: time of a step over that of the fastest schedule")
    head = (
        "fits",
        "median",
        "worst",
        "first",
        "in 2%",
        "in turn",
        "lag",
        "wasted",
        "masked",
        "a token",
        "bias",
        "metered",
        "delay",
    )
    print(f"{'':24}" + "".join(f"{word:>9}" for word in head))
    for schedule in sorted({schedule for of_class in races for schedule in of_class}):
        raced = [of_class for of_class in races if schedule in of_class]
        mine = [of_class[schedule] for of_class in raced]
        over, a_token = (
            [time(each) / first_of(of_class, time) for each, of_class in zip(mine, raced, strict=True)]
            for time in (time_of, token_time)
        )
        print(
            f"{schedule + ' *' * (schedule in OURS):24}{len(mine):9}{median(over):9.2f}{max(over):9.2f}"
            f"{sum(each <= 1.0 for each in over):9}{sum(each <= 1.02 for each in over):9}"
            f"{sum(each['kind'] == 'colocated' for each in mine):9}"
            f"{fmean(each['lag_mean'] for each in mine):9.2f}"
            f"{fmean(each['waste_share'] for each in mine):9.1%}"
            f"{fmean(each['masked_share'] for each in mine):9.1%}{median(a_token):9.2f}"
            f"{median(each['length_bias'] for each in mine):+9.1%}" + metered_words(mine)
        )
    ratios = [ratio for of_class in races if not math.isnan(ratio := ours_over_theirs(of_class))]
    if not ratios:
        return
    print(f"ours (*) is first in {sum(each <= 1.0 for each in ratios)} of {len(ratios)}; its time over the")
    print(f"fastest published one's: median {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


def fastest(problem: Problem, only: Sequence[str]) -> dict[str, Class]:
    """The classes with all schedules, or with some."""
    every = replace(problem, max_lag=math.inf).candidates()[0]
    sims = every | masked(every)
    floors = {each: problem.floor(each, sim, problem.steps).step_s for each, sim in sims.items()}
    measured: dict[Candidate, Measured] = {}
    excess_s: dict[str, float] = {}

    def predicted(each: Candidate) -> float:
        return floors[each] + excess_s.get(each.work.name, 0.0)

    for name in only or sorted({schedule_of(each.work) for each in sims}):
        for lag in LAGS:
            best_s = math.inf
            left = [each for each in sims if schedule_of(each.work) == name and each.work.lag <= lag]
            while left and min(map(predicted, left)) <= LOSES * best_s:
                left.remove(each := min(left, key=predicted))
                if each not in measured:
                    measured[each] = problem.measure(each, sims[each], problem.steps)
                    excess = measured[each].step_s - floors[each]
                    excess_s[each.work.name] = min(excess_s.get(each.work.name, math.inf), excess)
                if may_win(problem, measured[each]):
                    best_s = min(best_s, token_s(measured[each]))
    return classes(problem, measured.values())


def on_raced_clusters(number: int, seed: int, only: Sequence[str], path: Path) -> None:
    found: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes()) if path.exists() else []
    if unknown := {*only} - {*SCHEDULES, *OURS}:
        raise SystemExit(f"--only {';'.join(unknown)}: there is no such schedule")
    for each in range(number):
        known = found[each].get(f"lag {max(LAGS):g}", {}) if each < len(found) else {}
        names = [name for name in only if name not in known]
        if each < len(found) and not names:
            continue
        words, problem = fitting(each, seed)
        if each < len(found) and found[each]["cluster"] != words:
            raise SystemExit(f"{path}: set-up {each} is {found[each]['cluster']}, not {words}; name another")
        classes = fastest(problem, names)
        if each < len(found):
            classes = {name: found[each][name] | classes[name] for name in classes}
        found[each:] = [{"cluster": words, **classes}, *found[each + 1 :]]
        path.write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, found)) + b"\n]\n")
        print(f"{each}: {words}", flush=True)
    for lag in LAGS:
        races: list[Class] = [each[f"lag {lag:g}"] for each in found[:number]]
        unmasked = [{name: each for name, each in race.items() if "masked" not in name} for race in races]
        print_class(f"nothing masked, lag {lag:g}", unmasked)
        if lag in MASKED:
            print_class(f"lag {lag:g}", races)


def main(
    rounds: int = 60,
    only: str = "",
    equal_devices: bool = False,
    sigma: float = 1.3,
    reward_s: float = 0.3,
    race: int = 0,
    planner: int = 0,
    seed: int = 0,
    json: Path | None = None,
) -> None:
    if race:
        on_raced_clusters(race, seed, only.split(";") if only else [], json or RESULTS / f"race-{seed}.json")
    elif planner:
        against_exhaustive(planner, seed, json or RESULTS / f"planner-{seed}.json")
    elif equal_devices:
        on_equal_devices(rounds, sigma, reward_s, only)
    else:
        print(f"simulated costs, no model: {words(SEPARATE)}")
        candidates: dict[str, Fixed] = {
            name: (each, SEPARATE, "disaggregated") for name, each in CANDIDATES.items() if only in name
        }
        table(candidates, rounds)


if __name__ == "__main__":
    run(main)
