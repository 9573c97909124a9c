"""`tailrace diagnose`: why the trainer's log-probs of trained tokens are not those that the engine recorded.

Their difference is a sum of three, between four log-probs that are all measured:

    trainer, weights of the moment  - trainer, weights of the token       lag of the policy
    trainer, weights of the token   - engine, those weights, fresh KV     numerics of the engine
    engine, fresh KV                - engine, as recorded                 KV cache of older weights

A run of a few rounds gives the first and the last. Then trainer and engines go back to each version that it
published, and score its tokens. Tokens of a sample's first version are recorded with a fresh KV cache.

Three more runs test the parts: with learning rate 0, with a KV cache that each update computes again, and
with samples of the present weights only. Each must have the KL of the parts that are left. With learning rate
0 the KV cache is never old: what is in its place there is the numerics of decoding and prefill, the floor.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from itertools import chain, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray
from rich.table import Table

from tailrace import clock
from tailrace.config import LiveConfig, RunConfig, load_config, shared_parameters
from tailrace.contracts.weights import Weights
from tailrace.controller.base import RunComponents
from tailrace.drivers.assembly import schedule as schedules_of
from tailrace.drivers.assembly.check import begin_start, check_live
from tailrace.drivers.assembly.folder import RunFolder, recorder_of
from tailrace.drivers.assembly.resumption import rewind
from tailrace.drivers.assembly.trials import BoundRun, SharedWorkers, run_trial
from tailrace.drivers.commands.tables import check_output, open_console, print_table
from tailrace.drivers.engine.supervised import SupervisedEngine
from tailrace.drivers.kinds.base import engine_kind
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import ConfigError
from tailrace.ledger.store import LEDGER_FILE, open_store, read_ledger
from tailrace.record.figures import over_tokens, steps_of
from tailrace.record.lags import TENTHS
from tailrace.record.metrics import read_rows
from tailrace.record.summary import Summary
from tailrace.types import Sample

CAUSES = ("numerics", "kv", "lag")
CONFIGURED, FROZEN, RECOMPUTED, FRESH = "as configured", "learning rate 0", "recomputed KV", "fresh samples"
LEFT = {RECOMPUTED: (1, 0, 1), FRESH: (1, 0, 0), FROZEN: (1, 0, 0)}
"""The causes (CAUSES) that each experiment leaves: 1; else 0."""
LITTLE, COMPARABLE = 1e-4, 1e-9
"""Nats a token. With the first the effective sample size is still 0.9998; below the second float32 has no
digits left for the KL."""
BOUNDS = "staleness groups_in_flight in_flight_per_engine ring_groups window groups_launched steps_per_round"
"""Parameters of schedules that bound the lag."""


def diagnose(
    run: Path,
    /,
    *,
    rounds: int = 8,
    schedules: str | None = None,
    json_path: Annotated[Path | None, Parameter("--json")] = None,
    overrides: Mapping[str, str],
) -> None:
    """Split the log-ratio of trained tokens into its causes, and say what dominates and what to set.

    Args:
        run: a config, or the output directory of a run, whose newest checkpoint is the start.
        rounds: of each experiment: more than the lag. $TMPDIR gets a checkpoint a round.
        schedules: A,B: instead of the config's.
        json_path: a file for the figures.
    """
    check_output("--json", json_path, '"tenths": ')
    folder, console = RunFolder(run) if run.is_dir() else None, open_console()
    config = folder.read_config(overrides) if folder else load_config(run, overrides)
    if folder:
        console.print(f"the run   {_recorded(folder, config)}")
    config = LiveConfig.of(config.changed(prices=None))
    names = schedules.split(",") if schedules else [str(config.schedule.get("name"))]
    schedules_of.check_parameter_names(config, names)
    experiments = {name: _experiments(config, name) for name in names}
    with TemporaryDirectory() as scratch:
        workers = SharedWorkers(Path(scratch), folder.newest_checkpoint() if folder else None)
        found = clock.run(_diagnosed(experiments, rounds, Path(scratch), workers), virtual=False)
    for name, figures in found.items():
        table = Table("tenth of the response", "tokens", "KL", *CAUSES, title=f"{name}: KL in nats a token")
        for label, row in figures["tenths"].items():
            table.add_row(label, *(f"{value:.3g}" for value in row.values()))
        print_table(console, table)
        for what, each in figures["experiments"].items():
            console.print(f"{what}: KL {each['kl']:.3g}; of the parts that are left {each['left']:.3g}")
        for label in ("measured", "cause", "set"):
            console.print(f"{label:10}{figures[label]}")
    if json_path:
        json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _recorded(folder: RunFolder, config: RunConfig) -> str:
    """Return the figures from the metrics and the ledger of a run."""
    folder.check_wrote("a checkpoint", "train", "sft")
    if not (steps := steps_of(read_rows(folder.metrics))):
        problem, remedy = "the run has trained no sample yet", "let it train, or name its config"
        raise ConfigError("RUN", str(folder.path), problem, remedy)
    if folder.command == "sft":
        return "it generated nothing: it is where the experiments start"
    names = ("mismatch_kl", "engine_mismatch_kl", "lag/mean")
    said = ", ".join(f"{name} {over_tokens(steps, name):.3g}" for name in names)
    if not (folder.path / LEDGER_FILE).exists():
        return said
    with closing(open_store(config.ledger, folder.path, only_read=True)) as store:
        samples = read_ledger(store, tokens=False).samples.values()
    spans = [sample.spans for sample in samples if sample.fate == "trained"]
    every, later = (sum(span.num_tokens for each in spans for span in each[first:]) for first in (0, 1))
    return f"{said}; {later / max(1, every):.1%} of the trained tokens follow tokens of other weights"


def _experiments(config: RunConfig, name: str) -> dict[str, BoundRun]:
    """The run of a schedule, and those that test its parts."""
    if engine_kind(config).prefix is None:
        raise _cannot_score(config, "such an engine")
    own = {**shared_parameters(config, name), **config.schedules.get(name, {})}
    config = config.changed(schedule=own, schedules={})
    config = schedules_of.with_published_defaults(config)
    begin_start(config)
    config = check_live(config, schedules_of.resolve(config)).config
    num_groups = own.get("groups_per_step", own.get("groups_per_round", 1))
    fresh = {"name": "serial", "groups_per_round": num_groups, "groups_per_step": num_groups}
    recomputing = config.changed(schedule={**own, "kv": "recompute"})
    changes: dict[str, dict[str, object]] = {
        CONFIGURED: {},
        RECOMPUTED: {"schedule": shared_parameters(recomputing, name)},
        FRESH: {"schedule": fresh},
        FROZEN: {"trainer": {"learning_rate": 0.0}},
    }
    configs = {what: config.changed(**change) for what, change in changes.items()}
    return {what: BoundRun(each, schedules_of.resolve(each)) for what, each in configs.items()}


def _cannot_score(config: RunConfig, name: str) -> ConfigError:
    problem = f"{name} does not score a given sequence, which tells numerics from KV cache"
    remedy = "take the embedded engine, or vLLM with sampling.temperature = 1"
    return ConfigError("engine.kind", config.engine.kind, problem, remedy)


class ObservedTrainer:
    """A Trainer that notes the log-probs of each sample under the weights with which it is accumulated, and
    keeps a checkpoint of each publication in a folder, if it has one."""

    def __init__(self, trainer: RemoteTrainer, folder: Path | None) -> None:
        self._trainer, self._folder, self.replicas = trainer, folder, trainer.replicas
        self.current: dict[Sample, list[float]] = {}
        self.step, self.ess, self.sleep, self.wake = trainer.step, trainer.ess, trainer.sleep, trainer.wake
        self.save, self.restore, self.retire = trainer.save, trainer.restore, trainer.retire

    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        for sample in chain.from_iterable(units):
            self.current[sample] = await self._trainer.logprobs(sample)
        await self._trainer.accumulate(units, version=version, replicas=replicas)

    async def publish(self, version: int) -> Weights:
        if self._folder:
            await (await self._trainer.save(self._folder / str(version)))
        return await self._trainer.publish(version)


async def _diagnosed(
    experiments: Mapping[str, Mapping[str, BoundRun]],
    rounds: int,
    folder: Path,
    workers: SharedWorkers,
) -> dict[str, dict[str, Any]]:
    """The figures of each schedule. Raises a ConfigError if an engine cannot score."""
    found: dict[str, dict[str, Any]] = {}
    async with aclosing(workers):
        for number, (name, trials) in enumerate(experiments.items()):
            parts_of, kls = dict[str, NDArray[np.float64]](), dict[str, float]()
            versions = folder / f"versions-{number}"
            versions.mkdir()
            (versions / "0").symlink_to(workers.start.resolve())
            for what, trial in trials.items():
                print(f"{name}: {what}", file=sys.stderr)
                parts, summary = await workers.parts(trial), Summary()
                for mute in (each for each in parts.engines if not each.capabilities.scores):
                    raise _cannot_score(trial.config, mute.name)
                trainer = cast(RemoteTrainer, parts.trainer)
                observed = ObservedTrainer(trainer, versions if what == CONFIGURED else None)
                await run_trial(trial, replace(parts, trainer=observed), recorder_of(None, summary), rounds)
                kls[what] = summary.figures()["mismatch_kl"]
                if what in (CONFIGURED, FROZEN):
                    parts_of[what] = await _log_ratios(parts, observed.current, versions, what == CONFIGURED)
            floor = kl_by_cause(parts_of[FROZEN][:-1])["kv"]
            found[name] = _figures(trials[CONFIGURED], parts_of[CONFIGURED], floor, kls)
    return found


async def _log_ratios(
    parts: RunComponents, current: Mapping[Sample, list[float]], versions: Path, learns: bool
) -> NDArray[np.float64]:
    """Go back to each version, and score the tokens that it generated. Without learning all have the weights
    of version 0. Returns the parts of each token's log-ratio, and its place in [0, 1): [4, num_tokens]."""
    trainer = cast(RemoteTrainer, parts.trainer)
    engines = cycle(cast("list[SupervisedEngine]", parts.engines))
    by = {each: np.repeat(*np.array(each.spans).T) * learns for each in current}
    scores = {each: np.zeros((2, each.num_tokens)) for each in current}
    for version in np.unique(np.concatenate(list(by.values()))).tolist():
        await rewind(parts, versions / str(version), version)
        samples = [each for each in current if version in by[each]]
        own = await asyncio.gather(*map(trainer.logprobs, samples))
        cold = await asyncio.gather(*(_served(next(engines), each) for each in samples))
        for each, both in zip(samples, zip(own, cold, strict=True), strict=True):
            scores[each] = np.where(by[each] == version, both, scores[each])
    found = []
    for each, now in current.items():
        (mine, fresh), recorded = scores[each], np.array(each.behavior_logprobs)
        fresh[: each.spans[0].num_tokens] = recorded[: each.spans[0].num_tokens]
        place = np.arange(each.num_tokens) / each.num_tokens
        found.append(np.stack([mine - fresh, fresh - recorded, now - mine, place]))
    return np.concatenate(found, axis=1)


async def _served(engine: SupervisedEngine, sample: Sample) -> list[float]:
    """Log-probs of the tokens of a sample by an engine, with a fresh KV cache: [num_tokens]."""
    if len(sample.spans) == 1:
        return sample.behavior_logprobs
    found: list[float] = []
    for sequence in TrainingSample.of(sample).sequences:
        ids = [*sequence.context_ids, *sequence.response_ids(sample.completion_ids)]
        logprobs = await engine.score(ids, len(sequence.context_ids))
        for place, observed in sequence.observations:
            del logprobs[place - sequence.start : place - sequence.start + len(observed)]
        found += logprobs
    return found


def kl_by_cause(parts: NDArray[np.float64]) -> dict[str, float]:
    """Return the KL in nats a token, and what each cause adds to it.

    The KL is the figure mismatch_kl: the mean over tokens of the estimator k3 (losses.py), exp(x) - 1 - x of
    the log-ratio x, current policy to behaviour policy. Each token's k3 is divided among the parts of x in
    their proportion, so what the causes add to the KL adds up to it. A part against the others is negative.
    `parts` of x: [len(CAUSES), num_tokens]."""
    x = parts.sum(0)
    weights = np.divide(np.expm1(x), x, out=np.ones_like(x), where=x != 0) - 1  # k3(x) / x
    added = (parts * weights).mean(1).tolist()
    return {"kl": float((np.expm1(x) - x).mean()), **dict(zip(CAUSES, added, strict=True))}


def _figures(
    trial: BoundRun, ratios: NDArray[np.float64], floor: float, kls: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures to print and write. `floor`: mismatch of the KV cache with learning rate 0."""
    parts, tenth = ratios[:-1], (ratios[-1] * TENTHS).astype(int)
    chosen = {str(number + 1): tenth == number for number in np.unique(tenth)} | {"all": tenth >= 0}
    whole, measured = kl_by_cause(parts), kls[CONFIGURED]
    kl, likely = whole["kl"], {**whole, "kv": whole["kv"] - floor, "numerics": whole["numerics"] + floor}
    cause = max(CAUSES, key=lambda each: likely[each])
    off = kl / measured - 1 if measured > COMPARABLE else None
    share = f"{likely[cause] / kl if kl else 0:.0%} of the KL"
    held = "float32 cannot say by how much" if off is None else f"the parts are off by {off:+.1%}"
    return {
        "tenths": {
            label: {"tokens": int(at.sum()), **kl_by_cause(parts[:, at])} for label, at in chosen.items()
        },
        "experiments": {
            what: {"kl": kls[what], "left": kl_by_cause(parts * np.array(left)[:, None])["kl"]}
            for what, left in LEFT.items()
        },
        "off": off,
        "kv_floor": floor,
        "measured": f"mismatch_kl {measured:.3g} nats a token by the run; {held}",
        "cause": f"{cause}: {share}; the floor of kv, {floor:.2g}, counts as numerics",
        "set": ("nothing, the KL is small; for less: " if kl < LITTLE else "") + _remedy(trial, cause),
    }


def _remedy(trial: BoundRun, cause: str) -> str:
    corrected = 'algorithm.correction = "truncate"'
    if trial.config.algorithm.loss != "reinforce":
        corrected += ' with algorithm.old_policy = "recomputed"'
    bounds = [f"schedule.{key}" for key in BOUNDS.split() if key in trial.schedule.keywords]
    types = f"{trial.config.engine.dtype} and {trial.config.trainer.dtype}"
    return {
        "numerics": f'engine.dtype and trainer.dtype = "float32" (now {types}), or {corrected}',
        "kv": 'schedule.kv = "recompute", or the drift at which to recompute, in nats a token',
        "lag": f"a lower {' or '.join([*bounds, 'trainer.learning_rate'])}, or {corrected}",
    }[cause]
