"""Draw the pictures of the schedules' pages: python docs/make_pictures.py [NAME ...] (a minute on one core)

Each picture shows `serial` above and one schedule below, on one time axis, in virtual time. All pictures have
the same simulated set-up: two engines of 32 slots each, one trainer on a device of its own, group_size 4.
Response lengths are lognormal with a median of 600 tokens and a limit of 16,384. A run trains 480 groups; a
picture shows the last 96, so that schedules that carry responses over are seen in their steady state.
"""

import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from tailrace import clock
from tailrace.assembly.simulation import simulated_parts
from tailrace.controller.base import RunSettings
from tailrace.controller.execution import execute
from tailrace.controller.run import Run
from tailrace.record.events import Recorder
from tailrace.record.pictures import draw_timelines
from tailrace.record.steps import StepMeter
from tailrace.record.timeline import Timeline
from tailrace.rollout.admission import FrontierFirst
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)

FOLDER = Path(__file__).parent / "images"
WIDTH_PX, COLOURS = 1000, 48
SIM = SimSettings(
    engines=SimEngineSettings(count=2, slots=32, base_s=6e-3, slope_s=0.1e-3, abort_s=0.01, load_s=0.3),
    trainer=SimTrainerSettings(tokens_per_s=3_500.0, step_s=0.3),
    lengths=SimLengthSettings(median_tokens=600, sigma=1.1, max_tokens=16_384, prompt_tokens=100, rows=48),
    rewards=SimRewardSettings(median_s=0.1),
)
GROUP_SIZE, NUM_GROUPS, NUM_PICTURED = 4, 480, 96
N = 16
"""Groups of a round."""

PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "serial": {"groups_per_round": N, "groups_per_step": N},
    "rolloutpipe": {
        "groups_per_round": N,
        "groups_per_step": 4,
        "admission": FrontierFirst(groups=12),
    },
    "april": {"groups_per_round": N, "groups_launched": 2 * N},
    "tailbatch": {"groups_per_round": N, "response_speculation": 1.0},
    "rollpacker": {"groups_per_round": N, "response_speculation": 1.0},
    "conventional": {"groups_per_step": N // 2, "steps_per_round": 4},
    "pipelinerl": {
        "groups_per_step": N,
        "in_flight_per_engine": 32,
        "ring_groups": 2 * N,
        "ring_full": "block",
    },
    "one_step_off": {"groups_per_round": N, "groups_per_step": N},
    "periodic_asynchrony": {"groups_per_round": N},
    "streamrl_async": {"groups_per_round": N},
    "seer": {"groups_per_round": 2 * N, "groups_per_step": N},
    "sortedrl": {"groups_per_round": 4 * N, "groups_per_step": N},
    "windowed_fifo": {"groups_per_step": N, "groups_in_flight": 3 * N, "window": N},
    "tailrace": {"groups_per_step": N, "groups_in_flight": 2 * N, "staleness": 3},
    "tailrace_on_policy": {"groups_per_round": N},
}
GROUPS_A_ROUND = {"conventional": 2 * N, "seer": 2 * N}

Schedule = Callable[[Run], Coroutine[Any, Any, None]]


def simulated(name: str) -> Timeline:
    """The timeline of the last rounds of a simulated run of the schedule."""
    groups_a_round = GROUPS_A_ROUND.get(name, N)
    rounds, timeline = NUM_GROUPS // groups_a_round, Timeline(NUM_PICTURED // groups_a_round)
    schedule: Schedule = partial(SCHEDULES[name], **PARAMETERS[name])

    async def run() -> None:
        settings = RunSettings(rounds=rounds, group_size=GROUP_SIZE)
        meter = StepMeter(timeline, wall_clock=clock.wall_time)
        await execute(schedule, simulated_parts(SIM, 0), settings, Recorder(meter))

    clock.run(run(), virtual=True)
    return timeline


def draw(name: str) -> Path:
    """Draw one schedule under `serial` and shrink the picture."""
    path = FOLDER / f"{name}.png"
    names = ("serial",) if name == "serial" else ("serial", name)
    draw_timelines({each: simulated(each) for each in names}, path)
    with Image.open(path) as image:
        size = (WIDTH_PX, round(image.height * WIDTH_PX / image.width))
        small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS).quantize(COLOURS)
    small.save(path, optimize=True)
    return path


def main() -> None:
    for name in sys.argv[1:] or PARAMETERS:
        path = draw(name)
        print(f"{path.relative_to(FOLDER.parent.parent)}  {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
