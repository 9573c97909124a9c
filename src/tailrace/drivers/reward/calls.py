"""Arguments and results of reward functions and judges."""

from collections.abc import Mapping, Sequence

import msgspec

from tailrace.types import FinishReason, Sample

OWN_ARGUMENTS = ("prompt", "completion", "completion_ids", "finish_reason", "completion_prefix")
"""Arguments of a reward function from the sample, besides the columns of its row."""


class Call(msgspec.Struct, array_like=True):
    """The arguments of one call of a reward function."""

    prompt: str
    completion: str
    completion_ids: Sequence[int]
    finish_reason: FinishReason
    row: Mapping[str, object]
    """The columns of the data."""
    given: object = None
    """The prompt as the data give it: a string or chat messages, without one that the completion goes on
    with. None: as `prompt`."""
    source: str = ""
    """Name of the data source; empty where the data name none."""
    version: int = 0
    """Version of the policy that generated the last token."""
    messages: Sequence[Mapping[str, object]] = ()
    """The completion as chat messages, where an environment took part in it."""
    completion_prefix: str = ""
    """Beginning of the assistant's turn that the prompt already has (Prompt.opened)."""

    @classmethod
    def of(cls, sample: Sample) -> "Call":
        """Return the call that scores a finished sample, whose text is set."""
        prompt, given = sample.prompt, sample.prompt.given
        if isinstance(given, list) and given[-1].get("role") == "assistant":
            given = given[:-1]
        return cls(
            prompt.text,
            sample.text,
            sample.completion_ids,
            sample.finish_reason or "stop",
            prompt.row,
            given,
            prompt.source,
            sample.spans[-1].version if sample.spans else 0,
            sample.messages,
            prompt.opened,
        )

    @property
    def turn(self) -> str:
        """The assistant's whole turn: the beginning that the prompt has, and the completion."""
        return self.completion_prefix + self.completion

    def arguments(self) -> dict[str, object]:
        """Return the arguments by name. The sample's own win over columns of the same names."""
        return {**self.row, **{name: getattr(self, name) for name in OWN_ARGUMENTS}}


class Scores(msgspec.Struct, array_like=True):
    """Results of the reward functions for one completion."""

    reward: float
    """Weighted sum of the values."""
    metrics: dict[str, float] = {}
    """The value of each of several functions by its name, and the numbers that functions report."""
    columns: dict[str, str | float | int | None] = {}
    """Columns that functions report for the record of the sample."""


def column_of(row: Mapping[str, object], path: str) -> object:
    """Return a column, into which dots lead where it is an object. None: the row does not have it."""
    value: object = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value
