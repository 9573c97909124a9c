"""Opens the prompts that the [data] section names, and checks lengths against the context of the model."""

from tailrace.contracts.data import Prompts, Split
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.data.encoding import PromptEncoder, Tokenizer, Tools
from tailrace.drivers.data.procedural import ProceduralPrompts, Task
from tailrace.drivers.data.rows import MixedPrompts, RowPrompts
from tailrace.drivers.data.settings import DataSettings, MixtureSettings, ProceduralSettings, TasksetSettings
from tailrace.errors import ConfigError
from tailrace.extras.verifiers.taskset import TaskPrompts


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
    if isinstance(settings, MixtureSettings):
        names, weights = zip(*((source.name, source.weight) for source in settings.sources), strict=True)
        opened = [
            open_prompts(
                source, tokenizer, seed=seed, split=split, max_context_tokens=max_context_tokens, tools=tools
            )
            for source in settings.sources
        ]
        return MixedPrompts(names, opened, weights, seed)
    if isinstance(settings, TasksetSettings):
        return TaskPrompts(settings, seed, split)
    encoder = PromptEncoder(settings, tokenizer, max_context_tokens, tools)
    if isinstance(settings, ProceduralSettings):
        return ProceduralPrompts(Task(settings), settings, encoder, seed, split)
    return RowPrompts(settings, encoder, seed, split)


def check_lengths(
    sampling: SamplingSettings, *, max_context_tokens: int, max_prompt_tokens: int | None = None
) -> None:
    """Check that prompts and completions of the configured lengths can fit the model's context at all. Raises
    a ConfigError if a completion, or a prompt, of the configured length fills the context alone.
    `max_context_tokens`: positions of the model, prompt and completion together."""
    remedy = f"choose at most {max_context_tokens - 1}, or a model with a longer context"
    for key, tokens in (
        ("sampling.max_completion_tokens", sampling.max_completion_tokens),
        ("data.max_prompt_tokens", max_prompt_tokens),
    ):
        if tokens is not None and tokens >= max_context_tokens:
            other = "prompt" if "completion" in key else "completion"
            problem = f"the model's context is {max_context_tokens} tokens, which leaves none for the {other}"
            raise ConfigError(key, tokens, problem, remedy)
