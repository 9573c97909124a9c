"""Opens the prompts that the [data] section names."""

from tailrace.data.base import DataSettings, ProceduralSettings, Prompts, Split
from tailrace.data.encoding import PromptEncoder
from tailrace.data.procedural import ProceduralPrompts, Task
from tailrace.data.rows import RowPrompts
from tailrace.data.tokenizer import Tokenizer


def open_prompts(
    settings: DataSettings,
    tokenizer: Tokenizer,
    *,
    seed: int,
    split: Split,
    max_context_tokens: int | None = None,
) -> Prompts:
    """Open the prompts of one split, in the order that the seed fixes. The splits share no prompt.

    Args:
        max_context_tokens: positions of the model, prompt and completion together; None: unlimited. A prompt
            that leaves no room for one completion token is a BadRow.

    Raises:
        ConfigError: the settings name no data that can be read, or no prompt of it fits.
    """
    encoder = PromptEncoder(settings, tokenizer, max_context_tokens)
    if isinstance(settings, ProceduralSettings):
        return ProceduralPrompts(Task(settings), settings, encoder, seed, split)
    return RowPrompts(settings, encoder, seed, split)
