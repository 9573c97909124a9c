"""What a trainer is: two verbs, kept apart so that schedules can choose when the optimizer steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from tailrace.settings import Settings
from tailrace.types import Sample, SampleId
from tailrace.weights.base import Weights


class TrainerSettings(Settings):
    """The trainer: its optimizer and its device."""

    learning_rate: float = Field(default=1e-6, gt=0)
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """Of the critic, where the algorithm has one; all else of its optimizer is as the policy's."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps in which the learning rate rises linearly from zero."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    token_budget: int = Field(default=16_384, ge=1)
    """Tokens, prompts included, of one micro-batch. A longer sample goes alone."""
    least_tokens: int = Field(default=512, ge=1)
    """Tokens that are worth a pass: smaller units wait for the next ones, at most until the step."""
    threads: int = Field(default=1, ge=1)
    """torch threads of the trainer process."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward computation; the weights and the optimizer are always float32."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step did. Means are over the step's trained tokens unless they say otherwise."""

    num_steps: int
    """Optimizer steps so far, this one included."""
    samples: tuple[SampleId, ...]
    """Whose gradients were in it: now, and only now, they are trained."""
    num_tokens: int
    """Completion tokens of those samples."""
    compute_s: float
    """Seconds the trainer worked for it: forward, backward, step; its own count, waits excluded."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """Before clipping."""
    learning_rate: float = 0.0
    entropy: float = 0.0
    clip_ratio: float = 0.0
    """Share of tokens whose gradient the clip removed."""
    kl: float = 0.0
    """KL of the behaviour policy to the current one, in nats a token (k3 estimator, PipelineRL 5)."""
    ess: float = 1.0
    """Effective sample size of the step's tokens, on unclamped pi/mu, each pi that of its own
    accumulation."""
    reference_kl: float = 0.0
    """KL of the current policy to the reference, in nats a token, by the algorithm's estimator."""
    value_loss: float = 0.0
    """Of the critic, in the unit of `loss`."""
    skipped: bool = False
    """A gradient was not finite, and moved nothing."""
    num_micro_batches: int = 0


class Trainer(Protocol):
    """One logical trainer, of however many ranks. It does one thing after another, in the order in which it
    is asked."""

    async def accumulate(self, units: Sequence[Sequence[Sample]], *, version: int) -> None:
        """Forward and backward; gradients are kept and the weights stay as they are.

        A unit is a whole group (or a batch of shuffled samples). Small ones are computed together with the
        next, and when they are is a matter of their order alone: the same units in the same order give the
        same gradient to the bit, however many calls brought them.
        """

    async def step(self) -> StepStats:
        """Divide what was accumulated by its own samples or tokens, clip, and step once; a gradient that is
        not finite is left out, and the step is counted all the same."""

    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        """Effective sample size of the units' tokens under the current weights, a share in (0, 1]:
        (sum w)^2 / (N sum w^2) over tokens, on unclamped w = pi/mu (PipelineRL 5). A forward pass."""

    async def publish(self, version: int) -> Weights:
        """Put the current weights where the engines can read them."""

    async def save(self, folder: Path) -> None:
        """Everything needed to go on: model (a Hugging Face folder), optimizer, steps, random state."""

    async def restore(self, folder: Path) -> None:
        """Go on from `save`.

        Raises:
            CheckpointError: torn, or of another model.
        """


class Reference(Protocol):
    """The model that the policy is held close to: frozen, and beside the trainer."""

    async def logprobs(self, sample: Sample) -> list[float]:
        """[num_tokens]: of a finished sample's tokens, at the sampling temperature."""
