"""From which survival on is `stale = "verify"` the fastest schedule of its class?

    python benchmarks/verified.py [--rounds 24] [--groups 16] [--seed 0] [--json FILE]

Virtual time: four engines and a trainer of devices of their own, groups of eight responses with a median of
1,230 tokens (lognormal, sigma 1.3, at most 16,384), one optimizer step a publication. Survival is the share
of tokens that an update leaves (`sim.engines.survival`); benchmarks/survival.py measures it. A new end is as
long as the old one. Printed by class, where no trained token is older than 0, 1 or 3 publications: trained
samples a second over those of the fastest schedule of the class that verifies nothing, by tokens that are not
masked, and the share of generated tokens that is waste. The first third of the rounds is not counted.
results/verified.json has all rows.
"""

from functools import partial
from pathlib import Path
from typing import Any

from common import run, write
from tailrace.controller.base import RunSettings
from tailrace.extras.plan.plan import METERED, measure
from tailrace.schedules import SCHEDULES, Schedule
from tailrace.sim.settings import SimEngineSettings, SimLengthSettings, SimSettings

SURVIVALS = (1.0, 0.9999, 0.999, 0.99, 0.9)
BOUNDS = (0, 1, 3)
MAX_CUTS = 8
LENGTHS = SimLengthSettings(median_tokens=1230.0, sigma=1.3, max_tokens=16_384, rows=512)


def others(bound: int, groups: int) -> dict[str, Schedule]:
    """Schedules of a class, without verification."""
    if not bound:
        names = ("serial", "rolloutpipe", "rolloutpipe_eager")
        found: dict[str, Schedule] = {
            name: partial(SCHEDULES[name], groups_per_round=groups, groups_per_step=groups) for name in names
        }
        for name in ("rollpacker", "tailrace_on_policy"):
            found[name] = partial(SCHEDULES[name], groups_per_round=groups)
        return found
    window = {"groups_per_step": groups, "staleness": bound}
    tailrace = partial(SCHEDULES["tailrace"], **window)
    found = {"dora": partial(SCHEDULES["dora"], groups_in_flight=(bound + 1) * groups, **window)}
    for times in sorted({1.5, 2.0, bound + 1.0}):
        in_flight = int(times * groups)
        found[f"tailrace, {times:g}x"] = partial(tailrace, groups_in_flight=in_flight)
        found[f"tailrace, {times:g}x, masked"] = partial(tailrace, groups_in_flight=in_flight, stale="mask")
    return found


def verified(bound: int, groups: int) -> dict[str, Schedule]:
    """Schedules of a class that verify."""
    found: dict[str, Schedule] = {}
    if not bound:
        found["bubblespec"] = partial(
            SCHEDULES["bubblespec"], groups_per_round=groups, groups_per_step=groups
        )
    for times in (1.5, 2.0, 4.0):
        limits = {"groups_in_flight": int(times * groups), "staleness": bound, "verify_max_cuts": MAX_CUTS}
        schedule = partial(SCHEDULES["tailrace"], groups_per_step=groups, stale="verify", **limits)
        found[f"tailrace, {times:g}x, verified"] = schedule
    return found


def row(name: str, schedule: Schedule, survival: float, rounds: int, seed: int) -> dict[str, Any]:
    engines = SimEngineSettings(count=4, versions=4, survival=survival)
    found = measure(
        schedule,
        SimSettings(engines=engines, lengths=LENGTHS),
        RunSettings(rounds=rounds, group_size=8, seed=seed),
        warm_up_rounds=rounds // 3,
    )
    keys = ("samples_per_s", "waste_share", "masked_share", "lag_max", "length_bias", *METERED)
    return {"schedule": name, "survival": survival, **{key: found[key] for key in keys}}


def trained_rate(row: dict[str, Any]) -> float:
    """Trained samples a second, times the share of their tokens that is in the loss."""
    return float(row["samples_per_s"] * (1.0 - row["masked_share"]))


def main(rounds: int = 24, groups: int = 16, seed: int = 0, json: Path | None = None) -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for bound in BOUNDS:
        rows[f"bound {bound}"] = of_class = []
        for name, schedule in others(bound, groups).items():
            of_class.append(row(name, schedule, 1.0, rounds, seed))
        best = max(of_class, key=trained_rate)
        for survival in SURVIVALS:
            for name, schedule in verified(bound, groups).items():
                of_class.append(row(name, schedule, survival, rounds, seed))
        print(f"\nbound {bound}: the fastest without verification is {best['schedule']}")
        for each in of_class:
            over = trained_rate(each) / trained_rate(best)
            print(
                f"{each['schedule']:28}{each['survival']:8g}{over:8.2f}{each['waste_share']:8.1%} wasted"
                f"{each['masked_share']:8.1%} masked{each['length_bias']:+8.1%} bias"
                f"{each['bias/length']:+8.1%} metered{each['bias/delay']:6.2f} rounds of delay",
                flush=True,
            )
    if json:
        write(json, rows)


if __name__ == "__main__":
    run(main)
