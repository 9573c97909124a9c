"""Checkpoints and evaluations, which stand between the rounds of a run."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path

import msgspec

from tailrace import clock
from tailrace.controller.base import Parts, RunSettings
from tailrace.controller.state import RunState
from tailrace.ledger.journal import Journal, NullJournal
from tailrace.ledger.ledger import Ledger
from tailrace.ledger.recovery import StartingPoint
from tailrace.record.events import Evaluated, Recorder, Saved
from tailrace.rollout.evaluation import evaluate, held_out_samples, metrics_of_sets
from tailrace.rollout.router import Router
from tailrace.types import Group

BEST = "best_evaluation.json"
"""In the folder of the checkpoints: the evaluation whose checkpoint is kept."""


class BestEvaluation(msgspec.Struct, frozen=True):
    round: int
    accuracy: float


class Checkpoints:
    """Saves the trainer and marks the ledger: every `checkpoint_every` rounds, at the end of the run, and at
    an interruption.

    The run goes on while a checkpoint is written. The ledger is marked when it is complete, with the state of
    the run at the moment at which the checkpoint began. So a run that is killed meanwhile resumes from the
    checkpoint before. A checkpoint that cannot be written ends the run.

    Args:
        tasks: what waits for the trainer and marks the ledger runs in this task group.
        folder: where checkpoints go; None: none are written.
        start: the checkpoint that the run was resumed from, and its round and optimizer steps.
    """

    def __init__(
        self,
        parts: Parts,
        settings: RunSettings,
        ledger: Ledger,
        journal: Journal | NullJournal,
        recorder: Recorder,
        tasks: asyncio.TaskGroup,
        *,
        folder: Path | None,
        start: StartingPoint,
    ) -> None:
        self._parts, self._settings, self._ledger = parts, settings, ledger
        self._journal, self._recorder, self._folder = journal, recorder, folder
        self._tasks = tasks
        self._writing: asyncio.Task[None] | None = None
        """Completes the newest checkpoint."""
        self.newest = folder / start.checkpoint if folder and start.checkpoint and start.step else None
        """The newest complete checkpoint that has an optimizer step; None: there is none."""
        self._saved_at = (start.round if start.checkpoint else -1, start.step)
        """Round and optimizer steps of the newest checkpoint, which may be still being written."""
        self._complete = folder / start.checkpoint if folder and start.checkpoint else None
        """The newest complete checkpoint."""
        self._best = _best_evaluation(folder, before=start.round) if folder else None

    async def save_if_due(
        self, state: RunState, parked: Sequence[Group], longest: Mapping[int, int], *, last: bool
    ) -> None:
        """Save a checkpoint if one is due at the top of a round.

        Args:
            parked: the groups of the partial-rollout buffer; a resumed run finds them there again.
            longest: the longest response of each row of the data (rollout/history.py).
            last: the run ends here: a checkpoint is always due.
        """
        every = self._settings.checkpoint_every
        due = last or (every > 0 and state.round % every == 0)
        if due and (state.round, state.num_steps) != self._saved_at:
            await self._save(name_of(state.round), state, state.version, parked, longest)
        if last:
            await self.written()

    def evaluated(self, round: int, accuracy: float) -> None:
        """Keep the checkpoint with which a round begins, unless an earlier one is as accurate."""
        if self._folder is None or self._saved_at[0] != round:
            return
        if self._best is None or accuracy > self._best.accuracy:
            self._best = BestEvaluation(round, accuracy)
            (self._folder / BEST).write_bytes(msgspec.json.encode(self._best))
            self._delete_old()

    async def written(self) -> None:
        """Wait until the newest checkpoint is complete.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._writing:
            with clock.waiting(f"the checkpoint {self._writing.get_name()} to be written"):
                await self._writing

    async def save_mid_round(
        self, state: RunState, parked: Sequence[Group], longest: Mapping[int, int]
    ) -> None:
        """Save a checkpoint unless the newest one has all optimizer steps.

        The resumed run publishes the saved weights as the version of the mark, and begins the round again.
        After a step since the last publication these weights are a new version, so that tokens of the
        published one count as older.
        """
        if state.num_steps != self._saved_at[1]:
            is_published = state.steps_at[state.version] == state.num_steps
            version = state.version if is_published else state.version + 1
            name = f"{name_of(state.round)}_step_{state.num_steps:06d}"
            await self._save(name, state, version, parked, longest)
        await self.written()

    async def _save(
        self, name: str, state: RunState, version: int, parked: Sequence[Group], longest: Mapping[int, int]
    ) -> None:
        if self._folder is None or not isfinite(state.loss):  # what computes no loss is not worth keeping
            return
        await self.written()  # at most one is written at a time
        folder, round, num_steps = self._folder / name, state.round, state.num_steps
        num_drawn = self._ledger.totals.num_drawn
        mark = partial(
            self._journal.mark,
            name,
            round=round,
            version=version,
            step=num_steps,
            parked=list(parked),
            longest=dict(longest),
            steps_at={**state.steps_at, version: num_steps},
            anchors=dict(self._parts.anchors.longest_s),
            cut_steps=state.cut_steps,
        )
        trainer_done = await self._parts.trainer.save(folder)
        self._saved_at = (round, num_steps)

        async def complete() -> None:
            await trainer_done
            await mark()
            self.newest, self._complete = folder if num_steps else None, folder
            for unfinished in folder.parent.glob("round_*.partial"):  # of a run that was killed
                shutil.rmtree(unfinished)
            self._delete_old()
            self._recorder.emit(Saved(clock.now(), round, str(folder), version, num_drawn))

        self._writing = self._tasks.create_task(complete(), name=name)

    def _delete_old(self) -> None:
        if self._folder is None or not (keep := self._settings.keep_checkpoints):
            return
        best = name_of(self._best.round) if self._best else None
        others = sorted(
            path
            for path in self._folder.glob("round_*")
            if not path.suffix and path.name != best and path != self._complete
        )
        for old in others[: max(0, len(others) - keep + 1)]:
            shutil.rmtree(old)


def name_of(round: int) -> str:
    """The folder of the checkpoint with which a round begins."""
    return f"round_{round:06d}"


def _best_evaluation(folder: Path, *, before: int) -> BestEvaluation | None:
    """Of the rounds before one, and of that one; later rounds were undone."""
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        best = msgspec.json.decode((folder / BEST).read_bytes(), type=BestEvaluation)
        return best if best.round <= before else None
    return None


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Evaluates held-out prompts every `eval_every` rounds, at the start and at the end of the run."""

    parts: Parts
    settings: RunSettings
    router: Router
    ledger: Ledger
    recorder: Recorder
    checkpoints: Checkpoints

    async def run_if_due(self, round: int, *, last: bool) -> None:
        """Evaluate if an evaluation is due at the top of a round."""
        parts, settings = self.parts, self.settings
        every = settings.eval_every
        if every == 0 or not (last or round % every == 0):
            return
        samples = held_out_samples(
            parts.held_out,
            settings.eval_prompts,
            settings.seed,
            round,
            greedy=settings.eval_greedy,
            temperature=settings.eval_temperature,
            per_prompt=settings.eval_samples,
        )
        try:
            result = await evaluate(samples, self.router, parts.rewards)
        finally:  # also when it is interrupted
            self.ledger.totals.evaluated_tokens += sum(sample.num_tokens for sample in samples)
        self.checkpoints.evaluated(round, result.accuracy)
        mean_tokens = result.num_tokens / len(samples)
        sets = metrics_of_sets(result.samples, settings.eval_solved_at)
        self.recorder.emit(
            Evaluated(clock.now(), round, len(samples), result.accuracy, mean_tokens, result.samples, sets)
        )
