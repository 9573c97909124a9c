"""APRIL (Zhou et al. 2025): the rollout throughput of its twelve settings, Table 1, and Figs. 4 and 5.

The paper leaves open how its baseline samples under DAPO's filter and what its throughput counts. Both are
read from the published code (RLsys-Foundation/APRIL, slime/rollout/sglang_example.py and
backends/megatron_utils/data.py, September 2025):

    dynamic sampling    `april_dapo`; batches have 64 prompts with APRIL, and N = 32 without (the default)
    end of a rollout    at the N-th group that passes; the baseline discards all others
    throughput          tokens that engines generate in a rollout, those of filtered and discarded groups
                        included, over its time
    carried tokens      tokens of unfinished responses at their resumption, as a share of these and the tokens
                        generated (`off_policy_ratio`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from typing import Literal

from reproductions.base import Collected, Figure, Kind, Paper, Span, Table, parameters
from tailrace.algo.advantages import ComputeAdvantages
from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.controller.base import RunSettings
from tailrace.controller.run import Run
from tailrace.drivers.assembly.simulation import Simulated, simulate
from tailrace.record.events import RequestEnded, RequestStarted
from tailrace.rollout.placement import DeviceSharing
from tailrace.schedules import Schedule
from tailrace.schedules.april import april, april_dapo, sampled
from tailrace.schedules.serial import serial
from tailrace.sim.settings import SimSettings

Algorithm = Literal["GRPO", "DAPO"]

N, LAUNCHED, K, MAX_TOKENS = 32, 64, 8, 16_384
ROUNDS, WARM_UP_ROUNDS = 16, 3
CLUSTER = {"device": "MI300X", "devices": 8, "tensor_parallel": 2, "memory_share": 0.6}
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
    """The baseline under dynamic sampling: as `april_dapo`, but what has not passed the filter at the end of
    the rollout is discarded."""
    run.declare(staleness=0)
    async for _ in run.rounds():
        batch = await sampled(run, groups_per_round, groups_per_draw)
        run.drop(run.parked.pop(len(run.parked)), "discarded")
        await run.train(batch)
        await run.publish(kv="recompute")


def schedules(algorithm: Algorithm) -> tuple[Schedule, Schedule]:
    """The baseline and APRIL."""
    if algorithm == "GRPO":
        return (
            partial(serial, groups_per_round=N, groups_per_step=N),
            partial(april, groups_per_round=N, groups_launched=LAUNCHED),
        )
    return (
        partial(oversample_and_discard, groups_per_round=N, groups_per_draw=N),
        partial(april_dapo, groups_per_round=N, groups_per_draw=LAUNCHED),
    )


def sim_settings(setting: Setting) -> SimSettings:
    """Devices, lengths and rewards of a setting."""
    median_tokens, sigma = LENGTHS[setting.data]
    lengths = {"median_tokens": median_tokens, "sigma": sigma, "correlation": CORRELATION[setting.algorithm]}
    sections = {
        # The fitted share of the bandwidth holds what the host takes for each request.
        "cluster": {
            **CLUSTER,
            **{"model": setting.model, "bandwidth_efficiency": 0.32, "overhead_per_request_s": 0.0},
        },
        "engines": {"slots": 1024},
        "lengths": lengths | {"max_tokens": MAX_TOKENS, "prompt_tokens": 150},
        "rewards": {"workers": 512, "median_s": 0.01, "sigma": 0.0, "solvable": SOLVABLE},
    }
    return SimSettings.model_validate(sections)


@cache
def compare(setting: Setting, seed: int = 0) -> tuple[Simulated, Simulated, float]:
    """Simulate a setting: the baseline, APRIL, and the carried tokens of APRIL in %."""
    started, ended = Collected(RequestStarted), Collected(RequestEnded)
    algorithm = AlgorithmSettings(name="dapo" if setting.algorithm == "DAPO" else "grpo")
    run = partial(
        simulate,
        sim=sim_settings(setting),
        settings=RunSettings(rounds=ROUNDS, group_size=K, seed=seed),
        sharing=DeviceSharing("colocated"),
        warm_up_rounds=WARM_UP_ROUNDS,
        compute_advantages=ComputeAdvantages(algorithm, SamplingSettings(max_completion_tokens=MAX_TOKENS)),
    )
    baseline, with_april = schedules(setting.algorithm)
    before, after = run(baseline), run(with_april, sinks=[started, ended])
    carried = sum(event.num_tokens for event in started.events)
    return before, after, 100 * carried / (carried + sum(event.num_gained for event in ended.events))


def throughput(simulated: Simulated) -> float:
    """Tokens a second in the rollouts after the warm-up."""
    rounds = simulated.rounds[WARM_UP_ROUNDS:]
    return sum(each["round/num_generated"] for each in rounds) / sum(
        each.get("round/rollout_time_s", 0.0) for each in rounds
    )


def gain(setting: Setting, seed: int) -> float:
    """Of APRIL over the baseline, in %."""
    baseline, with_april, _ = compare(setting, seed)
    return 100 * (throughput(with_april) / throughput(baseline) - 1)


def kind_of(settings: Sequence[Setting]) -> Kind:
    """Fitted if half of the settings or more were."""
    return "fitted" if 2 * sum(setting in FITTED for setting in settings) >= len(settings) else "predicted"


def table_1(seed: int) -> Table:
    """Rollout throughput of the twelve settings."""
    figures = []
    for setting, (baseline, with_april, percent) in PRINTED.items():
        row, kind = str(setting), kind_of([setting])
        before, after, _ = compare(setting, seed)
        figures += [
            Figure(row, "throughput, baseline", "tokens/s", baseline, throughput(before), kind),
            Figure(row, "throughput, APRIL", "tokens/s", with_april, throughput(after), kind),
            Figure(row, "gain", "%", percent, gain(setting, seed), kind),
        ]
    for (model, algorithm), percent in AVERAGES.items():
        figures.append(_mean(f"{model}, {algorithm}, mean", percent, model, algorithm, seed))
    for algorithm in CORRELATION:
        percent = fmean(printed[2] for each, printed in PRINTED.items() if each.algorithm == algorithm)
        figures.append(_mean(f"{algorithm}, mean", percent, "", algorithm, seed))
    notes = (
        "Throughput counts what engines generate, as the published code does: also what is then discarded.",
        "A mean counts as fitted if half of its settings or more were.",
    )
    return Table("Table 1", "rollout throughput on 8 GPUs", tuple(figures), notes)


def _mean(row: str, printed: float, model: str, algorithm: Algorithm, seed: int) -> Figure:
    """The mean gain of the settings with this algorithm and, unless it is empty, this model."""
    settings = [each for each in PRINTED if each.algorithm == algorithm and model in each.model]
    ours = fmean(gain(each, seed) for each in settings)
    return Figure(row, "gain", "%", printed, ours, kind_of(settings), tolerance=5.0)


def _steps(setting: Setting, seed: int, name: str) -> list[float]:
    """A figure of the steps of APRIL after the warm-up."""
    _, with_april, _ = compare(setting, seed)
    return [step[name] for step in with_april.steps[WARM_UP_ROUNDS:]]


def figure_4(seed: int) -> Table:
    """Carried tokens and versions of the policy in a sample, with GRPO."""
    figures = []
    for setting in (each for each in PRINTED if each.algorithm == "GRPO"):
        resumed, row = compare(setting, seed)[2], str(setting)
        samples, tokens = (
            100 * fmean(_steps(setting, seed, f"carried/{of}")) for of in ("samples", "tokens")
        )
        versions = max(_steps(setting, seed, "versions/max"))
        figures += [
            Figure(row, "trained samples with tokens of older versions", "%", 40.0, samples),
            Figure(row, "trained tokens of older versions", "%", 40.0, tokens),
            Figure(row, "tokens at their resumption", "%", 40.0, resumed),
            Figure(row, "versions of a sample, most", "", (1.0, 5.0), versions),
        ]
    notes = (
        "The caption counts rollouts, section 3.2.3 tokens of later steps; ours are nearly twice as many.",
        "At their resumption: tokens of unfinished responses, as a share of these and the tokens generated in"
        " the same rollouts, which the published code reports. Versions: section 3.2.2.",
    )
    return Table("Fig. 4", "tokens of earlier versions", tuple(figures), notes)


def figure_5(seed: int) -> Table:
    """Standard deviation of the lengths in a batch and in a group, Qwen3-4B."""
    figures = []
    for setting in (each for each in PRINTED if each.model == "Qwen3-4B"):
        within: Span = (0.0, 1500.0 if setting.algorithm == "GRPO" else 2400.0)
        whole, group = (
            fmean(_steps(setting, seed, f"completions/{name}"))
            for name in ("std_length", "std_length_in_group")
        )
        figures += [
            Figure(str(setting), "deviation in a batch", "tokens", (4000.0, 4500.0), whole, "fitted"),
            Figure(str(setting), "deviation in a group", "tokens", within, group, "fitted"),
        ]
    notes = ("Of trained responses with APRIL, over n - 1; the set-up is fitted to those of all, over n.",)
    return Table("Fig. 5", "standard deviation of response lengths", tuple(figures), notes)


PARAMETERS = """
printed 4 | N = 32, K = 8, N' = 64, at most 16,384 tokens | Table 3
printed 3 | 4 engines of 2 devices with 60% of the memory | the published scripts
fitted 4 | decoding reaches 32% of the memory bandwidth; the median length of each data set | the throughput
    of Qwen3-4B with GRPO
fitted 5 | sigma of each data set, so that the standard deviation of all lengths is 4,250 tokens; the
    correlations, so that it is 1,470 (GRPO) or 2,420 (DAPO) within a group | Fig. 5
fitted 1 | 72% of the groups have equal rewards | the gain of Qwen3-4B with DAPO on DAPO-Math-17k
assumed 3 | prompts of 150 tokens, rewards after 0.01 s, 1,024 slots of an engine |
"""
PAPER = Paper(
    name="april",
    citation="Zhou et al. 2025, APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-Tail"
    " Generation",
    set_up=(
        "8 MI300X that generate and train in turn; the other rates follow from the devices. Rewards do not"
        f" depend on lengths. {ROUNDS} rounds, of which the first {WARM_UP_ROUNDS} do not count.",
        "The baseline under dynamic sampling is that of the published code: whenever fewer than 32 groups are"
        " alive, 32 prompts are drawn, and what has not passed at the end is discarded.",
    ),
    parameters=parameters(PARAMETERS),
    tables={"Table 1": table_1, "Fig. 4": figure_4, "Fig. 5": figure_5},
    contradictions=(
        "The abstract states a mean gain of 22.5%; the twelve gains of Table 1 have the mean 22.0%.",
        "Table 1 prints 31.8% for Qwen3-4B with GRPO on DeepScaleR; its throughputs there give 31.7%.",
        "The abstract names GSPO among the measured algorithms; no figure or table has GSPO.",
        "The 40% are tokens in section 3.2.3 and rollouts in the caption of Fig. 4.",
        "Section 3.1 ends a rollout after 256 responses, section 3.2.3 after 32 complete groups.",
        "The abstract says that no rollout is discarded; the published code loses groups that complete in the"
        " same instant as the last one.",
    ),
    not_attempted="Fig. 3, Figs. 6 to 9, Tables 2 and 5 to 7 (accuracy and convergence).",
)
