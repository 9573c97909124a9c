"""PipelineRL's runs on 128 H100 in virtual time (section 5), and on 32 H100 (its earlier version).

All costs follow from the devices and the model (sim/cluster.py). The mean length is not published; here it is
2,000 tokens: the earlier version names 1K to 2K, and lengths grew further in the later runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import exp
from statistics import fmean

from reproductions.base import Collected, Figure, Table
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.simulation import Simulated, simulate
from tailrace.record.events import RequestEnded, Row
from tailrace.rollout.placement import DeviceSharing
from tailrace.schedules.conventional import conventional
from tailrace.schedules.pipelinerl import pipelinerl
from tailrace.schedules.serial import serial
from tailrace.sim.settings import SimLengthSettings, SimSettings

BATCH = 1024
"""Sequences of an optimizer step (B). A group has one sample: section 5 has a value function."""
IN_FLIGHT = 64
"""Sequences in flight on a device that generates (H)."""
SIGMA = 1.0
"""Assumed, of the logarithm of the lengths."""
VLLM_SLOTS = 256
"""vLLM's default of max_num_seqs in the versions of 2025."""
TWICE = "twice the accelerators"
MEANS = "for means of 1,000, 1,500, 2,000, 3,000 and 4,000 tokens (one seed)"


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
        lengths = {"median_tokens": median, "sigma": SIGMA, "correlation": 0.0, "max_tokens": self.max_tokens}
        cluster = {"device": "H100", "devices": self.devices, "model": "Qwen2.5-7B"}
        sections = {
            "cluster": cluster | {"rollout_devices": None if in_turn else self.generating},
            "engines": {"slots": slots},
            "lengths": lengths,
            "rewards": {"median_s": 0.0, "workers": BATCH},
        }
        return SimSettings.model_validate(sections)


WHOLE = SetUp()
HALF = SetUp(devices=64, generating=24)
EARLIER = SetUp(devices=32, generating=16, mean_tokens=1500.0, max_tokens=8192)
"""The earlier version: 16 + 16 devices; mean lengths from 1K to 2K, a limit of 8K."""


@cache
def pipelined(set_up: SetUp, steps: int, warm_up_steps: int, seed: int) -> Simulated:
    """Run PipelineRL."""
    schedule = partial(
        pipelinerl, groups_per_step=BATCH, in_flight_per_engine=IN_FLIGHT, ring_groups=2 * BATCH
    )
    settings = RunSettings(rounds=steps, group_size=1, seed=seed)
    return simulate(schedule, set_up.sim(slots=IN_FLIGHT), settings, warm_up_rounds=warm_up_steps)


@cache
def in_turn(set_up: SetUp, steps: int, slots: int, batch: int = BATCH, seed: int = 0) -> Simulated:
    """Run one RL step of Conventional RL.

    Args:
        steps: optimizer steps of it (G).
        slots: sequences that one device decodes together.
    """
    schedule = partial(conventional, groups_per_step=batch, steps_per_round=steps)
    settings = RunSettings(rounds=1, group_size=1, seed=seed)
    return simulate(
        schedule, set_up.sim(slots=slots, in_turn=True), settings, sharing=DeviceSharing("colocated")
    )


def _of_whole(seed: int) -> Simulated:
    return pipelined(WHOLE, 64, 32, seed)


def _generation(sequences: int, lengths: SimLengthSettings, seed: int) -> tuple[Row, Sequence[float]]:
    """One rollout on one H100 with vLLM's number of slots, and when its requests ended."""
    set_up, ends = SetUp(devices=8, generating=1), Collected(RequestEnded)
    sim = set_up.sim(slots=VLLM_SLOTS).changed(lengths=lengths)
    schedule = partial(serial, groups_per_round=sequences, groups_per_step=sequences)
    settings = RunSettings(rounds=1, group_size=1, seed=seed)
    row = simulate(schedule, sim, settings, sinks=[ends]).rounds[0]
    return row, [event.time_s for event in ends.events]


def generation(seed: int) -> Table:
    """Fig. 2: throughput and time of generation on one H100."""
    alike = SimLengthSettings(median_tokens=512.0, sigma=0.0, max_tokens=512, prompt_tokens=32)
    sizes, rate = (32, 64, 128, 256), "round/generated_tokens_per_s"
    rates = {size: _generation(size, alike, seed)[0][rate] for size in sizes}
    figures = []
    for size in sizes:
        row = f"2a, batch size {size}"
        figures.append(Figure(row, "throughput", "tokens/s", None, rates[size]))
        if half := rates.get(size // 2):
            figures.append(Figure(row, "of that at half the size", "x", None, rates[size] / half))
    long = WHOLE.sim(slots=1).lengths
    ends = _generation(VLLM_SLOTS, long, seed)[1]
    for share in (0.5, 0.9):
        spent, what = ends[int(share * VLLM_SLOTS) - 1] / ends[-1], f"time until {share:.0%} have finished"
        figures.append(Figure(f"2b, {VLLM_SLOTS} sequences", what, "%", None, 100 * spent))
    for size in (256, 128, 64, 32, 16):
        one = _generation(size, long, seed)[0]
        name = f"2c, {size} sequences"
        figures.append(Figure(name, "time", "s", None, one.get("round/rollout_time_s", 0.0)))
        figures.append(Figure(name, "throughput", "tokens/s", None, one[rate]))
    notes = (
        'The paper prints curves. Its text says that throughput grows "almost linearly" up to a batch of 128'
        " and increases up to 256; the batch shrinks as sequences finish; with fewer sequences time reaches a"
        " plateau and throughput falls.",
        "2a: responses of 512 tokens. 2b and 2c: lengths as in section 5, one run of each seed.",
    )
    return Table("Fig. 2", "generation on one H100", tuple(figures), notes)


def lags(seed: int) -> Table:
    """Fig. 3a: the lag over the position in a sequence, and over the steps of Conventional RL."""
    profile, half = _profile(_of_whole(seed)), _profile(pipelined(HALF, 32, 24, seed))
    spread = (profile[0] - profile[-1]) / (half[0] - half[-1])
    turn, row = in_turn(WHOLE, 8, IN_FLIGHT, 128, seed).steps, "Conventional RL, G = 8"
    figures = [
        Figure(TWICE, "lag of the first tenth", "x", 2.0, profile[0] / half[0]),
        Figure(TWICE, "the same, above the last tenth", "x", None, spread),
        Figure(row, "lag, first step", "", None, turn[0]["lag/mean"], "definition"),
        Figure(row, "lag, last step", "", None, turn[-1]["lag/mean"], "definition"),
    ]
    figures += [
        Figure(f"PipelineRL, tenth {tenth + 1}", "mean lag", "steps", None, lag)
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


def throughput(seed: int) -> Table:
    """Fig. 5c: samples a second, against Conventional RL with G = 32."""
    pipe = _of_whole(seed).figures["samples_per_s"]
    figures = [Figure("PipelineRL", "throughput", "samples/s", None, pipe)]
    for slots, printed in ((IN_FLIGHT, 2.0), (VLLM_SLOTS, None)):
        turn, row = in_turn(WHOLE, 32, slots, seed=seed).figures["samples_per_s"], f"G = 32, {slots} at once"
        figures.append(Figure(row, "throughput", "samples/s", None, turn))
        figures.append(Figure(row, "PipelineRL against it", "x", printed, pipe / turn))
    notes = (
        'The paper prints curves, and "approximately 2x" in the text.',
        "Its baseline was estimated with 64 sequences at once on a device; 256 would be all of its share.",
        f"It depends on the assumed mean length: 3.1, 2.1, 1.7, 1.3 and 1.1x {MEANS}.",
    )
    return Table("Fig. 5c", "sample throughput on 128 H100", tuple(figures), notes)


def max_lags(seed: int) -> Table:
    """Fig. 6a: the largest lag of a trained token, in samples."""
    pipe = BATCH * _of_whole(seed).figures["lag_max"]
    turn = BATCH * in_turn(WHOLE, 32, IN_FLIGHT, seed=seed).figures["lag_max"]
    figures = (
        Figure("PipelineRL", "max lag", "samples", 50_000.0, pipe),
        Figure("Conventional RL, G = 32", "max lag", "samples", None, turn, "definition"),
    )
    notes = (
        'The paper prints curves, and "more than 50k samples" for some tokens of PipelineRL.',
        "G = 32 has G - 1 optimizer steps by Algorithm 1.",
        f"It depends on the assumed mean length: 57k, 58k, 53k, 37k and 28k {MEANS}.",
    )
    return Table("Fig. 6a", "the largest lag", figures, notes)


def earlier_version(seed: int) -> Table:
    """The earlier version's runs on 32 H100: 16 generate, 16 train, against G = 4."""
    pipe, turn = pipelined(EARLIER, 24, 12, seed), in_turn(EARLIER, 4, 128, seed=seed)
    gain = pipe.figures["samples_per_s"] / turn.figures["samples_per_s"]
    lag = fmean(row["lag/max"] for row in pipe.steps[12:])
    figures = (
        Figure("32 H100, G = 4", "throughput, PipelineRL against it", "x", 2.0, gain),
        Figure("32 H100", "largest lag of a step, mean", "steps", 8.0, lag),
    )
    notes = (
        f"Mean length: {EARLIER.mean_tokens:g} tokens, the middle of the printed 1K to 2K.",
        "Conventional RL: 128 sequences at once on a device, as the earlier version says.",
    )
    return Table("Earlier version, Fig. 5b", "runs on 32 H100", figures, notes)
