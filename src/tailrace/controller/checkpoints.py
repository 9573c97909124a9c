"""Checkpoints and evaluations, which stand between the rounds of a run."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import msgspec

from tailrace import clock
from tailrace.contracts.trainer import Trainer, is_checkpoint
from tailrace.controller.base import RunComponents, RunSettings
from tailrace.controller.state import RunState
from tailrace.ledger.base import CheckpointRow
from tailrace.ledger.ledger import Ledger, NullJournal
from tailrace.ledger.recovery import StartingPoint
from tailrace.record.events import Evaluated, Recorder, Saved
from tailrace.rollout.evaluation import evaluate, held_out_samples, metrics_of_sets, solved_share
from tailrace.rollout.history import RESPONSES_FILE, History
from tailrace.rollout.placement import Placement
from tailrace.rollout.rewards import chain_of_rewards
from tailrace.rollout.router import Router
from tailrace.types import Group


class Checkpoints:
    """Saves the trainer and commits the ledger: every `checkpoint_every` rounds, at the end of the run, and
    at an interruption.

    The trainer has its devices when a checkpoint begins. The run goes on while it is written. Its row is
    committed when it is complete, with the state of the run at the moment at which the checkpoint began. So a
    run that is killed meanwhile resumes from the checkpoint before. A checkpoint that cannot be written ends
    the run.

    Args:
        tasks: writing a checkpoint and committing its row run in this task group.
        folder: where checkpoints go; None: none are written.
        start: the checkpoint that the run was resumed from, and its round and optimizer steps.
    """

    def __init__(
        self,
        parts: RunComponents,
        settings: RunSettings,
        ledger: Ledger,
        journal: NullJournal,
        recorder: Recorder,
        tasks: asyncio.TaskGroup,
        placement: Placement,
        state: RunState,
        history: History,
        *,
        folder: Path | None,
        start: StartingPoint,
    ) -> None:
        self._parts, self._settings, self._ledger = parts, settings, ledger
        self._journal, self._recorder, self._folder = journal, recorder, folder
        self._tasks, self._placement, self._state, self._history = tasks, placement, state, history
        self._writing: asyncio.Task[None] | None = None
        """Completes the newest checkpoint."""
        self.evaluating: asyncio.Task[None] | None = None
        """The evaluation that runs beside training. No checkpoint of a later round is committed before its
        end: a resumed run would lack it."""
        self._life, base = start.life, start.base
        self.newest = folder / base.checkpoint if folder and base.checkpoint and base.step else None
        """The newest complete checkpoint that has an optimizer step; None: there is none."""
        self._saved_at = (base.round if base.checkpoint else -1, base.step)
        """Round and optimizer steps of the newest checkpoint, which may be still being written."""
        self._saved_name = base.checkpoint
        self._best = start.best if start.best and start.best[1] else None

    async def save_if_due(self, parked: Sequence[Group], *, last: bool) -> None:
        """Save a checkpoint if one is due at the top of a round.

        Args:
            parked: the groups of the partial-rollout buffer; a resumed run finds them there again.
            last: the run ends here: a checkpoint is always due.
        """
        every, state = self._settings.checkpoint_every, self._state
        due = last or (every > 0 and state.round % every == 0)
        if due and (state.round, state.num_steps) != self._saved_at:
            await self._save(checkpoint_name(state.round), state.version, parked)
        if last:
            await self.written()

    def evaluated(self, round: int, reward: float) -> None:
        """Keep the checkpoint of a round whose evaluation is the best so far. The untrained start is none."""
        name = checkpoint_name(round)
        is_there = name == self._saved_name or (self._folder is not None and (self._folder / name).exists())
        if is_there and round and (self._best is None or reward > self._best[0]):
            self._best = reward, round

    async def written(self) -> None:
        """Wait until the newest checkpoint is complete. Raises a CheckpointError if it cannot be written."""
        if self._writing:
            with clock.waiting(f"the checkpoint {self._writing.get_name()} to be written"):
                await self._writing

    async def save_mid_round(self, parked: Sequence[Group]) -> None:
        """Save a checkpoint unless the newest one has all optimizer steps.

        The resumed run publishes the saved weights as the version of the row, and begins the round again.
        After a step since the last publication these weights are a new version, so that tokens of the
        published one count as older.
        """
        state = self._state
        if state.num_steps != self._saved_at[1]:
            is_published = state.steps_at[state.version] == state.num_steps
            version = state.version if is_published else state.version + 1
            name = f"{checkpoint_name(state.round)}_step_{state.num_steps:06d}"
            await self._save(name, version, parked)
        await self.written()

    async def _save(self, name: str, version: int, parked: Sequence[Group]) -> None:
        state = self._state
        if self._folder is None or not isfinite(state.loss):  # what computes no loss is not worth keeping
            return
        await self.written()  # at most one is written at a time
        folder, round, num_steps = self._folder / name, state.round, state.num_steps
        start_s = clock.now()
        num_drawn = self._ledger.totals.num_drawn
        row = CheckpointRow(
            self._life,
            round,
            version,
            num_steps,
            name,
            partial_rollouts=[group.prompt.index for group in parked],
            longest=dict(self._history.longest),
            steps_at={**state.steps_at, version: num_steps},
            anchors=dict(self._parts.anchors.longest_s),
            cut_steps=state.cut_steps,
        )
        responses = dict(self._history.responses)
        async with self._placement.training(all_replicas=True):
            trainer_done = await self._parts.trainer.save(folder)
        self._saved_at, self._saved_name = (round, num_steps), name
        evaluating = self.evaluating

        async def complete() -> None:
            await trainer_done
            if evaluating:
                await asyncio.wait([evaluating])
            if responses:
                (folder / RESPONSES_FILE).write_bytes(msgspec.json.encode(responses))
            await self._journal.commit_checkpoint(row)
            self.newest = folder if num_steps else None
            await make_room(self._parts.trainer, folder, self._settings, self._best and self._best[1])
            now_s = clock.now()
            self._recorder.emit(Saved(now_s, round, str(folder), version, num_drawn, now_s - start_s))

        self._writing = self._tasks.create_task(complete(), name=name)


async def make_room(trainer: Trainer, newest: Path, settings: RunSettings, best: int | None = None) -> None:
    """Delete what a run keeps no longer, now that its newest checkpoint is complete: unfinished checkpoints,
    all but the last `keep_checkpoints` and that of the best round, the state of the optimizer of all but the
    last `keep_optimizer`, and with it the untrained start, whose model is that of the config."""
    for unfinished in newest.parent.glob("round_*.partial"):  # of a run that was killed
        if is_checkpoint(unfinished.with_suffix("")):
            shutil.rmtree(unfinished)
    found = sorted(filter(is_checkpoint, newest.parent.glob("round_*")))
    lineage = found[: found.index(newest) + 1]  # what comes after it is of a life that was rolled back
    resumable = lineage[-settings.keep_optimizer :] if settings.keep_optimizer else found
    if older := [path for path in found if path not in resumable and not path.is_symlink()]:
        await trainer.retire(older, newest)
    if settings.keep_checkpoints == 0:
        return
    kept = {*lineage[-settings.keep_checkpoints :]}
    if best is not None:
        kept.add(newest.with_name(checkpoint_name(best)))
    for path in found:
        is_start = path.name == checkpoint_name(0) and path not in resumable
        if (is_start or path not in kept) and not path.is_symlink():
            shutil.rmtree(path)


def checkpoint_name(round: int) -> str:
    return f"round_{round:06d}"


@dataclass(slots=True)
class Evaluations:
    """Evaluates held-out prompts every `eval_every` rounds, at the start and at the end of the run: before a
    round begins, or beside it. Of those beside training one runs at a time."""

    parts: RunComponents
    settings: RunSettings
    router: Router
    ledger: Ledger
    recorder: Recorder
    checkpoints: Checkpoints
    arrived: Callable[[], Awaitable[None]]
    """Waits until engines have loaded what they are loading."""
    state: RunState
    tasks: asyncio.TaskGroup
    _version: int = 0
    """Version of the newest evaluation."""

    async def run_if_due(self, round: int, *, last: bool) -> None:
        """Evaluate the published version if an evaluation is due at the top of a round."""
        every = self.settings.eval_every
        if every == 0 or not (last or round % every == 0):
            return
        await self.ended()
        await self.arrived()
        self._version = self.state.version
        if self.settings.eval_beside and not last:
            evaluation = self._evaluate(round, pin=self._version)
            self.checkpoints.evaluating = self.tasks.create_task(evaluation, name=f"evaluation {round}")
        else:
            await self._evaluate(round)

    async def ended(self) -> None:
        """Wait for the evaluation that runs beside training, if there is one."""
        if (evaluating := self.checkpoints.evaluating) and not evaluating.done():
            with clock.waiting(f"the {evaluating.get_name()} to end"):
                await asyncio.wait([evaluating])

    async def make_room(self, version: int) -> None:
        """Wait until engines may load a version: no evaluation needs one that they would give up, or that is
        on none of them yet."""
        versions = self.router.versions
        if version - self._version >= versions.num_kept or not versions.serving(self._version):
            await self.ended()

    async def _evaluate(self, round: int, pin: int | None = None) -> None:
        parts, settings, version, step = self.parts, self.settings, self._version, self.state.num_steps
        asked = (parts.held_out, settings.eval_prompts, settings.seed, round)
        samples = held_out_samples(*asked, **settings.eval_sampling, skipped=self.recorder.emit)
        for sample in samples:
            sample.pin = pin
        try:
            rewards = chain_of_rewards(parts.rewards, max_failures=parts.max_failures)
            found = await evaluate(samples, self.router, rewards)
        finally:  # also when it is interrupted
            self.ledger.totals.evaluated_tokens += sum(sample.num_tokens for sample in samples)
        if not found:  # every engine with the version has died
            return
        reward = sum(sample.reward for sample in found) / len(found)
        self.checkpoints.evaluated(round, reward)
        mean_tokens = sum(sample.num_tokens for sample in found) / len(found)
        sets = metrics_of_sets(found, settings.eval_solved_at)
        solved = solved_share(found, settings.eval_solved_at)
        what = (round, len(found), reward, mean_tokens, tuple(found), sets)
        self.recorder.emit(Evaluated(clock.now(), *what, version, step, solved))
