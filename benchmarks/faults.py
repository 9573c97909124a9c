"""Effective training time (ETTR) of schedules, over how long the trainer lives.

    python benchmarks/faults.py [--rounds 100] [--json FILE]
    python benchmarks/faults.py --live [--schedule tailrace] [--life-s 20] [--json FILE]

ETTR is the trainer's computation of the steps that count over the time on the clock (record/figures.py;
RobustRL, 2512.22492). It is below 1 without deaths, too, by what a schedule lets the trainer wait. A trainer
that dies starts again alone, while the engines generate (`trainer.restarts`), or with all workers
(`host.restarts`). Both compute again what was computed since the newest checkpoint.

Simulated: a quarter of the setting of schedules.py, a restart of two minutes, a checkpoint after each step.

--live: the quickstart's task, in runs whose trainer is killed after random times, which are exponential; and
a prediction from what `tailrace fit` reads in a run in which it lives, with the mean life and the mean
seconds of a restart, repeated calls included, that came. Each run is audited: tokens unaccounted for, samples
trained twice, groups lost.
"""

import json as json_module
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from common import run, write
from crash import WITH_REQUESTS, Victim, workers_of
from schedules import SEPARATE, bound
from tailrace.config import load_config
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.schedule import resolve
from tailrace.drivers.assembly.simulation import simulate, without_rates
from tailrace.extras.plan.fit_command import fitted_run
from tailrace.schedules import Schedule
from tailrace.sim.settings import SimEngineSettings, SimFaultSettings, SimTrainerSettings

RESTART_S = 120.0
LIVES_S = (1200.0, 300.0)
WARM_UP_ROUNDS, GROUPS, GROUP_SIZE = 4, 16, 8
WORLD = SEPARATE.changed(
    engines=SimEngineSettings(count=1), trainer=SimTrainerSettings(tokens_per_s=15_000.0)
)
"""A quarter of the devices of schedules.py, for a quarter of the groups."""
ROUND, STEP = {"groups_per_round": GROUPS}, {"groups_per_step": GROUPS}
SHOWN: Mapping[str, Schedule] = {
    "serial": bound("serial", **ROUND, **STEP),
    "rolloutpipe": bound("rolloutpipe", **ROUND, groups_per_step=GROUPS // 4),
    "april": bound("april", **ROUND, groups_launched=2 * GROUPS),
    "one_step_off": bound("one_step_off", **ROUND, **STEP),
    "tailrace, staleness 2": bound("tailrace", **STEP, groups_in_flight=24, staleness=2),
    "tailrace, staleness 8": bound("tailrace", **STEP, groups_in_flight=48, staleness=8),
}
LIVE: Mapping[str, Mapping[str, object]] = {
    "serial": {"groups_per_round": 8, "groups_per_step": 8},
    "rolloutpipe": {"groups_per_round": 8, "groups_per_step": 4},
    "april": {"groups_per_round": 8, "groups_launched": 16},
    "tailrace": {"groups_per_step": 8, "groups_in_flight": 24, "staleness": 4},
}
WAYS = {"alone": "trainer.restarts", "all": "host.restarts"}
OPTIONS = {"run.eval_every": "0", "run.checkpoint_every": "4", **WITH_REQUESTS}


def faults(life_s: float, restart_s: float, way: str) -> SimFaultSettings:
    return SimFaultSettings(
        trainer_mean_life_s=life_s, trainer_restart_s=restart_s, trainer_alone=way == "alone"
    )


def simulated(rounds: int) -> dict[str, dict[str, float]]:
    """Print and return the ETTR of each schedule without deaths, and for each mean life in both ways."""
    deaths = {
        f"{life_s / 60:.0f} min {way}": faults(life_s, RESTART_S, way) for life_s in LIVES_S for way in WAYS
    }
    worlds = {"endless": None, **deaths}
    print(f"{'mean life of the trainer':32}" + "".join(f"{name:>16}" for name in worlds))
    run, found = RunSettings(rounds=WARM_UP_ROUNDS + rounds, group_size=GROUP_SIZE), {}
    for name, schedule in SHOWN.items():
        found[name] = {
            world: simulate(
                schedule,
                WORLD.changed(faults=settings),
                run,
                warm_up_rounds=WARM_UP_ROUNDS,
            ).figures["ettr"]
            for world, settings in worlds.items()
        }
        print(f"{name:32}" + "".join(f"{ettr:16.3f}" for ettr in found[name].values()), flush=True)
    return found


class Mortal(Victim):
    """A run whose trainer is killed."""

    def train(self, rounds: int, life_s: float, seed: int) -> dict[str, float]:
        """Train to the last round; return the ETTR, the kills, the seconds of a restart and the audit.
        `life_s`: mean seconds from a round of a trainer to its death; 0: it is not killed."""
        chance, process, num_kills = random.Random(seed), self._start(rounds), 0
        began, before = time.monotonic(), -1
        while life_s and process.poll() is None:
            if self._round() <= before:
                time.sleep(0.05)
                continue
            time.sleep(chance.expovariate(1 / life_s))
            before = self._round()
            with suppress(ProcessLookupError, IndexError):
                os.kill(workers_of(process.pid, "trainer")[0], signal.SIGKILL)
                num_kills += 1
        self._finish(process)
        summary = json_module.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        restarts = re.findall(r"restart \d+ of \d+, after ([\d.]+) s", self.log.read_text(encoding="utf-8"))
        return {
            "ettr": summary["ettr"],
            "kills": num_kills,
            "restart_s": fmean(map(float, restarts)) if restarts else 0.0,
            "seconds": time.monotonic() - began,
            **self.audit()._asdict(),
        }


def lived(schedule: str, rounds: int, life_s: float, seed: int) -> dict[str, Any]:
    """Train without kills and with kills, in both ways; print and return what came and what was predicted."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for way, key in {"endless": "", **WAYS}.items():
            folder = Path(name) / way.split()[0]
            folder.mkdir()
            options = OPTIONS | ({key: "1000"} if key else {})
            victim = Mortal(schedule, LIVE[schedule], folder, options)
            found[way] = victim.train(rounds, life_s if key else 0.0, seed)
            if not key:
                fitted, config = fitted_run(victim.folder), load_config(victim.folder / "config.toml")
            came = found[way]
            restart_s = came["restart_s"] or found.get("alone", came)["restart_s"]
            lived_s = came["seconds"] / max(1, came["kills"]) - restart_s
            deaths = faults(lived_s, restart_s, way) if came["kills"] else None
            sim = without_rates(config.changed(sim=fitted.sim)).changed(faults=deaths)
            predicted = simulate(resolve(config), sim, config.run.changed(rounds=rounds))
            found[way]["predicted"] = predicted.figures["ettr"]
            print(
                f"{schedule:16}{way:10}" + "  ".join(f"{k} {v:.3g}" for k, v in found[way].items()),
                flush=True,
            )
    return found


def main(
    rounds: int = 100,
    *,
    live: bool = False,
    schedule: str = "tailrace",
    life_s: float = 20.0,
    seed: int = 0,
    json: Path | None = None,
) -> None:
    write(json, lived(schedule, rounds, life_s, seed) if live else simulated(rounds))


if __name__ == "__main__":
    run(main)
