"""The adaptive time limit of code rewards against a fixed one (RollPacker 4.3).

    python benchmarks/rewards.py [--live] [--json FILE]

In virtual time: `tailbatch` trains 64 prompts of 8 responses a round, 512 rows, at most 8k tokens. One
response in twenty never ends in one of its ten test cases, as in the paper's figure 7a; the limit is 30 s.
The spread is the standard deviation of the logarithm of the times of one prompt's test cases. The rollout of
a round lasts until the last token, its reward stage until training begins. The first epoch, in which the
anchors are learnt, is not counted in the times. *Lost* are correct responses, of all epochs, that the fixed
limit rewards and another stops.

--live runs real programs in bubblewrap instead: 16 prompts of 8 responses, three test cases, limit 6 s.
"""

import argparse
import asyncio
import json
import random
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from tailrace import clock
from tailrace.assembly.simulation import simulated_parts
from tailrace.controller.base import RunSettings
from tailrace.controller.execution import execute
from tailrace.record.events import Accumulated, Event, Recorder, RequestEnded, RoundStarted, SampleScored
from tailrace.reward.base import CodeSettings, TimeoutSettings
from tailrace.reward.code import CodeRewards
from tailrace.reward.sandbox import Sandbox, check_installed
from tailrace.reward.timeout import Anchors
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import (
    SimCodeSettings,
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
)
from tailrace.types import Group, Prompt, Sample, SampleId

GROUPS, GROUP_SIZE, ROWS, ROUNDS, WARM_UP_ROUNDS = 64, 8, 512, 24, 8
LENGTHS = SimLengthSettings(median_tokens=1230.0, sigma=1.3, max_tokens=8192, rows=ROWS)
WORKERS = 64


@dataclass
class Stages:
    """What the rounds of a run took."""

    rollout_s: float
    """From the start of a round to its last token, on average, as are the next two."""
    reward_s: float
    """From the last token to the training."""
    both_s: float
    timeouts: int
    correct: set[SampleId] = field(repr=False)
    """Samples with reward 1."""


@dataclass
class StageMeter:
    """Times of each round."""

    starts: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    trainings: list[float] = field(default_factory=list)
    """When training began."""
    correct: set[SampleId] = field(default_factory=set)
    timeouts: int = 0

    def on(self, event: Event) -> None:
        match event:
            case RoundStarted():
                self.starts.append(event.time_s)
                self.tokens.append(event.time_s)
            case RequestEnded() if len(self.trainings) < len(self.starts):
                self.tokens[-1] = event.time_s
            case Accumulated() if len(self.trainings) < len(self.starts):
                self.trainings.append(event.start_s)
            case SampleScored():
                self.timeouts += event.failure == "reward timeout"
                if event.reward == 1.0:
                    self.correct.add(event.sample)

    def close(self) -> None: ...

    def stages(self) -> Stages:
        times = list(zip(self.starts, self.tokens, self.trainings, strict=True))[WARM_UP_ROUNDS:]
        return Stages(
            rollout_s=fmean(token - start for start, token, _ in times),
            reward_s=fmean(training - token for _, token, training in times),
            both_s=fmean(training - start for start, _, training in times),
            timeouts=self.timeouts,
            correct=self.correct,
        )


def simulated(*, adaptive: bool, synchronous: bool, own_sigma: float) -> Stages:
    """Run `tailbatch` in virtual time."""
    code = SimCodeSettings(own_sigma=own_sigma, timeout=TimeoutSettings(adaptive=adaptive))
    rewards = SimRewardSettings(workers=WORKERS, code=code, synchronous=synchronous)
    sim = SimSettings(engines=SimEngineSettings(count=4), lengths=LENGTHS, rewards=rewards)
    schedule = partial(SCHEDULES["tailbatch"], groups_per_round=GROUPS, response_speculation=1.0)
    meter = StageMeter()
    settings = RunSettings(rounds=ROUNDS, group_size=GROUP_SIZE)

    async def run() -> None:
        await execute(schedule, simulated_parts(sim, 0), settings, Recorder(meter))

    clock.run(run(), virtual=True)
    return meter.stages()


PROMPTS, RESPONSES, AT_A_TIME = 16, 8, 4
LIVE = TimeoutSettings(min_s=1.0, max_s=6.0)
PROGRAM = """import time
n = int(input())
time.sleep({seconds})
if n == {endless}:
    while True: pass
print(n * n{error})
"""


def responses(seed: int) -> list[Sample]:
    """Return programs that square a number: a fifth is wrong, one in ten does not end for one input."""
    chance = random.Random(f"live {seed}")
    samples = []
    for index in range(PROMPTS):
        row = {"tests": {"inputs": ["2", "3", "4"], "outputs": ["4", "9", "16"]}}
        group = Group(Prompt(index, [], row=row, row_number=index), RESPONSES, [])
        seconds = chance.uniform(0.02, 0.3)
        for number in range(RESPONSES):
            luck = chance.random()
            text = PROGRAM.format(
                seconds=seconds * chance.uniform(0.9, 1.1),
                endless=3 if luck < 0.1 else "None",
                error=" + 1" if luck > 0.8 else "",
            )
            sample = Sample(SampleId(index, 0, number), group, finish_reason="stop")
            sample.completion_ids = list(text.encode())
            samples.append(sample)
    return samples


async def live(*, adaptive: bool) -> tuple[float, set[SampleId], int]:
    """Score all responses of the replay. Returns seconds, the correct samples, and the number of timeouts."""
    settings = CodeSettings(timeout=LIVE.model_copy(update={"adaptive": adaptive}))
    sandbox = Sandbox("bubblewrap", settings)
    await sandbox.check()
    rewards = CodeRewards(settings, sandbox, Anchors(), lambda ids: bytes(ids).decode(), workers=AT_A_TIME)
    samples = responses(0)
    start_s = clock.now()
    scores = await asyncio.gather(*(rewards.score(sample) for sample in samples))
    correct = {sample.id for sample, score in zip(samples, scores, strict=True) if score == 1.0}
    return clock.now() - start_s, correct, sum(sample.timed_out for sample in samples)


def report_live() -> dict[str, float]:
    check_installed()
    fixed_s, fixed, fixed_timeouts = asyncio.run(live(adaptive=False))
    adaptive_s, adaptive, adaptive_timeouts = asyncio.run(live(adaptive=True))
    print(f"live, {PROMPTS * RESPONSES} responses, {AT_A_TIME} test cases at a time, limit {LIVE.max_s:g} s")
    print(f"  fixed     {fixed_s:6.1f} s, {fixed_timeouts} timed out, {len(fixed)} correct")
    print(f"  adaptive  {adaptive_s:6.1f} s, {adaptive_timeouts} timed out, {len(adaptive)} correct")
    print(f"  faster {fixed_s / adaptive_s:.2f} x, lost {len(fixed - adaptive)}")
    return {"fixed_s": fixed_s, "adaptive_s": adaptive_s, "lost": len(fixed - adaptive)}


def report_virtual() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    head = f"{'rollout s':>9} {'reward s':>9} {'both s':>7} {'faster':>7} timeouts lost"
    print(f"{'spread':>6} {'rewards':12} {'limit':9} {head}")
    for own_sigma in (0.1, 0.3):
        baseline: Stages | None = None
        for synchronous, adaptive in ((True, False), (True, True), (False, False), (False, True)):
            stages = simulated(adaptive=adaptive, synchronous=synchronous, own_sigma=own_sigma)
            baseline = baseline or stages
            lost = len(baseline.correct - stages.correct)
            faster = baseline.both_s / stages.both_s
            when, limit = "synchronous" if synchronous else "at once", "adaptive" if adaptive else "fixed"
            print(
                f"{own_sigma:6.1f} {when:12} {limit:9} {stages.rollout_s:9.1f} {stages.reward_s:9.1f} "
                f"{stages.both_s:7.1f} {faster:6.2f}x {stages.timeouts:8} {lost:4}",
                flush=True,
            )
            row = asdict(stages) | {"own_sigma": own_sigma, "rewards": when, "limit": limit, "lost": lost}
            rows.append(row | {"correct": len(stages.correct)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = report_live() if options.live else report_virtual()
    if options.json:
        options.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
