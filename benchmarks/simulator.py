"""The cost of the controller in virtual time, in CPU time of the process.

    python benchmarks/simulator.py [--engines 16,64,256,1024] [--schedules pipelinerl,tailrace] [--json F]
    python benchmarks/simulator.py --rounds [--schedules serial,rolloutpipe] [--repeats 3] [--json F]

In virtual time no task waits in real time. So the CPU time of a run is that of the controller (schedule,
pool, router, ledger, events) and of the simulated engines, trainer and rewards: an upper bound for the
controller. No recording is attached but a counter.

Sample events a second of runs with 16 to 1,024 engines. A sample event is an event of one sample or of one
group: its request started or ended, it was scored or wasted, its group became ready or ended. Every run has a
process of its own, so that its memory is its own. `pipelinerl` serves 98 requests on each engine all the
time. `tailrace` has so many samples alive, of which some wait for the rest of their group; it bounds
staleness by the window. F gets the least rate and the most memory of the runs with most engines.

--rounds: microseconds a sample of one round of 100, 1,000 and 10,000 groups. The work is O(R K): `max/min` is
the largest cost of a sample over the smallest. Repetitions take the sizes in turn, and the shortest time of
each counts, because other processes on the machine can only add to it.
"""

import gc
import multiprocessing
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from platform import python_version
from typing import Any

from common import run, write
from tailrace import clock
from tailrace.controller.base import RunSettings
from tailrace.controller.execution import execute
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.record.events import (
    Event,
    GroupEnded,
    GroupReady,
    Recorder,
    RequestEnded,
    RequestStarted,
    SampleScored,
    TokensWasted,
)
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)

K, U, REQUESTS_PER_ENGINE, STALENESS = 8, 2, 98, 4
MIN_SAMPLES = 25_000
R_SIZES = (100, 1_000, 10_000)
ROUNDS_OF_R = SimSettings(
    engines=SimEngineSettings(count=4, slots=64),
    lengths=SimLengthSettings(median_tokens=1230, max_tokens=16_384),
)
SAMPLE_EVENTS = RequestEnded | SampleScored | GroupReady | GroupEnded | TokensWasted


class Counter:
    """Sink: counts sample events and the requests on engines."""

    def __init__(self) -> None:
        self.num_events = self.in_flight = self.most_in_flight = 0

    def on(self, event: Event) -> None:
        if isinstance(event, RequestStarted):
            self.num_events += 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        elif isinstance(event, SAMPLE_EVENTS):
            self.num_events += 1
            self.in_flight -= isinstance(event, RequestEnded)

    def close(self) -> None: ...


def parameters(name: str, R: int, U: int, engines: int) -> dict[str, object]:
    """A schedule's parameters for R groups a round or in flight, and U groups a step."""
    match name:
        case "serial" | "rolloutpipe" | "rolloutpipe_eager":
            return {"groups_per_round": R, "groups_per_step": U}
        case "april":
            return {"groups_per_round": R // 2, "groups_launched": R}
        case "tailbatch":
            return {"groups_per_round": R}
        case "pipelinerl":
            requests = -(-R * K // engines)
            return {"groups_per_step": U, "ring_groups": 2 * U, "in_flight_per_engine": requests}
        case "tailrace":
            return {"groups_per_step": U, "groups_in_flight": R, "staleness": STALENESS}
        case _:
            raise SystemExit(f"{name} is not measured")


def cpu_seconds(name: str, R: int, U: int, world: SimSettings, rounds: int) -> tuple[float, Counter]:
    """CPU time of a simulated run, from its first event to its closed ledger."""
    assert world.engines.count
    schedule = partial(SCHEDULES[name], **parameters(name, R, U, world.engines.count))
    settings, counter = RunSettings(rounds=rounds, group_size=K), Counter()

    async def simulated() -> None:
        await execute(schedule, simulated_parts(world, settings.seed), settings, Recorder(counter))

    gc.collect()
    start_s = time.process_time()
    clock.run(simulated(), virtual=True)
    return time.process_time() - start_s, counter


def measure(name: str, num_engines: int) -> dict[str, Any]:
    """Simulate a run that trains as many samples as are in flight, and at least MIN_SAMPLES."""
    num_samples = num_engines * REQUESTS_PER_ENGINE
    groups_per_step = -(-num_samples // K // (STALENESS + 1))
    rounds = -(-max(num_samples, MIN_SAMPLES) // (groups_per_step * K))
    world = SimSettings(
        engines=SimEngineSettings(count=num_engines, slots=REQUESTS_PER_ENGINE),
        trainer=SimTrainerSettings(tokens_per_s=1e6 * num_engines),
        rewards=SimRewardSettings(workers=16 * num_engines),
    )
    cpu_s, counter = cpu_seconds(name, num_samples // K, groups_per_step, world, rounds)
    return {
        "schedule": name,
        "num_engines": num_engines,
        "most_in_flight": counter.most_in_flight,
        "num_events": counter.num_events,
        "cpu_s": cpu_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def events(names: Sequence[str], sizes: Sequence[int]) -> dict[str, object]:
    """Measure one run after another, each in a new process."""
    head = ("engines", "in flight", "events", "CPU s", "events/s", "MiB")
    print(f"{'schedule':12}" + "".join(f"{word:>11}" for word in head))
    runs, context = [], multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for each in pool.map(measure, *zip(*((name, size) for name in names for size in sizes), strict=True)):
            runs.append(each)
            print(
                f"{each['schedule']:12}{each['num_engines']:11,}{each['most_in_flight']:11,}"
                f"{each['num_events']:11,}{each['cpu_s']:11.1f}{each['num_events'] / each['cpu_s']:11,.0f}"
                f"{each['peak_bytes'] / 2**20:11,.0f}",
                flush=True,
            )
    largest = [each for each in runs if each["num_engines"] == sizes[-1]]
    return {
        "events_per_s": min(each["num_events"] / each["cpu_s"] for each in largest),
        "peak_bytes": max(each["peak_bytes"] for each in largest),
        "runs": runs,
    }


def samples(names: Sequence[str], repeats: int) -> dict[str, object]:
    """Microseconds a sample, by schedule and R; and the ratio of the largest to the smallest."""
    least = {(name, R): float("inf") for name in names for R in R_SIZES}
    for _ in range(repeats):
        for name, R in least:
            least[name, R] = min(least[name, R], cpu_seconds(name, R, U, ROUNDS_OF_R, 1)[0] / (R * K) * 1e6)
    print(f"{'us a sample':20}" + "".join(f"{f'R={R:,}':>12}" for R in R_SIZES) + f"{'max/min':>12}")
    table: dict[str, dict[str, float]] = {}
    for name in names:
        costs = [least[name, R] for R in R_SIZES]
        table[name] = {f"R={R}": cost for R, cost in zip(R_SIZES, costs, strict=True)}
        table[name]["ratio"] = max(costs) / min(costs)
        print(f"{name:20}" + "".join(f"{cost:12.0f}" for cost in costs) + f"{table[name]['ratio']:12.2f}")
    return {"unit": "cpu_us_per_sample", "K": K, "schedules": table}


def main(
    engines: str = "16,64,256,1024",
    schedules: str = "",
    rounds: bool = False,
    repeats: int = 3,
    json: Path | None = None,
) -> None:
    print(f"No model, no device, one thread of {os.cpu_count()} cores, Python {python_version()}, K = {K}")
    names = (schedules or ("serial,rolloutpipe" if rounds else "pipelinerl,tailrace")).split(",")
    sizes = [int(size) for size in engines.split(",")]
    write(json, samples(names, repeats) if rounds else events(names, sizes))


if __name__ == "__main__":
    run(main)
