"""`tailrace diagnose`: why the trainer's log-probs of trained tokens are not those that the engine recorded.

Their difference is a sum of three, between four log-probs that are all measured:

    trainer, weights of the moment  - trainer, weights of the token       lag of the policy
    trainer, weights of the token   - engine, those weights, fresh KV     numerics of the engine
    engine, fresh KV                - engine, as recorded                 KV cache of older weights

A run of a few rounds gives the first and the last. Then trainer and engines go back to each version that it
published and score its tokens again. As long as all tokens of a sequence are of one version, its KV cache is
fresh, and the recorded log-prob is the third one: scored again it would differ by the numerics of decoding
and prefill, which are no effect of old weights.

Three more runs test the parts: without any change of weights, with a KV cache that each update computes
again, and with samples of the present weights only. Each must have the KL that is left by the parts.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from itertools import chain, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from tailrace import clock
from tailrace.algo.mismatch import CAUSES, Cause, TokenRatio, mismatch_kl, parts_of
from tailrace.assembly.folder import RunFolder
from tailrace.assembly.live import advantages_of, check_live, rewind
from tailrace.assembly.schedule import (
    check_parameter_names,
    resolve,
    shared_parameters,
    with_published_defaults,
)
from tailrace.commands.compare import ComparedSchedule, SharedWorkers
from tailrace.commands.tables import open_console, print_table, progress
from tailrace.config import RunConfig, load_config, with_model_folder
from tailrace.controller.base import RunComponents
from tailrace.controller.execution import execute
from tailrace.engine.supervised import SupervisedEngine
from tailrace.errors import ConfigError
from tailrace.ledger.recovery import read_ledger
from tailrace.ledger.store import LEDGER_FILE, open_store
from tailrace.record.events import Recorder
from tailrace.record.figures import TENTHS, over_tokens, steps_of
from tailrace.record.metrics import read_rows
from tailrace.trainer.base import StepStats
from tailrace.trainer.batch import TrainingSample
from tailrace.types import Sample
from tailrace.weights.base import Weights
from tailrace.workers.trainer import RemoteTrainer

CONFIGURED, FROZEN, RECOMPUTED, FRESH = "as configured", "learning rate 0", "recomputed KV", "fresh samples"
REMAINING: Mapping[str, tuple[Cause, ...]] = {
    FROZEN: ("numerics",),
    RECOMPUTED: ("numerics", "lag"),
    FRESH: ("numerics",),
}
"""The parts that each experiment leaves."""
LITTLE = 1e-4
"""Nats a token: with it the effective sample size is still 0.9998 (1 / (1 + 2 KL))."""
COMPARABLE = 1e-9
"""Nats a token: below, float32 has no digits left for the KL."""
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
        run: a config file, or the output directory of a run, whose newest checkpoint is then the start.
        rounds: of each experiment. A lag builds up over as many rounds as it has. $TMPDIR needs room for a
            checkpoint a round.
        schedules: A,B: instead of the config's.
        json_path: a file for the figures.
    """
    folder = RunFolder(run) if run.is_dir() else None
    config = folder.read_config(overrides) if folder else load_config(run, overrides)
    start, console = folder.newest_checkpoint() if folder else None, open_console()
    if folder:
        console.print(_recorded(folder, config))
    config = with_model_folder(config.model_copy(update={"prices": None}))
    names = schedules.split(",") if schedules else [str(config.schedule.get("name"))]
    check_parameter_names(config, names)
    experiments = {name: _experiments(config, name) for name in names}
    with TemporaryDirectory() as scratch, progress() as say:
        work = diagnose_live(experiments, rounds, Path(scratch), start, say)
        found = clock.run(work, virtual=False)
    for name, diagnosis in found.items():
        for table in diagnosis.tables(name):
            print_table(console, table)
        console.print(diagnosis.words())
    if json_path:
        numbers = {name: diagnosis.numbers() for name, diagnosis in found.items()}
        json_path.write_text(json.dumps(numbers, indent=2) + "\n")


def _recorded(folder: RunFolder, config: RunConfig) -> str:
    """What the metrics and the ledger of a run say."""
    steps = steps_of(read_rows(folder.metrics))
    if not steps:
        problem, remedy = "the run has trained no sample yet", "let it train, or name its config"
        raise ConfigError("RUN", str(folder.path), problem, remedy)
    same = [row for row in steps if "engine_mismatch_kl" in row]
    said = (
        f"the run    mismatch_kl {over_tokens(steps, 'mismatch_kl'):.3g} nats a token over {len(steps)} steps"
    )
    if same:
        said += (
            f", {over_tokens(same, 'engine_mismatch_kl'):.3g} where engine and trainer had the same weights"
        )
    said += f"; lag {over_tokens(steps, 'lag/mean'):.3g} steps"
    if config.ledger.kind == "memory" or not (folder.path / LEDGER_FILE).exists():
        return said
    with closing(open_store(config.ledger, folder.path, only_read=True)) as store:
        samples = read_ledger(store, tokens=False).samples.values()
    trained = [sample.spans for sample in samples if sample.fate == "trained"]
    later = sum(span.num_tokens for spans in trained for span in spans[1:])
    share = later / max(1, sum(span.num_tokens for spans in trained for span in spans))
    return f"{said}; {share:.1%} of the trained tokens follow tokens of older weights"


def _experiments(config: RunConfig, name: str) -> dict[str, ComparedSchedule]:
    """The run of a schedule, and those that test its parts."""
    own = {**shared_parameters(config, name), **config.schedules.get(name, {})}
    config = with_published_defaults(config.model_copy(update={"schedule": own, "schedules": {}}))
    bound = resolve(config)
    config = check_live(config, bound).config
    if config.engine.kind == "tinker":
        raise _cannot_score(config, "a service")
    num_groups = own.get("groups_per_step", own.get("groups_per_round", 1))
    fresh = {"name": "serial", "groups_per_round": num_groups, "groups_per_step": num_groups}
    recomputing = config.model_copy(update={"schedule": {**own, "kv": "recompute"}})
    changed: dict[str, dict[str, object]] = {
        CONFIGURED: {},
        RECOMPUTED: {"schedule": shared_parameters(recomputing, name)},
        FRESH: {"schedule": fresh},
        FROZEN: {"trainer": config.trainer.model_copy(update={"learning_rate": 0.0})},
    }
    if changed[RECOMPUTED]["schedule"] == own:  # it does so, or keeps no KV cache over a publication
        del changed[RECOMPUTED]
    configs = {what: config.model_copy(update=changes) for what, changes in changed.items()}
    return {what: ComparedSchedule(each, resolve(each)) for what, each in configs.items()}


def _cannot_score(config: RunConfig, name: str) -> ConfigError:
    problem = f"{name} does not score a given sequence, so numerics and KV cache cannot be told apart"
    remedy = "diagnose with the embedded engine, or with vLLM and sampling.temperature = 1"
    return ConfigError("engine.kind", config.engine.kind, problem, remedy)


# -- the measurement -----------------------------------------------------------------------------


class ObservedTrainer:
    """A Trainer that notes what another one does.

    Args:
        folder: keeps a checkpoint of each publication, under its number. None: it keeps none.
    """

    def __init__(self, trainer: RemoteTrainer, folder: Path | None) -> None:
        self._trainer, self._folder = trainer, folder
        self.current: dict[Sample, list[float]] = {}
        """Log-probs of each sample under the weights with which it was accumulated."""
        self.kl, self.num_tokens = 0.0, 0
        """Sums over the trainer's own statistics: the KL of all tokens by k3, and the tokens."""
        self.ess, self.sleep, self.wake = trainer.ess, trainer.sleep, trainer.wake
        self.save, self.restore = trainer.save, trainer.restore

    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        samples = list(chain.from_iterable(units))
        logprobs = await asyncio.gather(*map(self._trainer.logprobs, samples))
        self.current.update(zip(samples, logprobs, strict=True))
        await self._trainer.accumulate(units, version=version, replicas=replicas)

    async def step(self) -> StepStats:
        stats = await self._trainer.step()
        self.kl, self.num_tokens = self.kl + stats.kl * stats.num_tokens, self.num_tokens + stats.num_tokens
        return stats

    async def publish(self, version: int) -> Weights:
        if self._folder:
            await (await self._trainer.save(self._folder / str(version)))
        return await self._trainer.publish(version)


async def diagnose_live(
    experiments: Mapping[str, Mapping[str, ComparedSchedule]],
    rounds: int,
    folder: Path,
    start: Path | None,
    say: Callable[[str], None],
) -> dict[str, "Diagnosis"]:
    """Run the experiments of each schedule from the checkpoint `start`, or from the model of the config.
    Raises a ConfigError if an engine cannot score."""
    found = {}
    async with aclosing(SharedWorkers(folder, start)) as workers:
        for name, laps in experiments.items():
            ratios, measured, kls = list[TokenRatio](), 0.0, dict[str, float]()
            for what, lap in laps.items():
                say(f"{name}, {what}")
                parts = await workers.parts(lap)
                if mute := next((each.name for each in parts.engines if not each.capabilities.scores), None):
                    raise _cannot_score(lap.config, mute)
                assert isinstance(parts.trainer, RemoteTrainer)
                versions = folder / str(len(found))
                observed = ObservedTrainer(parts.trainer, versions if what == CONFIGURED else None)
                settings = lap.config.run.model_copy(
                    update={"rounds": rounds, "eval_every": 0, "checkpoint_every": 0}
                )
                advantages = advantages_of(lap.config)
                lap_parts = replace(parts, trainer=observed)
                await execute(lap.schedule, lap_parts, settings, Recorder(), compute_advantages=advantages)
                if what == CONFIGURED:
                    measured = observed.kl / observed.num_tokens
                    ratios = await _token_ratios(parts, observed.current, versions, workers.start)
                else:
                    kls[what] = mismatch_kl(
                        current - recorded
                        for sample, logprobs in observed.current.items()
                        for current, recorded in zip(logprobs, sample.behavior_logprobs, strict=True)
                    )
            found[name] = Diagnosis(laps[CONFIGURED], tuple(ratios), measured, kls)
    return found


async def _token_ratios(
    parts: RunComponents, current: Mapping[Sample, list[float]], folder: Path, start: Path
) -> list[TokenRatio]:
    """Go back to each version, and score the tokens that it generated."""
    own = {sample: list[float]([0.0]) * sample.num_tokens for sample in current}
    fresh = {sample: list(sample.behavior_logprobs) for sample in current}
    engines = cycle([each for each in parts.engines if isinstance(each, SupervisedEngine)])
    trainer = parts.trainer
    assert isinstance(trainer, RemoteTrainer)

    async def score(sample: Sample, version: int, engine: SupervisedEngine) -> None:
        places = [place for place, each in enumerate(_versions(sample)) if each == version]
        logprobs = await trainer.logprobs(sample)
        for place in places:
            own[sample][place] = logprobs[place]
        for ids, at in _with_older(sample, version):
            first = min(at.values())
            scored = await engine.score(ids, first)
            for place, position in at.items():
                fresh[sample][place] = scored[position - first]

    for version in sorted({version for sample in current for version in _versions(sample)}):
        await rewind(parts, folder / str(version) if version else start, version)
        samples = [sample for sample in current if version in _versions(sample)]
        await asyncio.gather(*(score(sample, version, next(engines)) for sample in samples))
    return [
        TokenRatio(place / sample.num_tokens, mine - cold, cold - recorded, now - mine)
        for sample, logprobs in current.items()
        for place, (now, mine, cold, recorded) in enumerate(
            zip(logprobs, own[sample], fresh[sample], sample.behavior_logprobs, strict=True)
        )
    ]


def _versions(sample: Sample) -> list[int]:
    """The version of each token."""
    return [span.version for span in sample.spans for _ in range(span.num_tokens)]


def _with_older(sample: Sample, version: int) -> Iterator[tuple[list[int], dict[int, int]]]:
    """Yield each sequence of a sample in which a version follows others, up to its last such token; and the
    positions of these tokens by their places in the completion."""
    versions = _versions(sample)
    for sequence in TrainingSample.of(sample).sequences:
        mixed = next(
            (p for p in range(sequence.start, sequence.end) if versions[p] != versions[sequence.start]), None
        )
        ids, at = list(sequence.context_ids), dict[int, int]()
        observed = dict(sequence.observations)
        for place in range(sequence.start, sequence.end):
            ids += [*observed.get(place, ()), sample.completion_ids[place]]
            if mixed is not None and place >= mixed and versions[place] == version:
                at[place] = len(ids) - 1
        if at:
            yield ids[: max(at.values()) + 1], at


# -- what it says --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The parts of a schedule's log-ratios, and the KL of the experiments. KLs are in nats a token.

    Args:
        measured_kl: over the same tokens, by the trainer while it trained.
    """

    lap: ComparedSchedule
    ratios: Sequence[TokenRatio]
    measured_kl: float
    experiments: Mapping[str, float]

    @property
    def kl(self) -> float:
        """Of all parts together."""
        return mismatch_kl(each.left_by() for each in self.ratios)

    @property
    def off(self) -> float | None:
        """By how much the parts together miss what the trainer measured; None: float32 cannot say."""
        return self.kl / self.measured_kl - 1 if self.measured_kl > COMPARABLE else None

    @property
    def cause(self) -> Cause:
        """The largest part."""
        parts = parts_of(self.ratios)
        return max(CAUSES, key=lambda cause: parts[cause])

    def expected(self, what: str) -> float:
        """The KL of an experiment by the parts that it leaves."""
        return mismatch_kl(each.left_by(*REMAINING[what]) for each in self.ratios)

    def numbers(self) -> dict[str, Any]:
        return {
            "kl": self.kl,
            "parts": parts_of(self.ratios),
            "tenths": {tenth: parts_of(ratios) for tenth, ratios in self._tenths().items()},
            "measured_kl": self.measured_kl,
            "off": self.off,
            "experiments": {
                what: {"kl": kl, "expected": self.expected(what)} for what, kl in self.experiments.items()
            },
            "cause": self.cause,
            "num_tokens": len(self.ratios),
        }

    def tables(self, name: str) -> list[Table]:
        parts = Table("tenth of the response", "tokens", "KL", *CAUSES, title=f"{name}: KL in nats a token")
        for label, ratios in [*self._tenths().items(), ("all", self.ratios)]:
            kls = mismatch_kl(each.left_by() for each in ratios), *parts_of(ratios).values()
            parts.add_row(str(label), f"{len(ratios):,}", *(f"{kl:.3g}" for kl in kls))
        tests = Table("experiment", "KL", "by the parts")
        for what, kl in self.experiments.items():
            tests.add_row(what, f"{kl:.3g}", f"{self.expected(what):.3g}")
        return [parts, tests]

    def words(self) -> str:
        """What dominates, and what to set."""
        share = parts_of(self.ratios)[self.cause] / self.kl if self.kl else 0.0
        held = "float32 cannot say more" if self.off is None else f"the parts are off by {self.off:+.1%}"
        said = f"measured   {self.measured_kl:.3g} nats a token (mismatch_kl of the run); {held}\n"
        said += f"cause      {self.cause}: {share:.0%} of the KL\n"
        little = "nothing: the KL is small. If it must be smaller: " if self.kl < LITTLE else ""
        return f"{said}set        {little}{self._remedy()}"

    def _tenths(self) -> dict[int, list[TokenRatio]]:
        """The tokens by the tenth of their response."""
        found: dict[int, list[TokenRatio]] = {}
        for each in sorted(self.ratios):
            found.setdefault(int(each.place * TENTHS) + 1, []).append(each)
        return found

    def _remedy(self) -> str:
        config, schedule = self.lap.config, self.lap.schedule
        types = config.engine.dtype, config.trainer.dtype
        corrected = 'algorithm.correction = "truncate"'
        if config.algorithm.loss != "reinforce":
            corrected = f'algorithm.old_policy = "recomputed" with {corrected}'
        if self.cause == "numerics":
            same = 'trainer.dtype and engine.dtype = "float32"'
            apart = f'engine.dtype = "{types[1]}" as the trainer\'s (now {types[0]!r})'
            return f"{same if types[0] == types[1] else apart}, or {corrected}"
        if self.cause == "kv":
            return 'schedule.kv = "recompute", or the drift in nats a token at which it is recomputed'
        bounds = [f"schedule.{key}" for key in BOUNDS.split() if key in schedule.keywords]
        lower = " or ".join([*bounds, "trainer.learning_rate"])
        return f"a lower {lower}, or {corrected}"
