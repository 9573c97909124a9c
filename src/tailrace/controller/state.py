"""Where a run stands: which round, which publication, which optimizer step."""

from tailrace.ledger.past import Past


class RunState:
    """Goes on from where an earlier life stood."""

    def __init__(self, past: Past) -> None:
        self.round, self.version, self.num_steps = past.round, past.version, past.step
        self.steps_at = past.steps_at or {self.version: self.num_steps}
        """Optimizer steps before each publication."""
        self.version_asked, self.steps_asked = self.version, self.num_steps
        """Where the trainer will stand when it has done all that it was asked to: what it is asked next, it
        does there."""

    def ask_publication(self) -> int:
        """Its version."""
        self.version_asked += 1
        self.steps_at[self.version_asked] = self.steps_asked
        return self.version_asked

    def steps_since(self, version: int) -> int:
        """Optimizer steps between a publication and the next thing that the trainer is asked to do. A version
        older than this life knows counts as its oldest."""
        known = version if version in self.steps_at else next(iter(self.steps_at))
        return self.steps_asked - self.steps_at[known]
