"""Opens the prompts that the [data] section names, and checks lengths against the context of the model."""

from collections.abc import Callable
from typing import Any, Protocol

from tailrace.contracts.data import Prompts, Split
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.data.encoding import PromptEncoder, Tokenizer, Tools
from tailrace.drivers.data.rows import MixedPrompts, RowPrompts
from tailrace.drivers.data.settings import (
    DataSettings,
    MixtureSettings,
    PromptSettings,
    RowsSettings,
)
from tailrace.errors import BadRow, ConfigError
from tailrace.kinds import kind_of
from tailrace.types import Prompt

CHECKED_ROWS = 16
"""Rows that are looked at before a run starts. A row may lack some of the columns."""
MAX_BAD_ROWS = 1000
"""Rows without a usable prompt that are skipped in the search for usable ones."""
Encoders = Callable[[PromptSettings], PromptEncoder]
"""Returns the encoder of a source's prompts."""


class DataKind(Protocol):
    """A kind of data. The settings are always those of this kind."""

    def open(self, data: Any, encoders: Encoders, seed: int, split: Split) -> Prompts:
        """Open the prompts, as `open_prompts`."""

    def scorer(self, data: Any) -> tuple[str, Callable[..., float]]:
        """Return the name of the task, and what scores a completion with the columns of its row, where the
        data bring it (PromptSettings.brings_scorer)."""


def data_kind(data: Any) -> DataKind:
    """Return the kind of the data, or of one of their sources."""
    kind: DataKind = kind_of("data", data.kind)
    return kind


def open_prompts(
    settings: DataSettings,
    tokenizer: Tokenizer,
    *,
    seed: int,
    split: Split,
    max_context_tokens: int | None = None,
    tools: Tools = (),
) -> Prompts:
    """Open the prompts of one split, in the order that the seed fixes. The splits share no prompt. Raises a
    ConfigError if the settings name no data that can be read, or no prompt of it fits.

    Args:
        max_context_tokens: positions of the model, prompt and completion together; None: unlimited. A prompt
            that leaves no room for one completion token is a BadRow.
        tools: tools of every prompt, as JSON schemas.
    """

    def encoders(source: PromptSettings) -> PromptEncoder:
        return PromptEncoder(source, tokenizer, max_context_tokens, tools)

    return data_kind(settings).open(settings, encoders, seed, split)


class RowsData:
    """`DataKind` of the rows of a file or a data set."""

    def open(self, data: RowsSettings, encoders: Encoders, seed: int, split: Split) -> Prompts:
        return RowPrompts(data, encoders(data), seed, split)


class MixtureData:
    """`DataKind` of several sources."""

    def open(self, data: MixtureSettings, encoders: Encoders, seed: int, split: Split) -> Prompts:
        names, weights = zip(*((source.name, source.weight) for source in data.sources), strict=True)
        opened = [data_kind(source).open(source, encoders, seed, split) for source in data.sources]
        return MixedPrompts(names, opened, weights, seed)


def check_lengths(settings: DataSettings, sampling: SamplingSettings, context: int) -> None:
    """Check that prompts and completions of the configured lengths can fit the model's context at all. Raises
    a ConfigError if a completion, or a prompt, of the configured length fills the context alone.
    `context`: positions of the model, prompt and completion together."""
    lengths = [("sampling.max_completion_tokens", sampling.max_completion_tokens, "prompt")]
    for source in settings.sources:
        lengths.append(("data.max_prompt_tokens", source.max_prompt_tokens or 0, "completion"))
    for key, tokens, other in lengths:
        if tokens >= context:
            problem = f"the model's context is {context} tokens, which leaves none for the {other}"
            remedy = f"choose at most {context - 1}, or a model with a longer context"
            raise ConfigError(key, tokens, problem, remedy)


def usable_prompts(prompts: Prompts, num: int) -> list[Prompt]:
    """Return the first prompts of the run's order, without rows that have no usable prompt. Raises a
    ConfigError if there is none; with the reason of the first row."""
    found: list[Prompt] = []
    bad: list[BadRow] = []
    while len(found) < num and len(bad) < MAX_BAD_ROWS:
        try:
            found.append(prompts[len(found) + len(bad)])
        except BadRow as why:
            bad.append(why)
    if not found:
        problem = f"none of the first {len(bad)} rows has a usable prompt; this is the reason of the first"
        raise ConfigError("data", str(bad[0]), problem, "check the data and the model's chat template")
    return found


def first_of_each_source(prompts: Prompts) -> list[Prompt]:
    """Return the first usable prompt of each data source among the first prompts of the run's order."""
    by_source: dict[str, Prompt] = {}
    for prompt in usable_prompts(prompts, CHECKED_ROWS):
        by_source.setdefault(prompt.source, prompt)
    return list(by_source.values())
