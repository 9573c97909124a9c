"""One request inside the engine, and its keys and values outside the cache."""

from dataclasses import dataclass, field

from torch import Tensor

from tailrace.engine.base import SamplingParams

Block = list[Tensor]
"""Keys and values of the first N positions, [K, N, D] each (suffixes as in cache.py): of the first layer, of
the second, and so on."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. While it runs, the KV cache holds all of its tokens but the last.

    Args:
        tokens: prompt and completion.
        noise_stream: of the request's seed (sampler.py).
        logprobs: of the last tokens: those that are not yet in an output.
        prompt_version: the weights that computed the cached prompt; None if they are not known.
    """

    id: str
    tokens: list[int]
    num_prompt: int
    noise_stream: int
    sampling: SamplingParams
    greedy: bool = False
    logprobs: list[float] = field(default_factory=list)
    prompt_version: int | None = None

    @property
    def num_completion(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def context(self) -> list[int]:
        """All tokens but the last, which is the input of the next decode step."""
        return self.tokens[:-1]
