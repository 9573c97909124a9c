"""Whether another schedule would be faster, by the costs and lengths of the run itself in virtual time."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.config import RunConfig, translated_parameters
from tailrace.drivers.assembly.folder import RunFolder, recorder_of
from tailrace.drivers.assembly.schedule import resolve, steps_of_a_round
from tailrace.drivers.assembly.simulation import run_virtual
from tailrace.drivers.kinds.hooks import FittedCosts
from tailrace.errors import ConfigError
from tailrace.kinds import kind_of
from tailrace.record.events import Row
from tailrace.record.summary import Summary

TRIED = ("rolloutpipe", "one_step_off", "tailrace", "pipelinerl")
NUM_SAMPLES, MIN_STEPS, MAX_STEPS = 2_048, 8, 64
"""Samples of a trial, and limits of its optimizer steps. The second half counts: a schedule that never stops
begins with fresh tokens and short responses."""
LEAST_WAIT = 0.1
"""Share of the time that the trainer waits in a round, below which there is little to gain and nothing is
simulated: a schedule that never stops would generate many times what is trained."""


class Faster(NamedTuple):
    """The fastest of `TRIED` within the limits of [plan], or the run's own schedule."""

    schedule: str
    times: float
    """Its trained tokens a second over those of the run's schedule, both in virtual time: in a short trial
    it may train the shorter responses first."""
    lag_mean: float
    note: str = ""
    """Why nothing was simulated, and the remedy; empty: something was."""


NOT_TRUSTED = Faster(
    "", 1.0, 0.0, "There is no prediction for a schedule of your own: `tailrace view RUN --trust` imports it."
)


def fastest(path: Path, samples: float, *, trust: bool = False) -> Faster | None:
    """Simulate other schedules than that of a run, which trains so many samples in an optimizer step. None:
    none was simulated beside the run's own. `trust`: whether to import a schedule that is not built in."""
    found: list[Faster] = []
    steps = min(MAX_STEPS, max(MIN_STEPS, round(NUM_SAMPLES / samples)))
    with suppress(ConfigError):
        config = RunFolder(path).read_config()
        if ":" in str(config.schedule.get("name")) and not trust:
            return NOT_TRUSTED
        fitted: FittedCosts = kind_of("sim", "fitted")
        config = config.changed(sim=fitted.sim(path) if config.model else config.sim, prices=None)
        own, present = _figures(config, config.schedule, steps), config.schedule["name"]
        found.append(Faster(present, 1.0, own["lag_mean"]))
        for name in TRIED if own["waiting_ratio"] > LEAST_WAIT else ():
            with suppress(ConfigError):
                its = _figures(config, translated_parameters(config, name)[0], steps)
                if its["lag_mean"] <= config.plan.max_mean_lag and its["ess_mean"] >= config.plan.min_ess:
                    found.append(Faster(name, its["tokens_per_s"] / own["tokens_per_s"], its["lag_mean"]))
    return max(found, key=lambda each: each.times) if len(found) > 1 else None


def _figures(config: RunConfig, parameters: Mapping[str, Any], steps: int) -> Row:
    """Simulate about so many optimizer steps of a schedule."""
    named = config.changed(schedule=parameters)
    schedule, summary = resolve(named), Summary()
    rounds = max(2, round(steps / (steps_of_a_round(named, schedule) or 1)))
    run_virtual(named.changed(run={"rounds": rounds, "eval_every": 0}), schedule, recorder_of(None, summary))
    return summary.figures(rounds // 2)
