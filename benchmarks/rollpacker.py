"""RollPacker's ablation (its Table 2) on its set-up, in virtual time.

    python benchmarks/rollpacker.py [--rounds 40] [--json F]

Qwen2.5-14B, 16k tokens, 128 prompts of 8 responses, 32 H800: 16 engines of TP 2. Engines and trainer have the
same devices. Lengths: median 560 and a 75th percentile of 1.1k (section 2.2). Costs of the engine: weights
and KV cache are read at 70% of 3.35 TB/s; engines have 60% of the memory of a GPU. The trainer's speed and
the number of reward workers are fitted so that the baseline has the shares of Table 1 for the code task: 66%
rollout, 13% reward, 21% training. Everything else is a prediction.

    baseline    serial on colocated devices; rewards start when the rollout is over, as in veRL
    + tail      tail batching, eta = 1.25
    + reward    rewards run while the rollout goes on. Adaptive time limits, and the sharing of GPUs with a
                judge, are not modelled
    + planner   the tensor-parallel size follows the preemptions, from TP 2 up to 8
    + trainer   the stream trainer: elastic devices

The last line is section 6.4's: 16 GPUs, TP 1 at the start, and a length limit that grows by 1k a round from
8k to 32k; the planner against a fixed TP 1. Lengths grow with the limit: median 15% of it, sigma 1.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tailrace import clock
from tailrace.controller.base import Parts, RunSettings
from tailrace.controller.execution import execute
from tailrace.controller.run import Run
from tailrace.controller.simulation import simulated_parts
from tailrace.engine.base import Engine
from tailrace.record.events import (
    EngineStateChanged,
    Event,
    Recorder,
    RequestEnded,
    RoundEnded,
    RoundStarted,
    Stepped,
)
from tailrace.reward.base import Rewards
from tailrace.rollout.placement import Shared
from tailrace.schedules import SCHEDULES
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)
from tailrace.sim.world import Lengths
from tailrace.types import Sample

P0, R0, ENGINES = 128, 8, 16
WEIGHT_TOKENS = 143_000
"""28 GB of weights, in positions of 196 kB: 48 layers of 8 heads of 128, keys and values in bf16."""
SIM = SimSettings(
    engines=SimEngineSettings(
        count=ENGINES,
        slots=256,
        base_s=8.5e-3,
        slope_s=0.05e-3,
        kv_tokens=347_000,
        weight_tokens=WEIGHT_TOKENS,
        communication_s=1.5e-3,
        prefill_tokens_per_s=40_000,
        load_s=2.0,
        sleep_s=0.5,
        wake_s=2.5,
        regroup_s=0.0,
    ),
    trainer=SimTrainerSettings(tokens_per_s=36_000.0, step_s=2.0),
    lengths=SimLengthSettings(median_tokens=560.0, sigma=1.05, max_tokens=16_384, prompt_tokens=200),
    rewards=SimRewardSettings(workers=256, median_s=2.0, sigma=0.8, timeout_s=30.0),
)
SMALLEST = SIM.engines.model_copy(update={"base_s": 14e-3, "slope_s": 0.08e-3, "kv_tokens": 102_000})
"""Of one GPU: TP 1."""
PAPER = {"baseline": 1.0, "+ tail": 1.48, "+ reward": 1.99, "+ planner": 2.02, "+ trainer": 2.22}
PAPER_PLANNER = 1.9

Schedule = Callable[[Run], Coroutine[Any, Any, None]]
TAIL: Schedule = partial(SCHEDULES["tailbatch"], groups_per_round=P0)
STREAM: Schedule = partial(SCHEDULES["rollpacker"], groups_per_round=P0)
SERIAL: Schedule = partial(SCHEDULES["serial"], groups_per_round=P0, groups_per_step=P0)


class AfterRollout:
    """Rewards that start when no engine generates."""

    def __init__(self, rewards: Rewards, engines: list[Engine]) -> None:
        self._rewards, self._engines = rewards, engines

    async def score(self, sample: Sample) -> float:
        while any(engine.usage().num_running for engine in self._engines):  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        return await self._rewards.score(sample)


class GrowingLengths:
    """A length limit that grows by `step` tokens a round of P0 prompts; lengths grow with it."""

    def __init__(self, start: int, step: int, end: int) -> None:
        self._limits = [*range(start, end, step), end]

    def __call__(self, sample: Sample) -> int:
        limit = self._limits[min(sample.prompt.index // P0, len(self._limits) - 1)]
        settings = SimLengthSettings(median_tokens=0.15 * limit, sigma=1.0, max_tokens=limit)
        return Lengths(settings, seed=0)(sample)

    @property
    def num_rounds(self) -> int:
        return len(self._limits)


@dataclass
class Measured:
    """Sink: what a run took."""

    samples: int = 0
    rounds: int = 0
    train_s: float = 0.0
    rollout_s: float = 0.0
    lent: int = 0
    end_s: float = 0.0
    _start_s: float = 0.0
    _generated_s: float = 0.0

    def on(self, event: Event) -> None:
        match event:
            case RoundStarted():
                self._start_s = event.time_s
            case RequestEnded():
                self._generated_s = event.time_s
            case Stepped():
                self.samples += len(event.samples)
                self.train_s += event.stats.compute_s
            case RoundEnded():
                self.rounds += 1
                self.rollout_s += self._generated_s - self._start_s
                self.end_s = event.time_s
            case EngineStateChanged(state="asleep"):
                self.lent += 1

    def close(self) -> None:
        pass

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.end_s


def run(schedule: Schedule, rounds: int, shared: Shared, parts: Callable[[], Parts]) -> Measured:
    measured = Measured()
    settings = RunSettings(rounds=rounds, group_size=R0)

    async def main() -> None:
        await execute(schedule, replace(parts(), shared=shared), settings, Recorder(measured))

    clock.run(main(), virtual=True)
    return measured


def colocated_parts(*, replicas: int = 1, rewards_after: bool = False) -> Parts:
    parts = simulated_parts(SIM, seed=0, replicas=replicas)
    if rewards_after:
        parts = replace(parts, rewards=AfterRollout(parts.rewards, list(parts.engines)))
    return parts


def ablation(rounds: int) -> dict[str, Measured]:
    colocated, width = Shared("colocated"), 4
    after = partial(colocated_parts, rewards_after=True)
    return {
        "baseline": run(SERIAL, rounds, colocated, after),
        "+ tail": run(TAIL, rounds, colocated, after),
        "+ reward": run(TAIL, rounds, colocated, colocated_parts),
        "+ planner": run(TAIL, rounds, Shared("colocated", max_width=width), colocated_parts),
        "+ trainer": run(
            STREAM, rounds, Shared("elastic", max_width=width), partial(colocated_parts, replicas=2)
        ),
    }


def planner_factor() -> float:
    """Section 6.4: mean time of a rollout with a fixed TP 1 over that with the planner."""
    growing = GrowingLengths(8_192, 1_024, 32_768)

    def parts() -> Parts:
        engines = [SimEngine(f"engine{number}", SMALLEST, growing, 32_768) for number in range(ENGINES)]
        quick = SIM.model_copy(update={"trainer": SimTrainerSettings(tokens_per_s=1e9, step_s=0.0)})
        return replace(simulated_parts(quick, seed=0), engines=engines)

    fixed, planned = (
        run(SERIAL, growing.num_rounds, Shared(max_width=width), parts).end_s for width in (1, 4)
    )
    return fixed / planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measured = ablation(arguments.rounds)
    first = measured["baseline"]
    factors = {name: each.samples_per_s / first.samples_per_s for name, each in measured.items()}
    rollout, train = first.rollout_s / first.end_s, first.train_s / first.end_s
    print(f"baseline: {first.end_s / first.rounds:.1f} s a step: {rollout:.0%} rollout, {train:.0%} training")
    print(f"{'':<12}{'factor':>8}{'paper':>8}{'added':>8}{'paper':>8}{'s/1024 samples':>16}")
    before, paper_before = 1.0, 1.0
    for name, each in measured.items():
        added, paper_added = factors[name] / before, PAPER[name] / paper_before
        seconds = 1024 / each.samples_per_s
        print(
            f"{name:<12}{factors[name]:>8.2f}{PAPER[name]:>8.2f}{added:>8.2f}{paper_added:>8.2f}{seconds:>16.1f}"
        )
        before, paper_before = factors[name], PAPER[name]
    planner = planner_factor()
    print(f"planner against a fixed TP 1, lengths from 8k to 32k: {planner:.2f} (paper: {PAPER_PLANNER})")
    if arguments.json:
        figures = {"factors": factors, "paper": PAPER, "planner": planner, "paper_planner": PAPER_PLANNER}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
