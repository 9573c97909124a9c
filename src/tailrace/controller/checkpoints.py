"""Checkpoints and evaluations, which stand between the rounds of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace import clock
from tailrace.controller.base import Parts, RunSettings
from tailrace.controller.state import RunState
from tailrace.ledger.journal import Journal, NullJournal
from tailrace.ledger.ledger import Ledger
from tailrace.record.events import Evaluated, Recorder, Saved
from tailrace.rollout.evaluation import evaluate, held_out_samples
from tailrace.rollout.router import Router
from tailrace.trainer.base import Trainer
from tailrace.types import Group


@dataclass(slots=True)
class Checkpoints:
    """Saves the trainer and marks the ledger, every `every` rounds and at the end of the run."""

    trainer: Trainer
    every: int
    ledger: Ledger
    journal: Journal | NullJournal
    recorder: Recorder
    folder: Path | None
    """Where checkpoints go; None: none are written."""
    newest: str | None
    """Name of the newest checkpoint."""

    async def save_if_due(
        self, state: RunState, parked: Sequence[Group], longest: Mapping[int, int], *, last: bool
    ) -> None:
        """Save a checkpoint if one is due at the top of a round.

        Args:
            parked: the groups of the partial-rollout buffer; a resumed run finds them there again.
            longest: the longest response of each row of the data (rollout/history.py).
            last: the run ends here: a checkpoint is always due.
        """
        name = f"round_{state.round:06d}"
        due = last or (self.every > 0 and state.round % self.every == 0)
        if not self.folder or not due or name == self.newest:
            return
        folder = self.folder / name
        await self.trainer.save(folder)
        await self.journal.mark(
            name,
            round=state.round,
            version=state.version,
            step=state.num_steps,
            parked=parked,
            longest=longest,
            steps_at=state.steps_at,
        )
        self.newest = name
        num_drawn = self.ledger.totals.num_drawn
        self.recorder.emit(Saved(clock.now(), state.round, str(folder), state.version, num_drawn))


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Evaluates held-out prompts every `eval_every` rounds, at the start and at the end of the run."""

    parts: Parts
    settings: RunSettings
    router: Router
    ledger: Ledger
    recorder: Recorder

    async def run_if_due(self, round: int, *, last: bool) -> None:
        """Evaluate if an evaluation is due at the top of a round."""
        parts, settings = self.parts, self.settings
        every = settings.eval_every
        if every == 0 or not (last or round % every == 0):
            return
        samples = held_out_samples(parts.held_out, settings.eval_prompts, settings.seed, round)
        result = await evaluate(samples, self.router, parts.rewards)
        self.ledger.totals.evaluated_tokens += result.num_tokens
        mean_tokens = result.num_tokens / len(samples)
        self.recorder.emit(Evaluated(clock.now(), round, len(samples), result.accuracy, mean_tokens))
