"""What data is to a run: prompts by number, in an order fixed by the seed."""

from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from tailrace.settings import Settings
from tailrace.types import Prompt


class TermsSettings(Settings):
    """A long-tailed difficulty: a clipped lognormal number of steps a prompt."""

    median: float = Field(gt=0)
    sigma: float = Field(ge=0)
    minimum: int = Field(ge=1)
    maximum: int = Field(ge=1)


class ProceduralSettings(Settings):
    """A reasoning-gym task: endless prompts that bring their own scorer."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    params: dict[str, int | float | str | bool] = {}
    """Of the task's own config."""
    lengths: dict[str, TermsSettings] = {}
    """Task parameters drawn anew for every prompt, for tasks that have `min_X` and `max_X`:
    key `terms` draws a number and sets both `min_terms` and `max_terms` to it."""
    template: str = "{question}"
    """What the model reads."""
    size: int | None = Field(default=None, ge=2)
    """So many prompts, which come again in a new order every epoch; None: endless ones, each once."""
    answer: str | None = None
    """Regular expression whose last match's last group is the answer; None: the whole completion."""


class RowsSettings(Settings):
    """Rows: a JSONL file, a parquet file, or a Hugging Face dataset folder."""

    kind: Literal["rows"] = "rows"
    path: Path
    """A JSONL file, a parquet file, or a Hugging Face dataset folder."""
    prompt_column: str = "prompt"
    """A string, or a list of chat messages."""
    split: str = "train"
    """Of a dataset folder."""
    eval_path: Path | None = None
    """Held-out rows. None: one different prompt in sixteen of `path` is held out."""
    eval_split: str = "test"
    """Of `eval_path`, where that is a dataset folder."""


Split = Literal["train", "eval"]
"""No prompt is in both, whatever the seed."""

DataSettings = Annotated[ProceduralSettings | RowsSettings, Field(discriminator="kind")]


class Prompts(Protocol):
    """An endless, seeded order of prompts. It has no state, so the cursor of a run is one number."""

    def __getitem__(self, index: int) -> Prompt:
        """The index-th prompt of the run: the same at every call, in every process.

        Raises:
            BadRow: the row has no usable prompt.
        """
