"""What an engine is: the contract that the embedded, the remote and the simulated ones keep."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from tailrace.settings import Settings
from tailrace.types import KV, Sample
from tailrace.weights.base import Weights


class SamplingSettings(Settings):
    """How tokens are drawn. Log-probs are recorded at this temperature, over the whole vocabulary."""

    max_completion_tokens: int = Field(gt=0)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-text tokens. The token itself is the last of the completion."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion once they appear in its text."""


class EngineSettings(Settings):
    """The rollout engines."""

    kind: Literal["native"] = "native"
    replicas: int = Field(default=1, ge=1)
    """Engine processes."""
    threads: int = Field(default=1, ge=1)
    """torch threads of each."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_running: int = Field(default=128, ge=1)
    """Requests that decode together."""
    kv_tokens: int = Field(default=262_144, ge=1)
    """Room of the KV cache, in token positions. When it is full, the youngest request gives way and is
    recomputed later."""
    prefill_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens computed between two decode steps, at most; one longer prompt goes alone."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine says of itself."""

    num_running: int = 0
    num_waiting: int = 0
    kv_tokens: int = 0
    """Token positions of the cache in use."""
    num_generated: int = 0
    """Tokens produced since the start, by the engine's own count."""
    num_prefilled: int = 0
    """Positions computed for prompts and for what was resumed, preempted or recomputed."""
    num_preempted: int = 0
    """Times a request lost its place in the cache."""


class Engine(Protocol):
    """One replica that generates."""

    name: str
    slots: int
    """How many requests it serves at once."""
    open: bool
    """False while it is dead, asleep or lent."""

    async def generate(self, sample: Sample) -> None:
        """Extend the sample in place, from whatever it already has, until it ends.

        May be cancelled at any token: all tokens produced are then in the sample, and calling again, on
        any replica, goes on from them.

        Raises:
            Evicted: the engine gives the request back, tokens kept.
        """

    async def load(self, weights: Weights, *, kv: KV) -> None:
        """Take new weights between two decode steps. Nothing in flight ends; its cache is kept, or
        recomputed under the new weights."""

    def usage(self) -> Usage: ...
