"""APRIL (Zhou et al. 2025): the rollout throughput of its twelve settings, Table 1, and Fig. 4.

The paper leaves open how its baseline samples under DAPO's filter and what its throughput counts. Both are
read from the published code (RLsys-Foundation/APRIL, slime/rollout/sglang_example.py and
backends/megatron_utils/data.py, September 2025):

    dynamic sampling    whenever fewer than N groups are alive (unfinished, or passed by the filter), a batch
                        of `over_sampling_batch_size` prompts is drawn: 64 with APRIL, N = 32 without, which
                        is the default
    end of a rollout    at the N-th group that passes; the baseline discards all others
    throughput          tokens that engines generate in a rollout, those of filtered and discarded groups
                        included, over its time
    carried tokens      tokens of unfinished responses at their resumption, as a share of these and the tokens
                        generated (`off_policy_ratio`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from statistics import fmean
from typing import Literal

from reproductions.base import Figure, Kind, Paper, Table
from tailrace.algo.advantages import ComputeAdvantages
from tailrace.algo.base import AlgorithmSettings
from tailrace.assembly.simulation import Simulated, simulate
from tailrace.controller.base import RunSettings
from tailrace.controller.run import Run
from tailrace.record.events import Event, RequestEnded, RequestStarted
from tailrace.rollout.placement import Shared
from tailrace.schedules import Schedule
from tailrace.schedules.april import april
from tailrace.schedules.serial import serial
from tailrace.sim.settings import (
    SimClusterSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
)
from tailrace.types import Group

Algorithm = Literal["GRPO", "DAPO"]

N, LAUNCHED, K, MAX_TOKENS = 32, 64, 8, 16_384
ROUNDS, WARM_UP_ROUNDS = 16, 3
CLUSTER = SimClusterSettings(
    device="MI300X", devices=8, tensor_parallel=2, memory_share=0.6, bandwidth_efficiency=0.32
)
LENGTHS: Mapping[str, tuple[float, float]] = {
    "DAPO-Math-17k": (8570.0, 0.572),
    "DeepScaleR": (7620.0, 0.599),
    "DeepMath": (6810.0, 0.634),
}
"""Median and sigma of the lognormal law of each data set, before the limit of 16,384 tokens."""
CORRELATION: Mapping[Algorithm, float] = {"GRPO": 0.85, "DAPO": 0.60}
SOLVABLE = (0.14, 0.14)
"""Beta distribution of the prompts' solve rates: 72% of the groups of 8 have equal rewards."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A column of Table 1."""

    model: str
    algorithm: Algorithm
    data: str

    def __str__(self) -> str:
        return f"{self.model}, {self.algorithm}, {self.data}"


COLUMNS: Mapping[tuple[str, Algorithm], Sequence[tuple[float, float, float]]] = {
    ("Qwen3-4B", "GRPO"): ((9814, 12210, 24.4), (9252, 12183, 31.8), (9459, 13027, 37.7)),
    ("Qwen3-8B", "GRPO"): ((8780, 11096, 26.4), (8031, 10821, 34.7), (7756, 11594, 49.5)),
    ("Qwen3-4B", "DAPO"): ((12572, 13698, 9.0), (12257, 13916, 13.5), (13038, 14318, 9.8)),
    ("Qwen3-8B", "DAPO"): ((11419, 12407, 8.7), (11470, 12439, 8.5), (11860, 13075, 10.2)),
}
"""Tokens a second without APRIL and with it, and the gain in %, for each data set."""
PRINTED = {
    Setting(model, algorithm, data): printed
    for (model, algorithm), columns in COLUMNS.items()
    for data, printed in zip(LENGTHS, columns, strict=True)
}
FITTED = {
    *(setting for setting in PRINTED if (setting.model, setting.algorithm) == ("Qwen3-4B", "GRPO")),
    Setting("Qwen3-4B", "DAPO", "DAPO-Math-17k"),
}
AVERAGES: Mapping[tuple[str, Algorithm], float] = {
    ("Qwen3-4B", "GRPO"): 31.3,
    ("Qwen3-8B", "GRPO"): 36.9,
    ("Qwen3-4B", "DAPO"): 10.8,
    ("Qwen3-8B", "DAPO"): 9.1,
}
"""Gains in %, "Avg Imp." of Table 1."""


async def oversample_and_discard(run: Run, groups_per_round: int, groups_per_draw: int) -> None:
    """The baseline under dynamic sampling: prompts are drawn in batches, and what has not passed the filter
    at the end of the rollout is discarded.

    Args:
        groups_per_round: groups trained in a round (N).
        groups_per_draw: groups of a batch.
    """
    run.promise(staleness=0)
    async for _ in run.rounds():
        batch = await _passed(run, groups_per_round, groups_per_draw)
        run.drop(run.parked.pop(len(run.parked)), "discarded")
        await run.train(batch)
        await run.publish(kv="recompute")


async def resample_and_resume(run: Run, groups_per_round: int, groups_per_draw: int) -> None:
    """APRIL under dynamic sampling: the same, and what is left over comes first in the next batch.

    Args:
        groups_per_round: groups trained in a round (N).
        groups_per_draw: groups of a batch (N').
    """
    run.promise(staleness=inf)
    async for _ in run.rounds():
        await run.train(await _passed(run, groups_per_round, groups_per_draw))
        await run.publish(kv="recompute")


async def _passed(run: Run, num_groups: int, groups_per_draw: int) -> list[Group]:
    """The first groups that pass the filter. All others are parked."""
    run.pool.feed(run.prompts, room=0, full="block")  # without room, no filtered group is replaced by one
    while len(run.pool.ready) < num_groups:
        if len(run.pool) < num_groups:
            groups = run.parked.pop(groups_per_draw)
            run.pool.launch(groups + run.prompts(groups_per_draw - len(groups)))
        else:
            await run.pool.ready.changed.wait("groups that pass the filter")
    batch = await run.pool.take(num_groups)
    await run.pool.park()
    return batch


def schedules(algorithm: Algorithm) -> tuple[Schedule, Schedule]:
    """The baseline and APRIL."""
    if algorithm == "GRPO":
        return (
            partial(serial, groups_per_round=N, groups_per_step=N),
            partial(april, groups_per_round=N, groups_launched=LAUNCHED),
        )
    return (
        partial(oversample_and_discard, groups_per_round=N, groups_per_draw=N),
        partial(resample_and_resume, groups_per_round=N, groups_per_draw=LAUNCHED),
    )


def sim_settings(setting: Setting) -> SimSettings:
    """Devices, lengths and rewards of a setting."""
    median_tokens, sigma = LENGTHS[setting.data]
    return SimSettings(
        cluster=CLUSTER.model_copy(update={"model": setting.model}),
        engines=SimEngineSettings(slots=1024),
        lengths=SimLengthSettings(
            median_tokens=median_tokens,
            sigma=sigma,
            correlation=CORRELATION[setting.algorithm],
            max_tokens=MAX_TOKENS,
            prompt_tokens=150,
        ),
        rewards=SimRewardSettings(workers=512, median_s=0.01, sigma=0.0, solvable=SOLVABLE),
    )


class CarriedTokens:
    """Sink: tokens of responses at their resumption, and tokens generated."""

    def __init__(self) -> None:
        self.carried = self.generated = 0

    def on(self, event: Event) -> None:
        match event:
            case RequestStarted():
                self.carried += event.num_tokens
            case RequestEnded():
                self.generated += event.num_gained

    def close(self) -> None:
        """Nothing is left open."""

    @property
    def percent(self) -> float:
        return 100 * self.carried / (self.carried + self.generated)


@cache
def compare(setting: Setting) -> tuple[Simulated, Simulated, CarriedTokens]:
    """Simulate a setting: the baseline, APRIL, and what APRIL carries over."""
    carried = CarriedTokens()
    algorithm = AlgorithmSettings(name="dapo" if setting.algorithm == "DAPO" else "grpo")
    run = partial(
        simulate,
        sim=sim_settings(setting),
        settings=RunSettings(rounds=ROUNDS, group_size=K),
        shared=Shared("colocated"),
        warm_up_rounds=WARM_UP_ROUNDS,
        compute_advantages=ComputeAdvantages(algorithm, MAX_TOKENS),
    )
    baseline, with_april = schedules(setting.algorithm)
    return run(baseline), run(with_april, sinks=[carried]), carried


def throughput(simulated: Simulated) -> float:
    """Tokens a second in the rollouts after the warm-up."""
    rounds = simulated.rounds[WARM_UP_ROUNDS:]
    return sum(each["round/num_generated"] for each in rounds) / sum(
        each.get("round/rollout_time_s", 0.0) for each in rounds
    )


def gain(setting: Setting) -> float:
    """Of APRIL over the baseline, in %."""
    baseline, with_april, _ = compare(setting)
    return 100 * (throughput(with_april) / throughput(baseline) - 1)


def kind_of(settings: Sequence[Setting]) -> Kind:
    """Fitted if half of the settings or more were."""
    return "fitted" if 2 * sum(setting in FITTED for setting in settings) >= len(settings) else "predicted"


def table_1() -> Table:
    """Rollout throughput of the twelve settings."""
    figures = []
    for setting, (baseline, with_april, percent) in PRINTED.items():
        row, kind = str(setting), kind_of([setting])
        before, after, _ = compare(setting)
        figures += [
            Figure(row, "throughput, baseline", "tokens/s", baseline, throughput(before), kind),
            Figure(row, "throughput, APRIL", "tokens/s", with_april, throughput(after), kind),
            Figure(row, "gain", "%", percent, gain(setting), kind),
        ]
    for (model, algorithm), percent in AVERAGES.items():
        figures.append(_mean(f"{model}, {algorithm}, mean", percent, model, algorithm))
    for algorithm in CORRELATION:
        percent = fmean(printed[2] for each, printed in PRINTED.items() if each.algorithm == algorithm)
        figures.append(_mean(f"{algorithm}, mean", percent, "", algorithm))
    return Table("Table 1", "rollout throughput on 8 GPUs", tuple(figures), NOTES)


def _mean(row: str, printed: float, model: str, algorithm: Algorithm) -> Figure:
    """The mean gain of the settings with this algorithm and, unless it is empty, this model."""
    settings = [each for each in PRINTED if each.algorithm == algorithm and model in each.model]
    ours = fmean(gain(each) for each in settings)
    return Figure(row, "gain", "%", printed, ours, kind_of(settings), tolerance=5.0)


def figure_4() -> Table:
    """Carried tokens and versions of the policy in a sample, with GRPO."""
    figures = []
    for setting in PRINTED:
        if setting.algorithm == "GRPO":
            _, with_april, carried = compare(setting)
            steps = with_april.steps[WARM_UP_ROUNDS:]
            versions = max(step["versions/max"] for step in steps)
            trained = 100 * fmean(step["carried/tokens"] for step in steps)
            figures += [
                Figure(str(setting), "carried tokens", "%", 40.0, carried.percent, "predicted"),
                Figure(str(setting), "trained tokens of older versions", "%", None, trained, "predicted"),
                Figure(str(setting), "versions of a sample, most", "", (1.0, 5.0), versions, "predicted"),
            ]
    return Table("Fig. 4", "tokens of earlier versions", tuple(figures), CARRIED_NOTES)


NOTES = (
    "Throughput counts the tokens that engines generate, as the published code does: those of filtered and"
    " discarded groups, too.",
    "A mean counts as fitted if half of its settings or more were.",
)
CARRIED_NOTES = (
    "Carried tokens are those of unfinished responses at their resumption, as a share of these and the tokens"
    " generated in the same rollouts.",
    "Trained tokens of older versions contain finished responses of unfinished groups, too.",
    "The paper reports versions in section 3.2.2.",
)
PAPER = Paper(
    name="april",
    citation="Zhou et al. 2025, APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-Tail"
    " Generation",
    set_up=(
        "8 MI300X that generate and train in turn; 4 engines of 2 devices with 60% of the memory, as in the"
        " published scripts; Qwen3-4B and Qwen3-8B; N = 32, K = 8, N' = 64, at most 16,384 tokens.",
        f"Rates follow from the devices. Fitted: decoding reaches {CLUSTER.bandwidth_efficiency:.0%} of the"
        " memory bandwidth, and the median length of each data set, to the throughput of Qwen3-4B with GRPO.",
        "The standard deviation of all lengths is 4,250 tokens, as in Fig. 5a, and that within a group 1,470"
        " (GRPO) or 2,420 (DAPO), as in Fig. 5b; so sigma and the correlation are set.",
        "Fitted to the gain of Qwen3-4B with DAPO on DAPO-Math-17k: 72% of the groups have equal rewards."
        " Rewards do not depend on lengths.",
        "The baseline under dynamic sampling is that of the published code: whenever fewer than 32 groups are"
        " alive, 32 prompts are drawn, and what has not passed at the end is discarded.",
        f"{ROUNDS} rounds, of which the first {WARM_UP_ROUNDS} do not count.",
    ),
    tables={"Table 1": table_1, "Fig. 4": figure_4},
    num_fitted=8,
    contradictions=(
        "The abstract states a mean gain of 22.5%; the twelve gains of Table 1 have the mean 22.0%.",
        "Table 1 prints 31.8% for Qwen3-4B with GRPO on DeepScaleR; its throughputs there give 31.7%.",
        "The abstract names GSPO among the measured algorithms; no figure or table has GSPO.",
        "The 40% are tokens in section 3.2.3 and rollouts in the caption of Fig. 4.",
        "Section 3.1 ends a rollout after 256 responses, section 3.2.3 after 32 complete groups.",
        "The abstract says that no rollout is discarded; the published code loses groups that complete in the"
        " same instant as the last one.",
    ),
)
