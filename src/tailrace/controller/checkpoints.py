"""What stands between the rounds of a run: checkpoints and evaluations."""

from collections.abc import Mapping
from pathlib import Path

from tailrace import clock
from tailrace.ledger.journal import Journal, Unwritten
from tailrace.ledger.ledger import Ledger
from tailrace.controller.base import Parts, RunSettings
from tailrace.record.events import Evaluated, Recorder, Saved
from tailrace.rollout.evaluation import evaluate, held_out_samples
from tailrace.rollout.router import Router
from tailrace.controller.state import RunState
from tailrace.types import Group


class Checkpoints:
    """Saves and evaluates as often as the settings say, and after the last round."""

    def __init__(
        self,
        parts: Parts,
        settings: RunSettings,
        router: Router,
        ledger: Ledger,
        journal: Journal | Unwritten,
        recorder: Recorder,
        *,
        folder: Path | None,
        base: str | None,
    ) -> None:
        """folder: where checkpoints go; none without. base: the checkpoint that the run began with."""
        self._parts, self._settings, self._router = parts, settings, router
        self._ledger, self._journal, self._recorder = ledger, journal, recorder
        self._folder, self._base = folder, base

    async def save(
        self, standing: RunState, parked: list[Group], longest: Mapping[int, int], *, last: bool
    ) -> None:
        """A checkpoint, if one is due.

        Args:
            parked: on the partial-rollout buffer, to be found there by whoever resumes.
            longest: of the run's history.
        """
        every, round = self._settings.checkpoint_every, standing.round
        name = f"round_{round:06d}"
        if not self._folder or not _due(every, round, last) or name == self._base:
            return  # a resumed run stands where it was saved
        folder = self._folder / name
        await self._parts.trainer.save(folder)
        await self._journal.mark(
            name,
            round=round,
            version=standing.version,
            step=standing.num_steps,
            parked=parked,
            longest=longest,
            steps_at=standing.steps_at,
        )
        num_drawn = self._ledger.totals.num_drawn
        self._recorder.emit(Saved(clock.now(), round, str(folder), standing.version, num_drawn))

    async def evaluate(self, round: int, *, last: bool) -> None:
        """Held-out prompts, if an evaluation is due."""
        parts, settings = self._parts, self._settings
        if not _due(settings.eval_every, round, last):
            return
        samples = held_out_samples(parts.held_out, settings.eval_prompts, settings.seed, round)
        result = await evaluate(samples, self._router, parts.rewards)
        self._ledger.totals.evaluated_tokens += result.num_tokens
        mean_tokens = result.num_tokens / len(samples)
        self._recorder.emit(Evaluated(clock.now(), round, len(samples), result.accuracy, mean_tokens))


def _due(every: int, round: int, last: bool) -> bool:
    return every > 0 and (last or round % every == 0)
