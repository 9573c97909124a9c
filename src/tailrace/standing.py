"""Where a run stands: which round, which publication, which optimizer step."""

from tailrace.ledger.past import Past


class Standing:
    """Goes on from where an earlier life stood."""

    def __init__(self, past: Past) -> None:
        self.round, self.version, self.num_steps = past.round, past.version, past.step
        self.steps_at = past.steps_at or {self.version: self.num_steps}
        """Optimizer steps before each publication."""

    def publish(self) -> None:
        """The weights of this step are a new version."""
        self.version += 1
        self.steps_at[self.version] = self.num_steps

    def steps_since(self, version: int) -> int:
        """Optimizer steps since it was published. What is older than this life knows counts as its oldest."""
        known = version if version in self.steps_at else next(iter(self.steps_at))
        return self.num_steps - self.steps_at[known]
