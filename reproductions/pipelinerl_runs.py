"""PipelineRL's runs on 128 H100 in virtual time (section 5), and on 32 H100 (its earlier version).

All costs follow from the devices and the model (sim/cluster.py). The mean length is not published. Here it is
2,000 tokens: the earlier version names 1K to 2K, and lengths grew further in the later runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import exp
from statistics import fmean

from reproductions.base import Figure, Table
from tailrace.assembly.simulation import Simulated, simulate
from tailrace.controller.base import RunSettings
from tailrace.record.events import Event, RequestEnded
from tailrace.record.figures import Row
from tailrace.rollout.placement import Shared
from tailrace.schedules.conventional import conventional
from tailrace.schedules.pipelinerl import pipelinerl
from tailrace.schedules.serial import serial
from tailrace.sim.settings import (
    SimClusterSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
)

BATCH = 1024
"""Sequences of an optimizer step (B). A group has one sample: section 5 has a value function."""
IN_FLIGHT = 64
"""Sequences in flight on a device that generates (H)."""
SIGMA = 1.0
"""Assumed, of the logarithm of the lengths."""
VLLM_SLOTS = 256
"""vLLM's default of max_num_seqs in the versions of 2025."""
TWICE = "twice the accelerators"
RUNS = range(5)
"""Seeds of the runs of Fig. 2, which are averaged as in the paper."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """Devices and lengths.

    Args:
        devices: N.
        generating: devices that generate with PipelineRL. With Conventional RL all generate, then all train.
    """

    devices: int = 128
    generating: int = 48
    mean_tokens: float = 2000.0
    max_tokens: int = 32_768

    def sim(self, *, slots: int, in_turn: bool = False) -> SimSettings:
        median = self.mean_tokens / exp(SIGMA**2 / 2)  # of a lognormal distribution without a limit
        return SimSettings(
            cluster=SimClusterSettings(
                device="H100",
                devices=self.devices,
                model="Qwen2.5-7B",
                rollout_devices=None if in_turn else self.generating,
            ),
            engines=SimEngineSettings(slots=slots),
            lengths=SimLengthSettings(
                median_tokens=median, sigma=SIGMA, correlation=0.0, max_tokens=self.max_tokens
            ),
            rewards=SimRewardSettings(median_s=0.0, workers=BATCH),
        )


WHOLE = SetUp()
HALF = SetUp(devices=64, generating=24)
EARLIER = SetUp(devices=32, generating=16, mean_tokens=1500.0, max_tokens=8192)
"""The earlier version: 16 + 16 devices; mean lengths from 1K to 2K, a limit of 8K."""


@cache
def pipelined(set_up: SetUp, steps: int, warm_up_steps: int) -> Simulated:
    """Run PipelineRL."""
    schedule = partial(
        pipelinerl, groups_per_step=BATCH, in_flight_per_engine=IN_FLIGHT, ring_groups=2 * BATCH
    )
    settings = RunSettings(rounds=steps, group_size=1)
    return simulate(schedule, set_up.sim(slots=IN_FLIGHT), settings, warm_up_rounds=warm_up_steps)


@cache
def in_turn(set_up: SetUp, steps: int, slots: int, batch: int = BATCH) -> Simulated:
    """Run one RL step of Conventional RL.

    Args:
        steps: optimizer steps of it (G).
        slots: sequences that one device decodes together.
    """
    schedule = partial(conventional, groups_per_step=batch, steps_per_round=steps)
    sim, settings = set_up.sim(slots=slots, in_turn=True), RunSettings(rounds=1, group_size=1)
    return simulate(schedule, sim, settings, shared=Shared("colocated"))


def _of_whole() -> Simulated:
    return pipelined(WHOLE, 64, 32)


class _Ends:
    """Sink: when requests ended."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def on(self, event: Event) -> None:
        if isinstance(event, RequestEnded):
            self.times_s.append(event.time_s)

    def close(self) -> None:
        """Times are complete when they arrive."""


def _generation(sequences: int, lengths: SimLengthSettings, seed: int) -> tuple[Row, Sequence[float]]:
    """One rollout on one H100 with vLLM's number of slots, and when its requests ended."""
    set_up, ends = SetUp(devices=8, generating=1), _Ends()
    sim = set_up.sim(slots=VLLM_SLOTS).model_copy(update={"lengths": lengths})
    schedule = partial(serial, groups_per_round=sequences, groups_per_step=sequences)
    settings = RunSettings(rounds=1, group_size=1, seed=seed)
    return simulate(schedule, sim, settings, sinks=[ends]).rounds[0], ends.times_s


def generation() -> Table:
    """Fig. 2: throughput and time of generation on one H100."""
    alike = SimLengthSettings(median_tokens=512.0, sigma=0.0, max_tokens=512, prompt_tokens=32)
    rates = {
        size: _generation(size, alike, 0)[0]["round/generated_tokens_per_s"] for size in (32, 64, 128, 256)
    }
    figures = []
    for size, rate in rates.items():
        row = f"2a, batch size {size}"
        figures.append(Figure(row, "throughput", "tokens/s", None, rate, "predicted"))
        if half := rates.get(size // 2):
            printed = 2.0 if size <= 128 else None
            figures.append(Figure(row, "of that at half the size", "x", printed, rate / half, "predicted"))
    long = WHOLE.sim(slots=1).lengths
    for share in (0.5, 0.9):
        ends = [_generation(VLLM_SLOTS, long, seed)[1] for seed in RUNS]
        spent = 100 * fmean(each[int(share * VLLM_SLOTS) - 1] / each[-1] for each in ends)
        what = f"time until {share:.0%} have finished"
        figures.append(Figure(f"2b, {VLLM_SLOTS} sequences", what, "%", None, spent, "predicted"))
    for size in (256, 128, 64, 32, 16):
        rows = [_generation(size, long, seed)[0] for seed in RUNS]
        seconds, rate = (
            fmean(row.get(f"round/{field}", 0.0) for row in rows)
            for field in ("rollout_time_s", "generated_tokens_per_s")
        )
        name = f"2c, {size} sequences"
        figures += [
            Figure(name, "time", "s", None, seconds, "predicted"),
            Figure(name, "throughput", "tokens/s", None, rate, "predicted"),
        ]
    notes = (
        'The paper prints curves. Its text says that throughput grows "almost linearly" up to a batch of 128'
        " (2.0 here) and increases up to 256, that the batch shrinks as sequences finish, and that time"
        " reaches a plateau and throughput falls with fewer sequences.",
        f"2a: responses of 512 tokens. 2b and 2c: lengths as in section 5, mean of {len(RUNS)} runs.",
    )
    return Table("Fig. 2", "generation on one H100", tuple(figures), notes)


def lags() -> Table:
    """Fig. 3a: the lag over the position in a sequence, and over the steps of Conventional RL."""
    profile, half = _profile(_of_whole()), _profile(pipelined(HALF, 32, 24))
    spread = (profile[0] - profile[-1]) / (half[0] - half[-1])
    turn = in_turn(WHOLE, 8, IN_FLIGHT, 128).steps
    figures = [
        Figure(TWICE, "lag of the first tenth", "x", 2.0, profile[0] / half[0], "predicted"),
        Figure(TWICE, "the same, above the last tenth", "x", None, spread, "predicted"),
        Figure("Conventional RL, G = 8", "lag, first step", "", 0.0, turn[0]["lag/mean"], "predicted"),
        Figure("Conventional RL, G = 8", "lag, last step", "", 7.0, turn[-1]["lag/mean"], "predicted"),
    ]
    figures += [
        Figure(f"PipelineRL, tenth {tenth + 1}", "mean lag", "steps", None, lag, "predicted")
        for tenth, lag in enumerate(profile)
    ]
    notes = (
        "The paper's figure is a sketch without numbers; its caption says that the lag of early tokens"
        " doubles.",
        "The last tenth has a lag of about one step on any number of accelerators, and the load of new"
        " weights takes a larger share of a shorter step.",
    )
    return Table("Fig. 3a", "lag over the position in the sequence", tuple(figures), notes)


def _profile(run: Simulated) -> list[float]:
    """Mean lag of each tenth of the sequences, over the last eight steps."""
    steps = run.steps[-8:]
    return [fmean(row[f"lag/tenth/{tenth}"] for row in steps) for tenth in range(10)]


def throughput() -> Table:
    """Fig. 5c: samples a second, against Conventional RL with G = 32."""
    pipe = _of_whole().lap["samples_per_s"]
    figures = [Figure("PipelineRL", "throughput", "samples/s", None, pipe, "predicted")]
    for slots in (IN_FLIGHT, VLLM_SLOTS):
        turn = in_turn(WHOLE, 32, slots).lap["samples_per_s"]
        row = f"G = 32, {slots} at once"
        printed = 2.0 if slots == IN_FLIGHT else None
        figures += [
            Figure(row, "throughput", "samples/s", None, turn, "predicted"),
            Figure(row, "PipelineRL against it", "x", printed, pipe / turn, "predicted"),
        ]
    notes = (
        'The paper prints curves, and "approximately 2x" in the text.',
        "Its baseline was estimated with 64 sequences at once on a device; 256 would be all of its share.",
    )
    return Table("Fig. 5c", "sample throughput on 128 H100", tuple(figures), notes)


def max_lags() -> Table:
    """Fig. 6a: the largest lag of a trained token, in samples."""
    pipe = BATCH * _of_whole().lap["lag_max"]
    turn = BATCH * in_turn(WHOLE, 32, IN_FLIGHT).lap["lag_max"]
    figures = (
        Figure("PipelineRL", "max lag", "samples", 50_000.0, pipe, "predicted"),
        Figure("Conventional RL, G = 32", "max lag", "samples", 31.0 * BATCH, turn, "predicted"),
    )
    notes = (
        'The paper prints curves, and "more than 50k samples" for some tokens of PipelineRL.',
        "G = 32 has G - 1 optimizer steps by Algorithm 1.",
        "For assumed mean lengths of 1,000, 2,000 and 4,000 tokens it is 57k, 53k and 28k samples.",
    )
    return Table("Fig. 6a", "the largest lag", figures, notes)


def earlier_version() -> Table:
    """The earlier version's runs on 32 H100: 16 generate, 16 train, against G = 4."""
    pipe, turn = pipelined(EARLIER, 24, 12), in_turn(EARLIER, 4, 128)
    gain = pipe.lap["samples_per_s"] / turn.lap["samples_per_s"]
    lag = fmean(row["lag/max"] for row in pipe.steps[12:])
    figures = (
        Figure("32 H100, G = 4", "throughput, PipelineRL against it", "x", 2.0, gain, "predicted"),
        Figure("32 H100", "largest lag of a step, mean", "steps", 8.0, lag, "predicted"),
    )
    notes = (
        f"Mean length: {EARLIER.mean_tokens:g} tokens, the middle of the printed 1K to 2K.",
        "Conventional RL: 128 sequences at once on a device, as the earlier version says.",
    )
    return Table("Earlier version, Fig. 5b", "runs on 32 H100", figures, notes)
