"""A simulation that is fitted to one schedule's live run, against the live runs of other schedules.

    python benchmarks/sim_vs_live.py [--config F.toml] [--rounds 3] [--repeats 3] [--fit-on serial]
                                    [--groups 64] [--step 2] [--only NAME,NAME] [--folder DIR] [--json F]

Each schedule runs live from the same weights, on the same prompts, with the same seeds: those of
examples/rolloutpipe.toml, or of another config. Before its trials, a trial of one round is not counted.
`tailrace fit` reads the first trial of --fit-on, and predicts the main time of a round of all schedules in
virtual time.

    live_s           seconds of main time a round, mean over the rounds of a trial, median of the trials;
                     in brackets the least and the largest of the trials
    predicted_s      the same in virtual time
    median_error     median over the other schedules of |predicted / live - 1|
    ranking_errors   pairs of schedules whose live times differ by more than 10%, and whose predicted times
                     have the opposite order
"""

import itertools
import tempfile
from contextlib import aclosing
from pathlib import Path
from statistics import median
from typing import Any

from common import EXAMPLES, run, write
from tailrace import clock
from tailrace.algo.advantages import ComputeAdvantages
from tailrace.config import PolicyConfig, RunConfig, load_config
from tailrace.controller.execution import execute
from tailrace.drivers.assembly.schedule import resolve, with_published_defaults
from tailrace.drivers.assembly.simulation import run_virtual
from tailrace.drivers.assembly.trials import BoundRun, SharedWorkers
from tailrace.drivers.commands.compare import in_turn
from tailrace.extras.plan.fit_command import fitted_run
from tailrace.record.events import Recorder, Sink
from tailrace.record.metrics import MetricsWriter
from tailrace.record.run_log import LogWriter
from tailrace.record.samples import SamplesWriter
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary
from tailrace.sim.settings import SimSettings

EXAMPLE = EXAMPLES / "rolloutpipe.toml"
DIFFERENT = 1.1
"""Ratio of two live times from which on their order counts."""


def candidates(config: RunConfig, groups: int, step: int) -> dict[str, BoundRun]:
    """The schedules: those of [compare] by other parameters, so that all train `groups` groups a round.

    Args:
        step: groups of an optimizer step.
    """
    whole: dict[str, Any] = {"groups_per_round": groups}
    steps = {**whole, "groups_per_step": step}
    parameters: dict[str, dict[str, Any]] = {
        "serial": steps,
        "rolloutpipe": steps,
        "rolloutpipe_eager": steps,
        "conventional": {"groups_per_step": step, "steps_per_round": groups // step},
        "april": {**whole, "groups_launched": groups + groups // 2},
        "tailbatch": {**whole, "response_speculation": 1.0},
    }
    found = {}
    for name, own in parameters.items():
        named = config.changed(schedule={"name": name, **own}, schedules={})
        found[name] = BoundRun(with_published_defaults(named), resolve(named))
    return found


async def run_live(race: dict[str, BoundRun], repeats: int, folder: Path) -> dict[str, list[float]]:
    """Run all schedules; return the main times. Each trial writes the files of a run to its own folder."""
    times: dict[str, list[float]] = {name: [] for name in race}
    async with aclosing(SharedWorkers(folder)) as arena:
        for repeat in range(-1, repeats):
            for name in in_turn(race, repeat):
                candidate, trial_folder = race[name], folder / f"{name}-{repeat}"
                settings = candidate.config.run.changed(eval_every=0, checkpoint_every=0)
                if repeat < 0:
                    settings = settings.changed(rounds=1)
                parts, meter = await arena.parts(candidate), Summary()
                recorder = _recorder(candidate.config, meter, trial_folder)
                config = PolicyConfig.of(candidate.config)
                advantages = ComputeAdvantages(config.algorithm, config.sampling)
                await execute(candidate.schedule, parts, settings, recorder, compute_advantages=advantages)
                if repeat >= 0:
                    times[name].append(meter.figures()["main_time_s"])
    return times


def _recorder(config: RunConfig, meter: Summary, folder: Path) -> Recorder:
    folder.mkdir()
    (folder / "config.toml").write_text(config.toml(), encoding="utf-8")
    files: list[Sink] = [
        MetricsWriter(folder / "metrics.jsonl"),
        LogWriter(folder / "events.jsonl"),
        SamplesWriter(folder / "samples"),
    ]
    return Recorder(StepMeter(meter, *files, wall_clock=clock.wall_time))


def predicted(candidate: BoundRun, sim: SimSettings) -> float:
    """The main time of a round in virtual time."""
    meter = Summary()
    settings = candidate.config.run.changed(eval_every=0, checkpoint_every=0)
    config = candidate.config.changed(sim=sim, run=settings)
    run_virtual(config, candidate.schedule, Recorder(StepMeter(meter, wall_clock=clock.wall_time)))
    return meter.figures()["main_time_s"]


def ranking_errors(live: dict[str, float], simulated: dict[str, float]) -> list[str]:
    """The pairs whose order is wrong."""
    return [
        f"{slow} is slower than {fast}"
        for slow, fast in itertools.permutations(live, 2)
        if live[slow] > DIFFERENT * live[fast] and simulated[slow] <= simulated[fast]
    ]


def main(
    config: Path = EXAMPLE,
    rounds: int = 3,
    groups: int = 64,
    step: int = 2,
    repeats: int = 3,
    fit_on: str = "serial",
    only: str = "",
    folder: Path | None = None,
    json: Path | None = None,
) -> None:
    race = candidates(load_config(config, {"run.rounds": str(rounds)}), groups, step)
    if only:
        race = {name: candidate for name, candidate in race.items() if name in {*only.split(","), fit_on}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder or Path(scratch) / "runs"
        folder.mkdir(parents=True)
        times = clock.run(run_live(race, repeats, folder), virtual=False)
        fitted = fitted_run(folder / f"{fit_on}-0")
        simulated = {name: predicted(candidate, fitted.sim) for name, candidate in race.items()}
    live = {name: median(each) for name, each in times.items()}
    errors = {name: simulated[name] / live[name] - 1 for name in race}
    wrong = ranking_errors(live, simulated)
    for name, error in errors.items():
        spread = f"({min(times[name]):.2f} to {max(times[name]):.2f})"
        print(f"{name:20} live {live[name]:7.2f} s {spread:16} predicted {simulated[name]:7.2f} s", end="")
        print(f"   {error:+.1%}")
    for part in fitted.parts:
        print("".join(f"note: {note}\n" for note in part.notes), end="")
    figures = {
        "median_error": median(abs(error) for name, error in errors.items() if name != fit_on),
        "ranking_errors": len(wrong),
        "wrong_order": wrong,
        "fitted_on": fit_on,
        "parameters": {part.name: dict(part.values) for part in fitted.parts},
        "explained": {part.name: part.explained for part in fitted.parts},
        "schedules": {
            name: {
                "live_s": live[name],
                "laps_s": times[name],
                "predicted_s": simulated[name],
                "error": error,
            }
            for name, error in errors.items()
        },
    }
    print(f"median error {figures['median_error']:.1%}, {len(wrong)} pairs in the wrong order")
    write(json, figures)


if __name__ == "__main__":
    run(main)
