"""Trains the recorded samples of a run again, without engines: `tailrace train --replay RUN`.

The ledger of the run has the samples that it trained: tokens, log-probs, turns, rewards. Its event log has
the order: which samples were accumulated together, and the steps and publications between them. A replay
begins with these groups as a resumed run begins with those that a kill interrupted, and a schedule of its own
repeats the order. Advantages are computed anew, by the algorithm of the replay.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf
from pathlib import Path

import msgspec

from tailrace.algo.advantages import ComputeAdvantages
from tailrace.config import LiveConfig, changed_keys
from tailrace.contracts.engine import TokenCounter
from tailrace.controller.base import RunComponents
from tailrace.controller.run import Run
from tailrace.drivers.assembly.check import check_own_trainer, fitted_to_machine
from tailrace.drivers.assembly.environments import training_prompts
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.machine import Fitted
from tailrace.drivers.assembly.open import open_trainer
from tailrace.drivers.assembly.resumption import changed_files, dated, inputs_of
from tailrace.drivers.assembly.schedule import BoundSchedule
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.reward.kinds import NoFunctions
from tailrace.errors import ConfigError, say
from tailrace.ledger.base import GroupRow, LedgerTables, SampleRow
from tailrace.ledger.recovery import StartingPoint, stored_sample
from tailrace.ledger.store import LEDGER_FILE, Store, read_ledger
from tailrace.record.events import Accumulated, OptimizerStep, Published, RoundEnded, RunStarted
from tailrace.record.run_log import LogReader
from tailrace.types import Group, Prompt, Sample, Span, samples_of

SAME = ("data.", "environment.", "sampling.", "run.seed", "run.group_size", "run.groups.", "model.template_")
"""Keys that say what the samples are. A replay has those of its run."""

Recorded = Accumulated | OptimizerStep | Published | RoundEnded


@dataclass(frozen=True, slots=True)
class Recording:
    """The trained samples of a run and their order.

    Args:
        groups_per_step: groups between two optimizer steps; None: the steps of the run.
    """

    tables: LedgerTables
    order: Sequence[Recorded]
    groups_per_step: int | None

    @property
    def schedule(self) -> BoundSchedule:
        """The schedule that repeats the order."""
        return BoundSchedule(replayed)

    @property
    def num_rounds(self) -> int:
        """Rounds with all their steps, and the last one if it was interrupted."""
        last = isinstance(self.order[-1], RoundEnded)
        return sum(isinstance(each, RoundEnded) for each in self.order) + (not last)

    def check(self, config: LiveConfig) -> Fitted[LiveConfig]:
        """Check a config against the recording before anything starts. Raises a ConfigError.

        Returns:
            The config with the rounds of the recording, without evaluations, and fitted to the machine.
        """
        run = {"rounds": self.num_rounds, "eval_every": 0}
        config = config.changed(run=run, weights={"probe_every": 0}, prices=None)
        assert config.run.replay
        config = dated(config, RunFolder(config.run.replay))
        samples = (each.id for each in self.tables.trainings.values())
        longest = max(self.tables.samples[id].num_tokens for id in samples)
        say(f"replays {self.num_rounds} rounds of {config.run.replay}; nothing is generated")
        return Fitted(fitted_to_machine(config, prompt_tokens=longest, overlaps=False).config)

    @asynccontextmanager
    async def open(self, config: LiveConfig, folder: Path) -> AsyncIterator[RunComponents]:
        """Start the trainer alone, as `RecordedRun.open`."""
        async with open_trainer(config, folder, load_tokenizer(config.model.path)) as trainer:
            prompts = training_prompts(config)
            yield RunComponents((), trainer, NoFunctions(), prompts, prompts)

    def begin(self, start: StartingPoint, config: LiveConfig, folder: RunFolder) -> BoundSchedule:
        """Give a run what was recorded, as `RecordedRun.begin`."""
        if start.life == 1:
            self._fill(start, config, folder)
        else:
            self._restore_versions(start)
        return partial(self.schedule, config=config, recording=self, num_groups=len(start.interrupted))

    def _fill(self, start: StartingPoint, config: LiveConfig, folder: RunFolder) -> None:
        """Give a new run the recorded groups. Their tokens count as generated."""
        prompts, members = training_prompts(config), self.tables.members()
        trained = {each.prompt for each in self.tables.trainings.values() if each.undone is None}
        for index in sorted(trained):
            group = self._group(self.tables.groups[index], prompts[index], members[index], config.run.seed)
            start.interrupted.append(group)
        start.totals.num_drawn = len(start.interrupted)
        start.num_generated = sum(group.num_tokens for group in start.interrupted)
        TokenCounter(folder.counts / f"replay-{start.life}.count").add(start.num_generated)

    @staticmethod
    def _restore_versions(start: StartingPoint) -> None:
        """Give the samples of a resumed replay their recorded versions. A life of a replay generates nothing,
        so their age is not counted along its lives."""
        for sample, origins in start.origins.items():
            sample.spans = [Span(each.version, each.num_tokens) for each in origins]

    def _group(self, row: GroupRow, prompt: Prompt, members: Sequence[SampleRow], seed: int) -> Group:
        group = Group(prompt, row.num_required, [], num_launched=row.num_launched, attempt=row.attempt)
        group.last_attempt, group.round_drawn = max(each.attempt for each in members), row.round
        # Of members with one number the last one: the others lost their version.
        stored = {each.number: each for each in members if each.attempt >= row.attempt}
        for each in (stored[number] for number in row.kept if stored[number].reward is not None):
            sample = stored_sample(self.tables, each, group, seed)
            sample.fate = None
            for span in each.spans:
                sample.grow(span.num_tokens, span.version)
            group.samples.append(sample)
        group.kept = [*group.samples]
        return group


def _order(path: Path) -> list[Recorded]:
    """Return what the trainer was asked for, without what a later process of the run has undone."""
    order: list[Recorded] = []
    for event in LogReader(path).read():
        if isinstance(event, RunStarted):
            kept = [n for n, each in enumerate(order) if _is_before(each, event)]
            del order[max(kept, default=-1) + 1 :]
            order.append(Published(event.time_s, event.time_s, event.version))  # as it goes on with
        elif isinstance(event, Accumulated | OptimizerStep | Published | RoundEnded):
            order.append(event)
    ends = [n for n, each in enumerate(order, 1) if isinstance(each, OptimizerStep | RoundEnded)]
    return order[: max(ends, default=0)]


def _is_before(event: Recorded, start: RunStarted) -> bool:
    """Whether an event belongs to what a process went on from."""
    match event:
        case OptimizerStep():
            return event.number <= start.step
        case Published():
            return event.version <= start.version
        case RoundEnded():
            return event.round < start.round
    return False


async def replayed(run: Run, *, config: LiveConfig, recording: Recording, num_groups: int) -> None:
    """The schedule of a replay: the recorded order, or a step after so many groups. Where the run masked
    stale tokens, those beyond `schedule.staleness` are masked. `num_groups`: not trained yet."""
    masks = any(each.masked for each in recording.tables.trainings.values())
    run.declare(staleness=config.schedule.get("staleness", inf) if masks else inf, stale="mask")
    groups, advantages = run.prompts(num_groups), ComputeAdvantages(config.algorithm, config.sampling)
    for group in groups:
        if reason := advantages(group):
            run.drop([group], reason)
    samples = {each.id: each for group in groups for each in group.trainable if each.fate is None}
    rounds: list[list[Recorded]] = [[]]
    for event in recording.order:
        rounds += [[]] if isinstance(event, RoundEnded) else []
        rounds[-1].append(event)
    per_step, waiting = (recording.groups_per_step or 0) * config.run.num_trained, 0
    async for number in run.rounds():
        for event in rounds[number]:
            if isinstance(event, Accumulated):
                for unit in _units([samples[id] for id in event.samples if id in samples]):
                    await run.accumulate(unit)
                    waiting += len(samples_of(unit))
                    if per_step and waiting >= per_step:
                        await run.step()
                        waiting = 0
            elif isinstance(event, Published):
                while run.version < event.version:
                    await run.publish()
            elif isinstance(event, OptimizerStep) and waiting and not per_step:
                await run.step()
                waiting = 0
        if waiting:
            await run.step()
            waiting = 0
    run.drop([group for group in groups if group.fate is None], "not trained")


def _units(samples: Sequence[Sample]) -> list[list[Group | Sample]]:
    """Return what to accumulate in one call each: whole groups, or samples that came without their group."""
    runs = [[*same] for _, same in groupby(samples, lambda sample: sample.prompt.index)]
    if all(run == run[0].group.trainable for run in runs):
        return [[run[0].group] for run in runs]
    return [[*samples]]


class Replay:
    """The hook `run.replay`."""

    def read(self, config: LiveConfig) -> Recording:
        """Read a run as `Replays.read`."""
        path = config.run.replay
        assert path
        check_own_trainer(config)
        place = ("run.replay", str(path))
        folder, file = RunFolder(path), path / LEDGER_FILE
        folder.check_wrote("samples", "train", key=place[0])
        if not file.exists() or not folder.events.exists():
            problem = f"it has no {LEDGER_FILE} and events.jsonl"
            raise ConfigError(*place, problem, "name the output directory of a run of tailrace train")
        with closing(Store.open(file, only_read=True)) as store:
            tables = read_ledger(store)
        is_dated = bool(config.model.template_date)
        last, config = tables.lives[max(tables.lives)], dated(config, folder)
        schedule = msgspec.json.decode(last.config)["schedule"]
        for key, (before, after) in changed_keys(last.config, config).items():
            is_untold = key == "model.template_date" and before is None  # an earlier release kept no day
            if key.startswith(SAME) and not (is_untold and is_dated):
                problem = f"the samples of {path} were recorded with {before!r}"
                remedy = "name the day on which it was recorded" if is_untold else "change it back"
                raise ConfigError(key, after, problem, f"{remedy}, or record a run with it")
        there = {file: digest for file, digest in inputs_of(config).items() if file in last.inputs}
        if changed := changed_files(last.inputs, last.inputs | there):
            say(f"warning: the samples were recorded with another content of {changed}")
        trained = {each.id for each in tables.trainings.values() if each.undone is None}
        if not trained or not (order := _order(folder.events)):
            raise ConfigError(*place, "the run has trained no sample yet", "let it train, or name another")
        if gone := [id for id in trained if tables.samples[id].pruned]:
            problem = f"{len(gone)} of its {len(trained)} trained samples are gone: checkpoints cover them"
            raise ConfigError(*place, problem, "record a run with ledger.keep_tokens = true")
        found = (tables.samples[id] for id in trained)
        if config.algorithm.needs_reference and any(
            each.num_tokens and not each.reference_logprobs for each in found
        ):
            problem, key = "the recorded samples have no log-probs of a reference model", "algorithm.kl_coef"
            raise ConfigError(key, config.algorithm.kl_coef, problem, "record a run with it, or write 0")
        given = config.schedule.get("groups_per_step")
        changed_steps = given if given != schedule.get("groups_per_step") else None
        return Recording(tables, order, changed_steps)
