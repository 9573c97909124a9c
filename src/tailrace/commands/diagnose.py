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

from cyclopts import Parameter
from rich.table import Table

from tailrace import clock
from tailrace.algo.mismatch import CAUSES, Cause, TokenRatio, mismatch_kl, parts_of
from tailrace.assembly.folder import RunFolder
from tailrace.assembly.live import check_live, rewind
from tailrace.assembly.schedule import (
    check_parameter_names,
    resolve,
    shared_parameters,
    with_published_defaults,
)
from tailrace.commands.compare import ComparedSchedule, SharedWorkers, recorder_of, run_lap
from tailrace.commands.tables import open_console, print_table
from tailrace.config import RunConfig, load_config, with_model_folder
from tailrace.controller.base import RunComponents
from tailrace.engine.supervised import SupervisedEngine
from tailrace.errors import ConfigError
from tailrace.ledger.recovery import read_ledger
from tailrace.ledger.store import open_store
from tailrace.record.figures import TENTHS, over_tokens, steps_of
from tailrace.record.metrics import read_rows
from tailrace.record.summary import Summary
from tailrace.trainer.batch import TrainingSample
from tailrace.types import Sample
from tailrace.weights.base import Weights
from tailrace.workers.trainer import RemoteTrainer

CONFIGURED, FROZEN, RECOMPUTED, FRESH = "as configured", "learning rate 0", "recomputed KV", "fresh samples"
LEFT: Mapping[str, Sequence[Cause]] = {
    RECOMPUTED: ("numerics", "lag"),
    FRESH: ("numerics",),
    FROZEN: ("numerics",),
}
"""The parts that an experiment leaves."""
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
    folder, console = RunFolder(run) if run.is_dir() else None, open_console()
    config = folder.read_config(overrides) if folder else load_config(run, overrides)
    if folder:
        console.print(f"the run   {_recorded(folder, config)}")
    config = with_model_folder(config.model_copy(update={"prices": None}))
    names = schedules.split(",") if schedules else [str(config.schedule.get("name"))]
    check_parameter_names(config, names)
    experiments = {name: _experiments(config, name) for name in names}
    with TemporaryDirectory() as scratch:
        workers = SharedWorkers(Path(scratch), folder and folder.newest_checkpoint())
        found = clock.run(_diagnosed(experiments, rounds, Path(scratch), workers), virtual=False)
    for name, figures in found.items():
        parts = Table("tenth of the response", "tokens", "KL", *CAUSES, title=f"{name}: KL in nats a token")
        for label, row in figures["tenths"].items():
            parts.add_row(label, *(f"{value:.3g}" for value in row.values()))
        tests = Table("experiment", "KL", "KL of the parts left")
        for label, row in figures["experiments"].items():
            tests.add_row(label, *(f"{value:.3g}" for value in row.values()))
        print_table(console, parts)
        print_table(console, tests)
        for label in ("measured", "cause", "set"):
            console.print(f"{label:10}{figures[label]}")
    if json_path:
        json_path.write_text(json.dumps(found, indent=2) + "\n")


def _recorded(folder: RunFolder, config: RunConfig) -> str:
    """What the metrics and the ledger of a run say."""
    if not (steps := steps_of(read_rows(folder.metrics))):
        problem, remedy = "the run has trained no sample yet", "let it train, or name its config"
        raise ConfigError("RUN", str(folder.path), problem, remedy)
    same = [row for row in steps if "engine_mismatch_kl" in row]
    numerics = f"{over_tokens(same, 'engine_mismatch_kl'):.3g}" if same else "unknown"
    with closing(open_store(config.ledger, folder.path, only_read=True)) as store:
        samples = read_ledger(store, tokens=False).samples.values()
    spans = [sample.spans for sample in samples if sample.fate == "trained"]
    num_tokens, later = (sum(span.num_tokens for each in spans for span in each[n:]) for n in (0, 1))
    return (
        f"mismatch_kl {over_tokens(steps, 'mismatch_kl'):.3g} over {len(steps)} steps, {numerics} where engine "
        f"and trainer had the same weights; lag {over_tokens(steps, 'lag/mean'):.3g} steps; "
        f"{later / max(1, num_tokens):.1%} of the trained tokens follow tokens of other weights"
    )


def _experiments(config: RunConfig, name: str) -> dict[str, ComparedSchedule]:
    """The run of a schedule, and those that test its parts."""
    own = {**shared_parameters(config, name), **config.schedules.get(name, {})}
    config = with_published_defaults(config.model_copy(update={"schedule": own, "schedules": {}}))
    config = check_live(config, resolve(config)).config
    num_groups = own.get("groups_per_step", own.get("groups_per_round", 1))
    fresh = {"name": "serial", "groups_per_round": num_groups, "groups_per_step": num_groups}
    recomputing = config.model_copy(update={"schedule": {**own, "kv": "recompute"}})
    changed: dict[str, tuple[str, object]] = {
        CONFIGURED: ("schedule", own),
        RECOMPUTED: ("schedule", shared_parameters(recomputing, name)),  # without kv: it keeps no KV cache
        FRESH: ("schedule", fresh),
        FROZEN: ("trainer", config.trainer.model_copy(update={"learning_rate": 0.0})),
    }
    configs = {what: config.model_copy(update=dict([change])) for what, change in changed.items()}
    return {what: ComparedSchedule(each, resolve(each)) for what, each in configs.items()}


class ObservedTrainer:
    """A Trainer that notes the log-probs of each sample under the weights with which it is accumulated, and
    keeps a checkpoint of each publication in a folder, if it has one."""

    def __init__(self, trainer: RemoteTrainer, folder: Path | None) -> None:
        self._trainer, self._folder = trainer, folder
        self.current: dict[Sample, list[float]] = {}
        self.step, self.ess, self.sleep, self.wake = trainer.step, trainer.ess, trainer.sleep, trainer.wake
        self.save, self.restore = trainer.save, trainer.restore

    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        samples = list(chain.from_iterable(units))
        logprobs = await asyncio.gather(*map(self._trainer.logprobs, samples))
        self.current.update(zip(samples, logprobs, strict=True))
        await self._trainer.accumulate(units, version=version, replicas=replicas)

    async def publish(self, version: int) -> Weights:
        if self._folder:
            await (await self._trainer.save(self._folder / str(version)))
        return await self._trainer.publish(version)


async def _diagnosed(
    experiments: Mapping[str, Mapping[str, ComparedSchedule]],
    rounds: int,
    folder: Path,
    workers: SharedWorkers,
) -> dict[str, dict[str, Any]]:
    """The figures of each schedule. Raises a ConfigError if an engine cannot score."""
    found = {}
    async with aclosing(workers):
        for name, laps in experiments.items():
            ratios, kls = dict[str, list[TokenRatio]](), dict[str, float]()
            for what, lap in laps.items():
                print(f"{name}: {what}", file=sys.stderr)
                parts, summary, versions = await workers.parts(lap), Summary(), None
                if mute := [each.name for each in parts.engines if not each.capabilities.scores]:
                    problem = f"{mute[0]} does not score a given sequence, which tells numerics from KV cache"
                    remedy = "take the embedded engine, or vLLM with sampling.temperature = 1"
                    raise ConfigError("engine.kind", lap.config.engine.kind, problem, remedy)
                if what == CONFIGURED:
                    versions = folder / f"versions-{len(found)}"
                    versions.mkdir()
                    (versions / "0").symlink_to(workers.start.resolve())
                observed = ObservedTrainer(cast(RemoteTrainer, parts.trainer), versions)
                recorder = recorder_of(name, lap, summary, None)
                await run_lap(lap, replace(parts, trainer=observed), recorder, rounds)
                kls[what] = summary.lap()["mismatch_kl"]
                if what in (CONFIGURED, FROZEN):
                    ratios[what] = await _token_ratios(parts, observed.current, versions)
            found[name] = _figures(laps[CONFIGURED], ratios[CONFIGURED], parts_of(ratios[FROZEN])["kv"], kls)
    return found


async def _token_ratios(
    parts: RunComponents, current: Mapping[Sample, list[float]], versions: Path | None
) -> list[TokenRatio]:
    """Go back to each version in the folder, and score the tokens that it generated. Without a folder all
    versions have the present weights."""
    trainer, engines = (
        cast(RemoteTrainer, parts.trainer),
        cycle(cast(Sequence[SupervisedEngine], parts.engines)),
    )
    scores = {sample: [(0.0, 0.0)] * sample.num_tokens for sample in current}
    for version in (
        sorted({span.version for sample in current for span in sample.spans}) if versions else [None]
    ):
        if versions:
            await rewind(parts, versions / str(version), version)
        samples = [each for each in current if version in (None, *(span.version for span in each.spans))]
        trained = await asyncio.gather(*map(trainer.logprobs, samples))
        served = await asyncio.gather(*(_served(next(engines), sample) for sample in samples))
        for sample, own, cold in zip(samples, trained, served, strict=True):
            tokens = chain.from_iterable([span.version] * span.num_tokens for span in sample.spans)
            for place, generated_by in enumerate(tokens):
                if version in (None, generated_by):
                    scores[sample][place] = own[place], cold[place]
    ratios = []
    for sample, logprobs in current.items():
        rows = zip(logprobs, scores[sample], sample.behavior_logprobs, strict=True)
        for place, (now, (own, cold), recorded) in enumerate(rows):
            if place < sample.spans[0].num_tokens:
                cold = recorded
            ratios.append(TokenRatio(place / sample.num_tokens, own - cold, cold - recorded, now - own))
    return ratios


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


def _figures(
    lap: ComparedSchedule, ratios: Sequence[TokenRatio], floor: float, kls: Mapping[str, float]
) -> dict[str, Any]:
    """What is printed and written. `floor`: what the KV cache adds with learning rate 0."""
    tenths: dict[str, list[TokenRatio]] = {}
    for each in sorted(ratios):
        tenths.setdefault(str(int(each.place * TENTHS) + 1), []).append(each)
    rows = {
        label: {"tokens": len(each), "kl": mismatch_kl(each), **parts_of(each)}
        for label, each in {**tenths, "all": ratios}.items()
    }
    parts, kl, measured = parts_of(ratios), mismatch_kl(ratios), kls[CONFIGURED]
    parts["kv"], parts["numerics"] = parts["kv"] - floor, parts["numerics"] + floor
    cause = max(CAUSES, key=lambda each: parts[each])
    off = kl / measured - 1 if measured > COMPARABLE else None
    held = (
        "float32 cannot say how far the parts are off" if off is None else f"the parts are off by {off:+.1%}"
    )
    little = "nothing, the KL is small; to make it smaller: " if kl < LITTLE else ""
    return {
        "tenths": rows,
        "experiments": {what: {"kl": kls[what], "left": mismatch_kl(ratios, LEFT[what])} for what in LEFT},
        "off": off,
        "kv_floor": floor,
        "measured": f"mismatch_kl {measured:.3g} nats a token by the run; {held}",
        "cause": f"{cause}: {parts[cause] / kl if kl else 0:.0%} of the KL (the floor of kv, {floor:.2g}, counts as numerics)",
        "set": little + _remedy(lap, cause),
    }


def _remedy(lap: ComparedSchedule, cause: Cause) -> str:
    config = lap.config
    corrected = 'algorithm.correction = "truncate"'
    if config.algorithm.loss != "reinforce":
        corrected += ' with algorithm.old_policy = "recomputed"'
    match cause:
        case "numerics":
            types = f"{config.engine.dtype} and {config.trainer.dtype}"
            return f'engine.dtype and trainer.dtype = "float32", or the same (now {types}); or {corrected}'
        case "kv":
            return 'schedule.kv = "recompute", or the drift at which to recompute, in nats a token'
        case "lag":
            bounds = [f"schedule.{key}" for key in BOUNDS.split() if key in lap.schedule.keywords]
            return f"a lower {' or '.join([*bounds, 'trainer.learning_rate'])}; or {corrected}"
