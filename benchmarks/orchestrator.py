"""CPU time of the controller per sample, for rounds of 100 to 10,000 groups in virtual time.

    python benchmarks/orchestrator.py [--schedules serial,rolloutpipe] [--repeats N] [--json F]

In virtual time no task waits in real time. So the CPU time of a run is that of the controller (schedule,
pool, ledger, events) and of the simulated engines, trainer and rewards. The figure is an upper bound for the
controller. The work is O(R K): `max/min` is the largest cost of a sample over the smallest. Repetitions take
the sizes in turn, and the shortest time of each counts, because other processes on the machine can only add
to it.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tailrace import clock
from tailrace.assembly.simulation import simulated_parts
from tailrace.controller.base import RunSettings
from tailrace.controller.execution import execute
from tailrace.record.events import Recorder
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import SimEngineSettings, SimLengthSettings, SimSettings

R_SIZES = (100, 1_000, 10_000)
K, U = 8, 2
ROUNDS_OF_R = ("serial", "rolloutpipe", "rolloutpipe_eager", "april", "tailbatch")
WORLD = SimSettings(
    engines=SimEngineSettings(count=4, slots=64),
    lengths=SimLengthSettings(median_tokens=1230, max_tokens=16_384),
)


def parameters(name: str, R: int) -> dict[str, object]:
    """A schedule's parameters for about R groups a round."""
    match name:
        case "serial" | "rolloutpipe" | "rolloutpipe_eager":
            return {"groups_per_round": R, "groups_per_step": U}
        case "april":
            return {"groups_per_round": R // 2, "groups_launched": R}
        case "tailbatch":
            return {"groups_per_round": R}
        case _:
            raise SystemExit(f"{name} has no rounds of R groups; choose from {', '.join(ROUNDS_OF_R)}")


def cpu_seconds(name: str, R: int) -> float:
    """CPU time of one simulated round."""
    schedule = partial(SCHEDULES[name], **parameters(name, R))

    async def one_round() -> None:
        settings = RunSettings(rounds=1, group_size=K)
        await execute(schedule, simulated_parts(WORLD, settings.seed), settings, Recorder())

    gc.collect()
    start_s = time.process_time()
    clock.run(one_round(), virtual=True)
    return time.process_time() - start_s


def measure(names: Sequence[str], repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds a sample, by schedule and R; and the ratio of the largest to the smallest."""
    least = {(name, R): float("inf") for name in names for R in R_SIZES}
    for _ in range(repeats):
        for name, R in least:
            least[name, R] = min(least[name, R], cpu_seconds(name, R) / (R * K) * 1e6)
    table: dict[str, dict[str, float]] = {}
    for name in names:
        costs = [least[name, R] for R in R_SIZES]
        table[name] = {f"R={R}": cost for R, cost in zip(R_SIZES, costs, strict=True)}
        table[name]["ratio"] = max(costs) / min(costs)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", default="serial,rolloutpipe", help="comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="F", help="write the table here too")
    options = parser.parse_args()
    table = measure(options.schedules.split(","), options.repeats)
    print(f"CPU microseconds a sample: no model, 4 simulated engines, 1 of {os.cpu_count()} cores, K = {K}")
    print(f"{'schedule':20}" + "".join(f"{f'R={R:,}':>12}" for R in R_SIZES) + f"{'max/min':>12}")
    for name, row in table.items():
        print(f"{name:20}" + "".join(f"{row[f'R={R}']:12.0f}" for R in R_SIZES) + f"{row['ratio']:12.2f}")
    if options.json:
        options.json.write_text(
            json.dumps({"unit": "cpu_us_per_sample", "K": K, "schedules": table}, indent=2)
        )


if __name__ == "__main__":
    main()
