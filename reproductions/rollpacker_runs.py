"""RollPacker's set-ups in virtual time: models, lengths, rewards, and the parts that its ablation adds.

One derivation for the three models (section 6, "Models" and "Training Configurations"). Rates follow from the
H800's profile. Lengths are lognormal: the longest response, which is as long as the limit, is 25 to 32 times
as long as the median (section 1), and a quarter is longer than 1.1k of 16k tokens (section 2.2, code).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, exp
from statistics import fmean

from reproductions.rollpacker_judge import Sharing, interference, judge_of
from tailrace.contracts.reward import Rewards, TimeoutSettings
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.drivers.assembly.simulation import Simulated, simulate
from tailrace.record.events import Row
from tailrace.rollout.placement import DeviceSharing
from tailrace.rollout.placement import Kind as PlacementKind
from tailrace.rollout.reward_timeout import Anchors
from tailrace.schedules import Schedule
from tailrace.schedules.serial import serial
from tailrace.schedules.tailbatch import rollpacker, tailbatch
from tailrace.sim.cluster import rates
from tailrace.sim.engine import SimEngine
from tailrace.sim.reward import SimCodeRewards, SimRewards
from tailrace.sim.settings import (
    SimClusterSettings,
    SimCodeSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)
from tailrace.sim.world import Lengths
from tailrace.types import Sample

P0, R0, ETA = 128, 8, 1.25
PROMPT_TOKENS = 200
PERIOD = 5
"""Four short rounds and a long one (Fig. 4)."""
ROUNDS = 2 * PERIOD
NODE = 8
"""Devices of a server: the largest tensor-parallel size (section 4.2)."""
MEDIAN_OF_LIMIT, SIGMA = 1 / 29, 1.05
TRAINING_EFFICIENCY, ROUND_S = 0.088, 25.5
"""Fitted: forward and backward of the actor as a share of the devices' FLOP/s, with the forward passes of the
reference in it; seconds that each round takes beside its stages."""

ScheduleOf = Callable[[int], Schedule]
"""A schedule of so many prompts a round."""


def serial_of(groups: int) -> Schedule:
    return partial(serial, groups_per_round=groups, groups_per_step=groups)


def tailbatch_of(groups: int) -> Schedule:
    return partial(tailbatch, groups_per_round=groups)


def rollpacker_of(groups: int) -> Schedule:
    return partial(rollpacker, groups_per_round=groups)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of section 6.

    Args:
        width: tensor-parallel size of the engines.
        max_tokens: length limit.
        groups: prompts of a round (P0).
        divided: tensor-parallel size of the trainer. Its pipeline and context parallelism are not simulated.
    """

    name: str
    devices: int
    width: int
    max_tokens: int
    groups: int = P0
    divided: int = 1

    def __str__(self) -> str:
        return f"{self.name}/{self.max_tokens // 1024}k"

    def sim(self, sharing: Sharing | None = None) -> SimSettings:
        """Devices and lengths.

        Args:
            sharing: how a judge shares the devices of the engines.
        """
        sim = SimSettings(
            cluster=SimClusterSettings(
                device="H800",
                devices=self.devices,
                model=self.name,
                tensor_parallel=self.width,
                trainer_tensor_parallel=self.divided,
                memory_share=0.6,
                training_efficiency=TRAINING_EFFICIENCY,
            ),
            engines=SimEngineSettings(slots=256),
            trainer=SimTrainerSettings(publish_s=ROUND_S),
            lengths=SimLengthSettings(
                median_tokens=MEDIAN_OF_LIMIT * self.max_tokens,
                sigma=SIGMA,
                max_tokens=self.max_tokens,
                prompt_tokens=PROMPT_TOKENS,
            ),
        )
        if sharing is None:
            return sim
        num_requests = ceil(ETA * self.groups) * ceil(ETA * R0) * self.width // self.devices
        tokens = PROMPT_TOKENS + MEDIAN_OF_LIMIT * self.max_tokens * exp(SIGMA**2 / 2)
        judge = SimRewardSettings(judge=judge_of(PROMPT_TOKENS + self.max_tokens))
        host = interference(sharing, rates(sim).engines, num_requests, tokens)
        return sim.changed(rewards=judge, host=host)


SMALL = Model("Qwen2.5-7B", 16, 1, 8_192, divided=2)
MEDIUM = Model("Qwen2.5-14B", 32, 2, 16_384, divided=2)
LARGE = Model("Qwen2.5-32B", 64, 2, 32_768, divided=4)
MODELS = (SMALL, MEDIUM, LARGE)


@dataclass(frozen=True, slots=True)
class Programs:
    """The responses to prompts of code.

    Args:
        solvable: parameters of the beta distribution of the prompts' solve rates.
        cases: test cases of a program.
        median_s: of the time of a test case.
        workers: test cases that run at the same time.
        rows: of the data, which come again in the next epoch; 0: no row comes again.
        referenced: each row has a reference time (the column `reference_time` of the published code).
    """

    solvable: tuple[float, float] = SimRewardSettings().solvable
    cases: int = 4
    median_s: float = 0.2
    workers: int = 256
    rows: int = 0
    referenced: bool = True


@dataclass(frozen=True, slots=True)
class Variant:
    """What of RollPacker is switched on, and where its set-up differs.

    Args:
        asynchronous: rewards run while the rollout goes on.
        adaptive: the time limit of test cases is adaptive.
        planner: the tensor-parallel size follows the preemptions.
        placement: "elastic": the stream trainer.
        sharing: how a judge shares the devices of the engines. None: its times are those fitted to Table 1,
            and it takes no time of the engines.
        reserved: a quarter of the devices is the judge's (section 4.3), so that they neither generate nor
            train.
        by_prompts: the stream trainer lends devices after a share of the prompts, as in the published code.
        slower: the factor by which training takes longer.
    """

    schedule: ScheduleOf = serial_of
    asynchronous: bool = False
    adaptive: bool = False
    planner: bool = False
    placement: PlacementKind = "colocated"
    sharing: Sharing | None = None
    reserved: bool = False
    by_prompts: bool = False
    slower: float = 1.0
    programs: Programs = Programs()


VERL = Variant()
TAIL_BATCHING = Variant(tailbatch_of)
REWARDS = Variant(tailbatch_of, asynchronous=True, adaptive=True, sharing="mps")
PLANNER = replace(REWARDS, planner=True)
TRAINER = replace(PLANNER, schedule=rollpacker_of, placement="elastic")

Task = str
TASKS = ("Math", "Code", "LLM-as-a-Judge")
NO_TIME = ("no time",)
"""In place of the tasks: rewards that take no time."""


class MixedRewards:
    """`Rewards` of a mix of tasks: prompt number i has the reward of task i modulo their number."""

    def __init__(self, rewards: Sequence[Rewards]) -> None:
        self._rewards = rewards

    async def score(self, sample: Sample) -> float:
        """As Rewards.score."""
        return await self._rewards[sample.prompt.index % len(self._rewards)].score(sample)


def rewards_of(task: Task, variant: Variant, anchors: Anchors, seed: int) -> Rewards:
    """The rewards of a task. Programs have a limit of 30 s and rules one of 2 s (section 5)."""
    first = seed * len(TASKS)
    if (task,) == NO_TIME:
        return SimRewards(SimRewardSettings(workers=P0 * R0, median_s=0.0), first)
    if task == "Math":
        return SimRewards(SimRewardSettings(workers=32, median_s=0.3, timeout_s=2.0), first)
    if task == "LLM-as-a-Judge":
        return SimRewards(SimRewardSettings(workers=64, median_s=0.8, timeout_s=60.0), first + 1)
    # Of 8 responses one or more never ends for 5% of the prompts (section 4.3): 1 - (1 - 0.0064)^8.
    programs = variant.programs
    reference = {"reference_column": "reference_time", "factor": 2.0} if programs.referenced else {}
    timeout = TimeoutSettings.model_validate({"adaptive": variant.adaptive} | reference)
    code = SimCodeSettings(cases=programs.cases, median_s=programs.median_s, endless=0.0064, timeout=timeout)
    cost = SimRewardSettings(workers=programs.workers, solvable=programs.solvable)
    return SimCodeRewards(cost, code, first + 2, anchors)


def set_up(model: Model, variant: Variant) -> SimSettings:
    """The model's devices and lengths, with what the variant changes."""
    used = replace(model, devices=3 * model.devices // 4) if variant.reserved else model
    sim = used.sim(variant.sharing)
    assert sim.cluster
    cluster = sim.cluster.changed(training_efficiency=TRAINING_EFFICIENCY / variant.slower)
    lengths = sim.lengths.changed(rows=variant.programs.rows or None)
    return sim.changed(cluster=cluster, lengths=lengths)


@cache
def run(
    model: Model, variant: Variant, tasks: tuple[Task, ...] = TASKS, rounds: int = ROUNDS, seed: int = 0
) -> Simulated:
    """Simulate a variant on a model's devices."""
    elastic = variant.placement == "elastic"
    sharing = DeviceSharing(
        variant.placement,
        max_width=NODE // model.width if variant.planner else 1,
        longest=model.max_tokens if variant.by_prompts else None,
    )
    replicas = 2 if elastic else 1
    settings = RunSettings(rounds=rounds, group_size=R0, seed=seed)
    sim = set_up(model, variant)

    def parts() -> RunComponents:
        parts = simulated_parts(rates(sim), seed, replicas=replicas, sharing=sharing)
        given = {"LLM-as-a-Judge": parts.rewards} if variant.sharing else {}
        each = [given.get(task) or rewards_of(task, variant, parts.anchors, seed) for task in tasks]
        return replace(parts, rewards=MixedRewards(each), synchronous_rewards=not variant.asynchronous)

    return simulate(variant.schedule(model.groups), sim, settings, parts=parts)


def speed(simulated: Simulated) -> float:
    """Trained samples a second, from end to end."""
    return sum(row["round/num_samples"] for row in simulated.rounds) / simulated.seconds


def rollout_s(simulated: Simulated) -> float:
    """Mean time of a rollout."""
    return fmean(row.get("round/rollout_time_s", 0.0) for row in simulated.rounds)


class GrowingLengths:
    """Lengths under a limit that grows from round to round; the median is 15% of the limit, sigma is 1.

    Args:
        limits: of each round of P0 prompts.
    """

    def __init__(self, limits: Sequence[int], seed: int) -> None:
        self._laws = [
            Lengths(SimLengthSettings(median_tokens=0.15 * limit, sigma=1.0, max_tokens=limit), seed)
            for limit in limits
        ]

    def __call__(self, sample: Sample) -> int:
        return self._laws[min(sample.prompt.index // P0, len(self._laws) - 1)](sample)


def growing_rollouts(limits: Sequence[int], max_width: int, seed: int = 0) -> Simulated:
    """Section 6.4: Qwen2.5-14B on 16 devices, TP 1 at the start, under a limit that grows.

    Args:
        max_width: the largest tensor-parallel size that the planner may choose.
    """
    model, lengths = Model(MEDIUM.name, 16, 1, max(limits)), GrowingLengths(limits, seed)
    sim = model.sim().changed(trainer=SimTrainerSettings(tokens_per_s=1e9, step_s=0.0))
    settings, sharing = (
        RunSettings(rounds=len(limits), group_size=R0, seed=seed),
        DeviceSharing("colocated", max_width=max_width),
    )

    def parts() -> RunComponents:
        cost = rates(sim).engines
        engines = [
            SimEngine(f"engine-{number}", cost, lengths, max(limits)) for number in range(cost.count or 1)
        ]
        return replace(simulated_parts(rates(sim), settings.seed, sharing=sharing), engines=engines)

    return simulate(serial_of(P0), sim, settings, parts=parts)


def long_rounds(simulated: Simulated) -> list[Row]:
    """Every fifth round: each short round defers a quarter of P0."""
    return [row for row in simulated.rounds if row["round"] % PERIOD == PERIOD - 1]


def short_rounds(simulated: Simulated) -> list[Row]:
    """The other rounds."""
    return [row for row in simulated.rounds if row["round"] % PERIOD != PERIOD - 1]
