"""Progress of a run: round, published version, optimizer steps."""

from math import isfinite

from tailrace.contracts.trainer import StepStats
from tailrace.ledger.recovery import StartingPoint

KNOWN_VERSIONS = 1000
"""The versions whose lag is known exactly; checkpoints save a number for each."""


class RunState:
    """Starts where the last checkpoint of the run was saved."""

    def __init__(self, starting_point: StartingPoint) -> None:
        base, per_round = starting_point.base, starting_point.steps_per_round
        # A round whose steps were all made before the interruption has ended.
        whole, cut_before = divmod(base.cut_steps, per_round) if per_round else (0, 0)
        self.round, self.version, self.num_steps = base.round + whole, base.version, base.step
        self.steps_at = dict(base.steps_at) or {self.version: self.num_steps}
        """Optimizer steps before each of the last publications, by version."""
        self._cut_before, self._round_began_at = cut_before, self.num_steps
        self._steps_per_round = per_round
        self.loss, self.num_not_finite = 0.0, 0
        """Loss of the last step; steps in succession whose loss or gradient was not finite."""

    @property
    def cut_steps(self) -> int:
        """Steps of the present round, those that were made before an interruption included."""
        return self._cut_before + self.num_steps - self._round_began_at

    @property
    def completes_round(self) -> bool:
        """Whether the present round was interrupted and has all its steps."""
        return self._cut_before > 0 and self.cut_steps == self._steps_per_round

    def end_round(self) -> None:
        """The round is complete."""
        self.round, self._round_began_at, self._cut_before = self.round + 1, self.num_steps, 0

    def stepped(self, stats: StepStats) -> None:
        """The trainer has made an optimizer step."""
        self.num_steps, self.loss = stats.num_steps, stats.loss
        is_finite = isfinite(stats.loss) and not stats.skipped
        self.num_not_finite = 0 if is_finite else self.num_not_finite + 1

    def published(self, version: int) -> None:
        """The trainer has written the weights of a version."""
        self.version = version
        self.steps_at[version] = self.num_steps
        self.steps_at.pop(version - KNOWN_VERSIONS, None)

    def lag(self, version: int) -> int:
        """Optimizer steps since a version was published (PipelineRL 2.2).

        A version older than the first one known counts as the first one known.
        """
        known = version if version in self.steps_at else next(iter(self.steps_at))
        return self.num_steps - self.steps_at[known]
