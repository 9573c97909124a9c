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
        # Steps of interrupted rounds that make whole rounds: later rounds keep the numbers they have without.
        whole, cut_before = divmod(base.cut_steps, per_round) if per_round else (0, base.cut_steps)
        self.round, self.version, self.num_steps = base.round + whole, base.version, base.step
        self.steps_at = dict(base.steps_at) or {self.version: self.num_steps}
        """Optimizer steps before each of the last publications, by version."""
        self._cut_before, self._round_began_at = cut_before, self.num_steps
        self.loss, self.num_not_finite = 0.0, 0
        """Loss of the last step; steps in succession whose loss or gradient was not finite."""

    @property
    def cut_steps(self) -> int:
        """Steps made in rounds that were interrupted, the present round being one of them."""
        return self._cut_before + self.num_steps - self._round_began_at

    def has_all_steps(self, rounds: int) -> bool:
        """Whether steps of interrupted rounds replace those that are missing from as many rounds."""
        complete = self.num_steps - self.cut_steps
        return self._cut_before > 0 < complete and complete * rounds <= self.num_steps * self.round

    def end_round(self) -> None:
        """The round is complete."""
        self.round, self._round_began_at = self.round + 1, self.num_steps

    def end(self, rounds: int) -> None:
        """All rounds are complete; steps of interrupted ones count as theirs."""
        self.round, self._round_began_at, self._cut_before = rounds, self.num_steps, 0

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
