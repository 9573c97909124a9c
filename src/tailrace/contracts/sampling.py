"""The [sampling] section."""

from typing import Annotated

from pydantic import Field

from tailrace.settings import Settings, Shared
from tailrace.types import Sample


class SamplingSettings(Settings):
    """How completions are sampled. Log-probs are recorded at this temperature over the whole vocabulary."""

    max_completion_tokens: int = Field(default=256, gt=0, le=2**24)
    """The longest completion, in tokens; 1 to 2^24, and less than the model's context."""
    temperature: float = Field(default=1.0, gt=0, le=1000)
    """Logits are divided by it; above 0, at most 1000. 1: off. For evaluations without noise:
    run.eval_greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: the likeliest tokens that together have this probability; above 0, at most 1.
    1: all tokens (off)."""
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    """The number of likeliest tokens that may be drawn; 0 to 2^31 - 1. 0: all tokens (off)."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Token ids, 0 or greater, that end a completion in addition to the model's end-of-text tokens. The stop
    token is the last token of the completion."""
    stop: Shared[tuple[Annotated[str, Field(min_length=1)], ...]] = ()
    """Strings, not empty, that end a completion when they appear in its text."""

    def room(self, sample: Sample) -> int:
        """Tokens that may still come in the turn of a sample in service; not above 0: none."""
        limit = (sample.sampling or self).max_completion_tokens
        return int(min(limit, sample.turn_limit)) - sample.turn_end
