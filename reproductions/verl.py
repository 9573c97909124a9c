"""verl's two published tables (Sheng et al. 2024): its fully asynchronous policy, and its V1 trainer.

    docs/advance/fully_async.md         Qwen2.5-Math-7B, 32, 64 and 128 H20 (October 2025)
    docs/advance/v1_async_trainer.md    Qwen3.5-35B-A3B, 32 and 24 H100 (September 2026)

Only synchronous rows are fitted. When groups are drawn and trained is read from the published code
(verl/experimental/fully_async_policy/fully_async_rollouter.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations
from math import inf
from statistics import median
from typing import Any, NamedTuple

from reproductions.base import Figure, Kind, Paper, Table, parameters
from tailrace.contracts.engine import Engine
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.run import Run
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.drivers.assembly.simulation import simulate
from tailrace.rollout.admission import AtMost
from tailrace.rollout.placement import DISAGGREGATED, DeviceSharing
from tailrace.schedules import Schedule
from tailrace.schedules.april import april
from tailrace.schedules.serial import serial
from tailrace.sim.settings import SimSettings

ROUNDS, SYNC_ROUNDS, V1_ROUNDS, WARM_UP_ROUNDS = 6, 3, 20, 2
K, GROUPS, MINI, FETCHED = 16, 512, 32, 128
"""Responses of a prompt; prompts of a step, an optimizer step and a fetch (require_batches = 4)."""
PER_ENGINE = 16 * K
"""Sequences in flight on a server."""
MEDIAN, MEAN, PROMPT = 1230.0, 2790.0, 150
"""Of the lengths: the simulator's default, and its mean below 28K."""
SYNC = {32: (790.10, 357.41, 269.80), 64: (365.28, 150.72, 133.41), 128: (356.30, 177.85, 113.81)}
"""`colocate sync`, by the number of devices: seconds of step, gen and update_actor."""
UPDATE_S = {number: row[2] for number, row in SYNC.items()} | {16: 2 * SYNC[32][2]}
"""Of the trainer on so many devices."""


class Asynchronous(NamedTuple):
    """A row of `fully_async_policy`: devices that generate, and as many that train; staleness_threshold;
    seconds of a step, in which the trainer waits (gen) and works; hours of 400 steps."""

    half: int
    staleness: float
    step: float
    gen: float
    update_actor: float
    total_h: float

    def __str__(self) -> str:
        return f"{self.half} + {self.half} H20, staleness {self.staleness:g}"


ASYNC = (
    Asynchronous(16, 0.5, 294.77, 21.26, 313.81, 33 + 26 / 60),
    Asynchronous(32, 0.5, 189.26, 28.46, 156.98, 21 + 40 / 60),
    Asynchronous(64, 0.5, 150.63, 33.14, 113.16, 17 + 22 / 60),
    Asynchronous(64, 0.3, 146.11, 38.88, 103.22, 17 + 20 / 60),
    Asynchronous(64, 0.1, 171.30, 58.17, 109.12, 19 + 59 / 60),
    Asynchronous(64, 0.0, 231.34, 128.47, 98.77, 25 + 53 / 60),
)


class Mode(NamedTuple):
    """A row of the V1 trainer's tables: engines of four devices, devices that train, hours of so many steps,
    and the median of lengths that have the printed mean below 32K."""

    name: str
    engines: int
    trainers: int
    hours: float
    steps: int
    median_tokens: float

    @property
    def step_s(self) -> float:
        return 3600 * self.hours / self.steps


V1_SYNC = Mode("sync", 8, 32, 22.79, 150, 8465.0)
V1 = (
    V1_SYNC,
    Mode("colocate_async", 8, 32, 14.72, 150, 8606.0),
    Mode("separate_async", 4, 16, 14.10, 150, 8025.0),
    Mode("no-switch", 2, 16, 13.15, 100, 9158.0),
    Mode("switch", 6, 16, 11.79, 100, 9317.0),
)
V1_K, V1_GROUPS, V1_MINI, V1_ALIVE, V1_MEAN = 8, 64, 16, 128, 12_720
"""As above; prompts alive are those of a step and of one warm-up batch."""
READY = round(0.4 * V1_GROUPS)
"""Complete groups at which lent trainers are called back (switch_threshold_ratio)."""
BYTES_PER_S, FLOPS = 4 * 3350e9 * 0.7, 4 * 989.4e12 * 0.5
"""Of four H100, as far as the simulator's defaults reach them."""
WEIGHT_BYTES, KV_BYTES, ACTIVE = 70e9, 2 * 2 * 2 * 2 * 256 * 10, 3e9
"""Qwen3.5-35B-A3B: 10 layers with a KV cache of 2 heads of 256, which 4 devices hold twice."""


async def fully_async(
    run: Run,
    groups_per_sync: int,
    groups_per_step: int,
    alive: int,
    per_engine: int | None = None,
    lent: Callable[[], Sequence[Engine]] = tuple,
) -> None:
    """verl's partial rollouts: a publication aborts all requests, and they go on from their tokens.

    Args:
        groups_per_sync: groups between two publications; then prompts are drawn until `alive` are alive.
        per_engine: sequences in flight on an engine; None: no bound.
        lent: engines on the trainer's devices. They generate until READY groups are complete.
    """
    run.declare(staleness=inf)
    run.pool.admission = AtMost(requests_per_engine=per_engine)
    async for _ in run.rounds():
        await asyncio.gather(*(engine.wake() for engine in lent()))
        groups = run.parked.pop(alive)
        run.pool.launch(groups + run.prompts(alive - len(groups)))
        if lent():
            await run.pool.ready.wait_for(READY)
            await asyncio.gather(*(engine.sleep() for engine in lent()))
        for _ in range(groups_per_sync // groups_per_step):
            await run.train(await run.pool.take(groups_per_step))
        await run.pool.park()
        await run.publish(kv="recompute")


def settings(lengths: dict[str, float], responses: int, tokens_per_s: float, **rest: Any) -> SimSettings:
    """The costs of a set-up whose rewards take no time, and whose trainer only computes."""
    none = dict.fromkeys(("step_s", "publish_s", "swap_s", "early_swap_s"), 0.0)
    sections = {
        "lengths": lengths | {"sigma": 1.3, "correlation": 0.7, "prompt_tokens": PROMPT},
        "rewards": {"median_s": 0.0, "workers": responses},
        "trainer": {"tokens_per_s": tokens_per_s} | none,
    }
    return SimSettings.model_validate(sections | rest)


def h20(devices: int, generating: int | None, scale: float = 1.0) -> SimSettings:
    """H20 devices of which some generate; None: all, and then all train. `scale`: of the lengths. An H20 has
    4.0 TB/s, 148 TFLOP/s and 96 GB; it is written as shares of an H100."""
    cluster = {"device": "H100", "model": "Qwen2.5-7B", "tensor_parallel": 4, "memory_share": 0.8 * 96 / 80}
    cluster |= {"devices": devices, "rollout_devices": generating, "bandwidth_efficiency": 0.7 * 4.0 / 3.35}
    cluster |= dict.fromkeys(("decode_efficiency", "prefill_efficiency"), 0.5 * 148 / 989.4)
    rate = GROUPS * K * (MEAN + PROMPT) / UPDATE_S[devices - (generating or 0)]
    lengths = {"median_tokens": MEDIAN * scale, "max_tokens": 28_672}
    return settings(lengths, GROUPS * K, rate, cluster=cluster, engines={"slots": 1024})


def h100(mode: Mode, tokens_per_s: float) -> SimSettings:
    """The costs of a mode of the V1 trainer."""
    engines: dict[str, float] = {"count": mode.engines, "slots": 1024}
    engines |= {"kv_tokens": (288e9 - WEIGHT_BYTES) // KV_BYTES}
    engines |= {"base_s": WEIGHT_BYTES / BYTES_PER_S, "context_s": KV_BYTES / BYTES_PER_S}
    engines |= {"compute_s": 2 * ACTIVE / FLOPS, "prefill_tokens_per_s": FLOPS / (2 * ACTIVE)}
    engines |= {"overhead_s": 2e-3 + 2 * 40 * 2 * 10e-6, "load_s": WEIGHT_BYTES / (50e9 * 0.8)}
    lengths = {"median_tokens": mode.median_tokens, "max_tokens": 32_768}
    return settings(lengths, V1_GROUPS * V1_K, tokens_per_s, engines=engines)


@cache
def generation(devices: int, seed: int) -> float:
    """Seconds of the rollout of a synchronous row."""
    schedule = partial(serial, groups_per_round=GROUPS, groups_per_step=MINI)
    of_run = RunSettings(rounds=SYNC_ROUNDS, group_size=K, seed=seed)
    sharing = DeviceSharing("colocated")
    return simulate(schedule, h20(devices, None), of_run, sharing=sharing).figures["rollout_time_s"]


@cache
def asynchronous(row: Asynchronous, scale: float, seed: int) -> tuple[float, float]:
    """Seconds of a step, and in which the trainer works."""
    alive, sim = int((1 + row.staleness) * GROUPS), h20(2 * row.half, row.half, scale)
    schedule = partial(fully_async, groups_per_sync=GROUPS, groups_per_step=FETCHED, alive=alive)
    of_run = RunSettings(rounds=ROUNDS, group_size=K, seed=seed)
    figures = simulate(
        partial(schedule, per_engine=PER_ENGINE), sim, of_run, warm_up_rounds=WARM_UP_ROUNDS
    ).figures
    return GROUPS * K / figures["samples_per_s"], figures["trainer_compute_s"]


@cache
def v1_step(mode: Mode, seed: int, tokens_per_s: float | None = None) -> float:
    """Seconds of a step. The trainer's rate is that at which the synchronous row takes the printed time."""
    if tokens_per_s is None:
        train_s = V1_SYNC.step_s - v1_step(V1_SYNC, seed, 1e12)
        tokens_per_s = V1_GROUPS * V1_K * (V1_MEAN + PROMPT) / train_s * mode.trainers / V1_SYNC.trainers
        tokens_per_s *= 1 if mode.steps == V1_SYNC.steps else 5 / 4
    sim, made = h100(mode, tokens_per_s), list[RunComponents]()

    def parts() -> RunComponents:
        made.append(simulated_parts(sim, seed, sharing=sharing))
        return made[0]

    sharing = DeviceSharing("colocated") if mode.trainers == V1_SYNC.trainers else DISAGGREGATED
    streamed = partial(fully_async, groups_per_sync=V1_GROUPS, groups_per_step=V1_MINI, alive=V1_ALIVE)
    schedules: dict[str, Schedule] = {
        "sync": partial(serial, groups_per_round=V1_GROUPS, groups_per_step=V1_MINI),
        "colocate_async": partial(april, groups_per_round=V1_GROUPS, groups_launched=V1_ALIVE),
        "switch": partial(streamed, lent=lambda: made[0].engines[2:]),
    }
    of_run = RunSettings(rounds=V1_ROUNDS, group_size=V1_K, seed=seed)
    schedule = schedules.get(mode.name, streamed)
    figures = simulate(schedule, sim, of_run, parts=parts, warm_up_rounds=WARM_UP_ROUNDS).figures
    return V1_GROUPS * V1_K / figures["samples_per_s"]


def judged(steps: Sequence[tuple[str, float, float]]) -> list[Figure]:
    """The step of each row with its error, their median, and the pairs that have the opposite order. Rows are
    name, printed and simulated seconds; those whose name ends with "sync" are fitted."""
    figures, errors = [], []
    for row, printed, ours in steps:
        kind: Kind = "fitted" if row.split()[-1] == "sync" else "predicted"
        error = 100 * (ours / printed - 1)
        errors += [abs(error)] if kind == "predicted" else []
        figures.append(Figure(row, "step", "s", printed, ours, kind, 0.1 * printed))
        figures.append(Figure(row, "error of the step", "%", None, error))
    wrong = sum((a[1] - b[1]) * (a[2] - b[2]) < 0 for a, b in combinations(steps, 2))
    pairs = f"{len(steps) * (len(steps) - 1) // 2} pairs of rows"
    figures.append(Figure("predicted rows", "median error", "%", 0.0, median(errors), "determined", 10.0))
    return [*figures, Figure(pairs, "in the opposite order", "", 0.0, wrong, "determined", 0.0)]


def fully_asynchronous(seed: int, own_lengths: bool = False) -> Table:
    """Three scales, and four thresholds at 128 devices. `own_lengths`: each row has the lengths at which its
    trainer takes the printed time, and synchronous rows are left out."""
    figures, steps = list[Figure](), []
    for devices, (step_s, gen_s, _) in () if own_lengths else SYNC.items():
        ours, row = generation(devices, seed), f"{devices} H20, sync"
        figures.append(Figure(row, "gen", "s", gen_s, ours))
        steps.append((row, step_s, step_s - gen_s + ours))
    for each in ASYNC:
        scale = each.update_actor / UPDATE_S[each.half] if own_lengths else 1.0
        ours, works_s = asynchronous(each, scale, seed)
        kind: Kind = "fitted" if own_lengths else "predicted"
        figures.append(Figure(str(each), "gen", "s", each.gen, ours - works_s))
        figures.append(Figure(str(each), "update_actor", "s", each.update_actor, works_s, kind))
        figures.append(Figure(str(each), "400 steps", "h", each.total_h, ours / 9, "determined"))
        steps.append((str(each), each.step, ours))
    number, what = ("Table 1b", "own") if own_lengths else ("Table 1", "the same")
    return Table(number, f"fully_async.md, each row with {what} lengths", (*figures, *judged(steps)))


def modes(seed: int) -> Table:
    """The V1 trainer's modes and its switch."""
    steps = [(mode.name, mode.step_s, v1_step(mode, seed)) for mode in V1]
    (_, *without), (_, *switched) = steps[3:]
    less, ours = (100 * (1 - after / before) for before, after in zip(without, switched, strict=True))
    figure = Figure("switch", "less time than no-switch", "%", less, ours)
    return Table("Table 2", "v1_async_trainer.md", (figure, *judged(steps)))


OWN_LENGTHS = partial(fully_asynchronous, own_lengths=True)
PARAMETERS = """
printed 9 | 512 prompts of 16 responses a step, 32 an optimizer step, 128 a fetch, 4 fetches, at most 28K
    tokens, 3 scales | fully_async.md
printed 3 | TP 4, 80% of the memory, 16 prompts at once on a server | the published scripts and code
fitted 3 | the trainer's seconds for a step on 32, 64 and 128 devices; 16 take twice those of 32 | the
    update_actor of synchronous rows
fitted 6 | in Table 1b only: the lengths of each row, on a law of the same form | its update_actor
assumed 4 | all rows of Table 1 have one law of lengths, the simulator's default (median 1,230, sigma 1.3,
    correlation 0.7); prompts of 150 tokens |
assumed 4 | an H20 has 4.0 TB/s and 148 TFLOP/s, and decoding reaches 70% and 50%, the simulator's defaults |
printed 10 | V1: 64 prompts a step, 16 an optimizer step, at most 32K tokens, the devices, five mean lengths |
    v1_async_trainer.md
fitted 1 | V1: the trainer's rate with old log-probs; half of the devices have half of it | the synchronous
    row
assumed 7 | V1: 8 responses a prompt (12,053 tokens/s give 8.0); H100; a decode step reads 70 GB, a token
    computes 3B parameters, 10 layers have a KV cache; without old log-probs the rate is 5/4; sigma 1.3 |
"""
PAPER = Paper(
    name="verl",
    citation="Sheng et al., 2024: HybridFlow (verl), and two tables of its documentation, 2025 and 2026",
    set_up=(
        "Table 1: half of the devices generate; partial rollouts; rewards take no time.",
        "Table 2: 32 H100, and 24 for the switch, which lends at every step and costs 1.5 s.",
    ),
    parameters=parameters(PARAMETERS),
    tables={"Table 1": fully_asynchronous, "Table 1b": OWN_LENGTHS, "Table 2": modes},
    contradictions=(
        "A step of 16 + 16 devices takes 294.77 s, its part update_actor 313.81 s.",
        "update_actor costs 8,634 device-seconds on 32 devices that also generate, and 5,021 on 16 that only"
        " train. Shorter responses would explain it; lengths are not printed.",
        "64 devices generate the same batch in 150.72 s, 128 in 177.85 s.",
        "staleness 0.5 has a step of 150.63 s in two tables, and of 124.64 s in that of require_batches.",
    ),
    not_attempted="Times of 100 to 300 steps (lengths change as the model learns), accuracy, 30B, ReTool.",
)
