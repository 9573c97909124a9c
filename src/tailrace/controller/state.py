"""Progress of a run: round, published version, optimizer steps."""

from tailrace.ledger.recovery import StartingPoint


class RunState:
    """Starts where the last checkpoint of the run was saved."""

    def __init__(self, starting_point: StartingPoint) -> None:
        self.round, self.version, self.num_steps = (
            starting_point.round,
            starting_point.version,
            starting_point.step,
        )
        self.steps_at = starting_point.steps_at or {self.version: self.num_steps}
        """Optimizer steps before each publication, by version."""

    def publish(self, version: int) -> None:
        """The trainer has written the weights of a version."""
        self.version = version
        self.steps_at[version] = self.num_steps

    def lag(self, version: int) -> int:
        """Optimizer steps since a version was published (PipelineRL 2.2).

        A version older than the first one known counts as the first one known.
        """
        known = version if version in self.steps_at else next(iter(self.steps_at))
        return self.num_steps - self.steps_at[known]
