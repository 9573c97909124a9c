"""From rows of the data to groups of new samples."""

from tailrace import clock
from tailrace.controller.base import RunSettings
from tailrace.data.base import Prompts
from tailrace.errors import BadRow, ConfigError
from tailrace.ledger.ledger import Ledger
from tailrace.record.events import Recorder, RowSkipped
from tailrace.types import Group, Prompt, Sample, SampleId, noise_seed

MAX_CONSECUTIVE_BAD_ROWS = 10_000
"""A row without a usable prompt is skipped and counted. This many in succession end the run."""


class PromptSource:
    """Draws each row of the data once, in order. The ledger counts the rows drawn."""

    def __init__(self, prompts: Prompts, settings: RunSettings, ledger: Ledger, recorder: Recorder) -> None:
        self._prompts, self._settings, self._ledger, self._recorder = prompts, settings, ledger, recorder

    def group(self, num_samples: int, round: int) -> Group:
        """A group of the next prompt.

        Raises:
            ConfigError: the data has no usable row left.
        """
        group = Group(self._next_prompt(), self._settings.group_size, [], num_samples, round_drawn=round)
        group.samples = self.samples(group, num_samples)
        self._ledger.draw(group)
        return group

    def samples(self, group: Group, n: int) -> list[Sample]:
        """New samples for the current attempt of a group."""
        ids = [SampleId(group.prompt.index, group.attempt, number) for number in range(n)]
        return [Sample(id, group, seed=noise_seed(self._settings.seed, id)) for id in ids]

    def _next_prompt(self) -> Prompt:
        for _ in range(MAX_CONSECUTIVE_BAD_ROWS):
            index = self._ledger.totals.num_drawn
            try:
                return self._prompts[index]
            except BadRow as bad:
                self._ledger.skip()
                self._recorder.emit(RowSkipped(clock.now(), index, bad.reason))
                reason = bad.reason
        problem = f"{MAX_CONSECUTIVE_BAD_ROWS} rows in succession have no usable prompt"
        raise ConfigError("data", reason, problem, "check the data")
