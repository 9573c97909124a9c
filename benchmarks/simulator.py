"""Sample events a second of simulated runs with 16 to 1,024 engines and 98 requests on each.

    python benchmarks/simulator.py [--engines 16,64,256,1024] [--schedules pipelinerl,tailrace] [--json F]

A sample event is an event of one sample or of one group: its request started or ended, it was scored or
wasted, its group became ready or ended. A sink counts them. The time is the CPU time of the process, from the
first event of the run to its closed ledger: schedule, pool, router, ledger, and the simulated engines,
trainer and rewards. Every run has a process of its own, so that its memory is its own. No recording is
attached but the counter.

`pipelinerl` serves 98 requests on each engine all the time. `tailrace` has so many samples alive, of which
some wait for the rest of their group; it bounds staleness by the window. F gets the least rate and the most
memory of the runs with most engines.
"""

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from platform import python_version

from tailrace import clock
from tailrace.assembly.simulation import simulated_parts
from tailrace.controller.base import RunSettings
from tailrace.controller.execution import execute
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
from tailrace.sim.settings import SimEngineSettings, SimRewardSettings, SimSettings, SimTrainerSettings

K, REQUESTS_PER_ENGINE, STALENESS = 8, 98, 4
MIN_SAMPLES = 25_000
SAMPLE_EVENTS = RequestEnded | SampleScored | GroupReady | GroupEnded | TokensWasted


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    schedule: str
    num_engines: int
    most_in_flight: int
    """The largest number of requests on engines."""
    num_events: int
    cpu_s: float
    peak_bytes: int

    @property
    def events_per_s(self) -> float:
        return self.num_events / self.cpu_s


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


def parameters(name: str, num_groups: int, groups_per_step: int) -> dict[str, object]:
    """A schedule's parameters for so many groups in flight."""
    match name:
        case "pipelinerl":
            requests = {"in_flight_per_engine": REQUESTS_PER_ENGINE}
            return {"groups_per_step": groups_per_step, "ring_groups": 2 * groups_per_step, **requests}
        case "tailrace":
            groups = {"groups_per_step": groups_per_step, "groups_in_flight": num_groups}
            return {"staleness": STALENESS, **groups}
        case _:
            raise SystemExit(f"{name} is not measured; choose from pipelinerl, tailrace")


def measure(name: str, num_engines: int) -> Result:
    """Simulate a run that trains as many samples as are in flight, and at least MIN_SAMPLES."""
    num_samples = num_engines * REQUESTS_PER_ENGINE
    groups_per_step = -(-num_samples // K // (STALENESS + 1))
    rounds = -(-max(num_samples, MIN_SAMPLES) // (groups_per_step * K))
    settings = RunSettings(rounds=rounds, group_size=K)
    schedule = partial(SCHEDULES[name], **parameters(name, num_samples // K, groups_per_step))
    world = SimSettings(
        engines=SimEngineSettings(count=num_engines, slots=REQUESTS_PER_ENGINE),
        trainer=SimTrainerSettings(tokens_per_s=1e6 * num_engines),
        rewards=SimRewardSettings(workers=16 * num_engines),
    )
    counter = Counter()

    async def run() -> None:
        await execute(schedule, simulated_parts(world, settings.seed), settings, Recorder(counter))

    start_s = time.process_time()
    clock.run(run(), virtual=True)
    cpu_s = time.process_time() - start_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Result(name, num_engines, counter.most_in_flight, counter.num_events, cpu_s, peak_bytes)


def measure_all(names: Sequence[str], sizes: Sequence[int]) -> list[Result]:
    """Measure one run after another, each in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(measure, name, size) for name in names for size in sizes]
        return [future.result() for future in futures]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", default="16,64,256,1024", help="comma-separated, the largest last")
    parser.add_argument("--schedules", default="pipelinerl,tailrace", help="comma-separated")
    parser.add_argument("--json", type=Path, metavar="F", help="write the results here too")
    options = parser.parse_args()
    results = measure_all(options.schedules.split(","), [int(size) for size in options.engines.split(",")])
    print(f"No model, no device, one thread of {os.cpu_count()} cores, Python {python_version()}, K = {K}")
    print(
        f"{'schedule':12}{'engines':>9}{'in flight':>11}{'events':>11}{'CPU s':>8}{'events/s':>10}{'MiB':>7}"
    )
    for each in results:
        print(
            f"{each.schedule:12}{each.num_engines:9,}{each.most_in_flight:11,}{each.num_events:11,}"
            f"{each.cpu_s:8.1f}{each.events_per_s:10,.0f}{each.peak_bytes / 2**20:7,.0f}"
        )
    if options.json:
        largest = [each for each in results if each.num_engines == results[-1].num_engines]
        figures = {
            "events_per_s": min(each.events_per_s for each in largest),
            "peak_bytes": max(each.peak_bytes for each in largest),
            "runs": [asdict(each) for each in results],
        }
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
