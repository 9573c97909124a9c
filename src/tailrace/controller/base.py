"""What a run is made of: its settings, and the parts it is wired from."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from tailrace.data.base import Prompts
from tailrace.engine.base import Engine
from tailrace.reward.base import Rewards
from tailrace.settings import Settings
from tailrace.trainer.base import Reference, Trainer


class RunSettings(Settings):
    """How long a run is, and what it does between rounds."""

    rounds: int = Field(ge=1)
    group_size: int = Field(ge=1)
    """K: samples of one prompt."""
    seed: int = 0
    eval_every: int = Field(default=0, ge=0)
    """Rounds between evaluations, which also stand at the start and at the end; 0: none."""
    eval_prompts: int = Field(default=128, ge=1)
    """Held-out prompts, one sample each, at the sampling temperature."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Rounds between checkpoints, the last round always among them; 0: none."""
    patience_s: float = Field(default=300.0, gt=0)
    """So long without an optimizer step, and the run says who waits for what."""
    give_up_s: float = Field(default=86_400.0, gt=0)
    """So long without an optimizer step, and the run ends with that as its error."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is wired from: live or simulated."""

    engines: Sequence[Engine]
    trainer: Trainer
    rewards: Rewards
    prompts: Prompts
    held_out: Prompts
    reference: Reference | None = None
    """Where the algorithm wants a KL to it."""
