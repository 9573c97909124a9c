"""Checkpoints and evaluations, which stand between the rounds of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tailrace import clock
from tailrace.controller.base import Parts, RunSettings
from tailrace.controller.state import RunState
from tailrace.ledger.journal import Journal, NullJournal
from tailrace.ledger.ledger import Ledger
from tailrace.record.events import Evaluated, Recorder, Saved
from tailrace.rollout.evaluation import evaluate, held_out_samples
from tailrace.rollout.router import Router
from tailrace.types import Group


class Checkpoints:
    """Saves the trainer and marks the ledger, every `checkpoint_every` rounds and at the end of the run.

    Args:
        folder: where checkpoints go; None: none are written.
        newest: name of the checkpoint that the run was resumed from.
    """

    def __init__(
        self,
        parts: Parts,
        settings: RunSettings,
        ledger: Ledger,
        journal: Journal | NullJournal,
        recorder: Recorder,
        *,
        folder: Path | None,
        newest: str | None,
    ) -> None:
        self._parts, self._settings, self._ledger = parts, settings, ledger
        self._journal, self._recorder = journal, recorder
        self._folder, self._newest = folder, newest

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
        name = f"round_{state.round:06d}"
        due = last or (every > 0 and state.round % every == 0)
        if not self._folder or not due or name == self._newest:
            return
        folder = self._folder / name
        await self._parts.trainer.save(folder)
        await self._journal.mark(
            name,
            round=state.round,
            version=state.version,
            step=state.num_steps,
            parked=parked,
            longest=longest,
            steps_at=state.steps_at,
        )
        self._newest = name
        num_drawn = self._ledger.totals.num_drawn
        self._recorder.emit(Saved(clock.now(), state.round, str(folder), state.version, num_drawn))


class Evaluations:
    """Evaluates held-out prompts every `eval_every` rounds, at the start and at the end of the run."""

    def __init__(
        self, parts: Parts, settings: RunSettings, router: Router, ledger: Ledger, recorder: Recorder
    ) -> None:
        self._parts, self._settings, self._router = parts, settings, router
        self._ledger, self._recorder = ledger, recorder

    async def run_if_due(self, round: int, *, last: bool) -> None:
        """Evaluate if an evaluation is due at the top of a round."""
        parts, settings = self._parts, self._settings
        every = settings.eval_every
        if every == 0 or not (last or round % every == 0):
            return
        samples = held_out_samples(parts.held_out, settings.eval_prompts, settings.seed, round)
        result = await evaluate(samples, self._router, parts.rewards)
        self._ledger.totals.evaluated_tokens += result.num_tokens
        mean_tokens = result.num_tokens / len(samples)
        self._recorder.emit(Evaluated(clock.now(), round, len(samples), result.accuracy, mean_tokens))
