"""Where prompts come from, by what the config says."""

from tailrace.data.base import DataSettings, ProceduralSettings, Prompts, Split
from tailrace.data.procedural import ProceduralPrompts, Task
from tailrace.data.rows import open_rows
from tailrace.data.tokenizer import Tokenizer


def open_prompts(settings: DataSettings, tokenizer: Tokenizer, *, seed: int, split: Split) -> Prompts:
    """The prompts of one split, in the order that the seed fixes. The splits share no prompt.

    Raises:
        ConfigError: the settings name no data that can be read.
    """
    if isinstance(settings, ProceduralSettings):
        return ProceduralPrompts(Task(settings), settings, tokenizer, seed, split)
    return open_rows(settings, tokenizer, seed=seed, split=split)
