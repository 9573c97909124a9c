"""PromptSource: from numbered rows of the data to groups of fresh samples."""

from tailrace import clock
from tailrace.data.base import Prompts
from tailrace.errors import BadRow, ConfigError
from tailrace.ledger.ledger import Ledger
from tailrace.controller.base import RunSettings
from tailrace.record.events import Recorder, RowSkipped
from tailrace.types import Group, Prompt, Sample, SampleId, noise_seed

MAX_SKIPPED_IN_A_ROW = 10_000
"""Rows without a usable prompt are skipped and counted; so many together are no accident."""


class PromptSource:
    """Draws each row once, in order; the ledger knows how many were."""

    def __init__(self, prompts: Prompts, settings: RunSettings, ledger: Ledger, recorder: Recorder) -> None:
        self._prompts, self._settings, self._ledger, self._recorder = prompts, settings, ledger, recorder

    def group(self, num_samples: int, round: int) -> Group:
        """A group of the next prompt.

        Raises:
            ConfigError: the data has no more usable rows.
        """
        group = Group(self._next_prompt(), self._settings.group_size, [], num_samples, round_drawn=round)
        group.samples = self.samples(group, num_samples)
        self._ledger.draw(group)
        return group

    def samples(self, group: Group, n: int) -> list[Sample]:
        """Fresh ones for the group's present attempt."""
        ids = [SampleId(group.prompt.index, group.attempt, number) for number in range(n)]
        return [Sample(id, group, seed=noise_seed(self._settings.seed, id)) for id in ids]

    def _next_prompt(self) -> Prompt:
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            index = self._ledger.totals.num_drawn
            try:
                return self._prompts[index]
            except BadRow as bad:
                self._ledger.skip()
                self._recorder.emit(RowSkipped(clock.now(), index, bad.reason))
                reason = bad.reason
        raise ConfigError(
            "data", reason, f"{MAX_SKIPPED_IN_A_ROW} rows in a row have no usable prompt", "check the data"
        )
