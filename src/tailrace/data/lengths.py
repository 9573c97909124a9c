"""Checks of configured lengths against the context of the model."""

from tailrace.errors import ConfigError


def check_lengths(
    *, max_context_tokens: int, max_completion_tokens: int, max_prompt_tokens: int | None = None
) -> None:
    """Check that prompts and completions of the configured lengths can fit the model's context at all.

    Args:
        max_context_tokens: positions of the model, prompt and completion together.
        max_completion_tokens: `sampling.max_completion_tokens`.
        max_prompt_tokens: `data.max_prompt_tokens`.

    Raises:
        ConfigError: a completion, or a prompt, of the configured length fills the context alone.
    """
    remedy = f"choose at most {max_context_tokens - 1}, or a model with a longer context"
    for key, tokens in (
        ("sampling.max_completion_tokens", max_completion_tokens),
        ("data.max_prompt_tokens", max_prompt_tokens),
    ):
        if tokens is not None and tokens >= max_context_tokens:
            other = "prompt" if "completion" in key else "completion"
            problem = f"the model's context is {max_context_tokens} tokens, which leaves none for the {other}"
            raise ConfigError(key, tokens, problem, remedy)
