"""The contracts of a trainer and of a reference model, and the settings of both.

A trainer has two verbs, `accumulate` and `step`, so that a schedule decides when the optimizer steps.
"""

import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from tailrace.contracts.weights import Weights
from tailrace.settings import CHOSEN, Resumable, Settings, Shared
from tailrace.types import Sample, SampleId

MAX_TOKENS = 2**31 - 1
"""Packed sequences are delimited by 32-bit offsets."""
FILE_BYTES = 2**28
"""Size of a rank's file of a checkpoint, about."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraSettings(Settings):
    """LoRA: the weights W stay as they are, and A and B of W + (alpha / rank) B A are trained. B begins as
    zero. Needs `pip install 'tailrace[lora]'`."""

    rank: int = Field(default=16, ge=1, le=4096)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """The product of B and A is multiplied by alpha / rank."""
    target_modules: Shared[Literal["all-linear"] | tuple[Annotated[str, Field(min_length=1)], ...]] = (
        "all-linear"
    )
    """Names of the linear layers that are adapted, for example `["q_proj", "v_proj"]`. "all-linear": all of
    the text model but the output layer, routers, experts, and layers that have the names of an expert's."""
    publish: Literal["merged", "adapter"] = "merged"
    """Weights that the engines get. merged: the sum, as without LoRA; any engine. adapter: A and B, for the
    embedded engine, and for vLLM with `weights.transport = "filesystem"`."""
    versions: int = Field(default=1, ge=1, le=64)
    """Adapters that an engine keeps: the last so many versions, for schedules that pin samples to theirs
    (`trl_async`: staleness + 1)."""


Place = Literal["device", "host", "disk"]


class OffloadSettings(Settings):
    """Places of the trainer's state while engines generate on its devices (`placement.kind = "colocated"` or
    "elastic"). "device": it stays. "host": in pinned memory of the host; on a CPU it is there, and stays.
    "disk": in a file of $TMPDIR, which gives the memory of a CPU free, too."""

    weights: Place = "host"
    """The weights in float32, those of a critic, and the published ones of a recomputed old policy."""
    gradients: Place = "host"
    """The sum of gradients. Training that goes on during the rollout (elastic) adds to it where it is
    (RollPacker 5)."""
    optimizer: Place = "host"
    """AdamW's moments. Training that goes on during the rollout (elastic) does not load them (RollPacker
    5)."""

    def places(self) -> dict[str, Place]:
        """The place of each part."""
        return {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}


class TrainerSettings(Settings):
    """The trainer: optimizer, micro-batches, device."""

    kind: Literal["torch", "tinker"] = "torch"
    """torch: processes of the run. tinker: the service of `engine.kind = "tinker"`, which takes from this
    section the learning rate, warm-up, betas, weight decay, gradient norm and `lora.rank`."""
    learning_rate: float = Field(default=1e-6, ge=0, le=1)
    """Learning rate of the policy. 0: the weights stay as they are."""
    critic_learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Learning rate of the algorithm's critic. Its other optimizer settings are the policy's."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from zero."""
    learning_rate_decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, to zero after `decay_steps`: transformers' schedules. So
    does the critic's."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of warm-up and decay. None: those of the run, where each round has equally many."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the first and the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's weight decay, applied to matrices, not to norms and biases."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of a larger global norm are scaled down to it."""
    max_tokens_per_microbatch: int = Field(default=16_384, ge=1, le=MAX_TOKENS, json_schema_extra=CHOSEN)
    """Prompt and completion tokens of one forward and backward pass. A longer sample is computed alone. Not
    set: the largest power of two that fits the memory, at most 1,024 on a CPU and 16,384 on a GPU."""
    min_tokens_per_microbatch: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Fewer tokens, of each rank, wait for the next groups, at most until the optimizer step. Default: 512 on
    a CPU; on CUDA 16,384, or `max_tokens_per_microbatch` if that is less."""
    threads: int = Field(default=1, ge=1, le=1024, json_schema_extra=CHOSEN)
    """CPU threads of each process of the trainer. Not set: its share of all cores where the schedule never
    trains while engines generate, and of half of them otherwise."""
    device: Shared[str] = "cpu"
    """Torch device: cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", json_schema_extra=CHOSEN)
    """Precision of forward and backward computation. Weights, gradients and optimizer states are float32.
    Not set: bfloat16 on a processor with AMX or AVX512-BF16, and on a GPU that computes it; else float32."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Shards of each replica: of weights, gradients and optimizer states (FSDP2). A shard is a process, or
    `tensor_parallel` processes."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Processes that divide each layer of a shard, and the vocabulary, by the plan that transformers has for
    the architecture. They communicate in each layer. A replica has `ranks` x `tensor_parallel` processes."""
    replicas: int = Field(default=1, ge=1, le=1024)
    """Copies of the sharded model. They divide the samples of a step and add their gradients in it."""
    activation_checkpointing: bool = False
    """Compute the activations of each block again in the backward pass, in place of keeping them, but for
    those of attention."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer states in host memory; the device holds one block at a time."""
    offload: OffloadSettings = OffloadSettings()
    async_checkpoints: bool = True
    """Train on while a checkpoint is written, from a copy of weights and optimizer states in host memory.
    false: the trainer waits, and needs no memory for the copy."""
    collective_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds that a rank waits for the others in one collective, at most. It must be more than the slowest
    rank takes for one pass, than rank 0 takes to read the model, and than a rank takes to write its part of a
    checkpoint, while the others wait."""
    restarts: Resumable[int] = Field(default=0, ge=0, le=1000)
    """How often a trainer that dies is started again while engines generate, on devices of its own. It gets
    the calls since the newest checkpoint again, whose samples are kept for that: `run.checkpoint_every`."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter in place of the weights (`[trainer.lora]`). None: all weights are trained."""

    def kept_asleep(self) -> list[str]:
        """The parts of the state that stay in the memory of the device while the trainer sleeps."""
        stay = ("device", "host") if self.device == "cpu" or self.cpu_offload else ("device",)
        return [part for part, place in self.offload.places().items() if place in stay]

    @property
    def replica_processes(self) -> int:
        """Processes of one replica."""
        return self.ranks * self.tensor_parallel

    @property
    def num_processes(self) -> int:
        """Processes of the trainer."""
        return self.replica_processes * self.replicas

    def least_tokens(self) -> int:
        """`min_tokens_per_microbatch`, or its default."""
        of_device = 512 if self.device == "cpu" else min(16_384, self.max_tokens_per_microbatch)
        return self.min_tokens_per_microbatch or of_device

    @property
    def of_service(self) -> bool:
        """Whether a service trains, which generates, too."""
        return self.kind == "tinker"

    @property
    def adapter(self) -> LoraSettings | None:
        """The adapter that is published in place of whole weights; None: whole weights are."""
        return self.lora if self.lora and self.lora.publish == "adapter" else None


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one optimizer step. Means are over the step's trained tokens unless stated otherwise."""

    num_steps: int
    """Optimizer steps so far, including this one."""
    samples: tuple[SampleId, ...]
    """The samples whose gradients were in the step."""
    num_tokens: int
    """Completion tokens of those samples, without the masked ones (`Sample.num_masked`)."""
    compute_s: float
    """Seconds of forward, backward and optimizer computation, without waiting."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """Global norm of the gradient before clipping."""
    learning_rate: float = 0.0
    entropy: float = 0.0
    """Entropy of the policy at the sampling temperature, in nats a token."""
    clip_ratio: float = 0.0
    """Share of tokens whose gradient was clipped to zero."""
    kl: float = 0.0
    """KL of the behaviour policy to the current policy, in nats a token (k3 estimator, PipelineRL 5). It
    contains the engine's numerical difference, the age of the tokens and the steps since publication."""
    engine_mismatch_kl: float | None = None
    """`kl` over those samples that were generated entirely by the weights with which they were accumulated.
    It measures only the numerical difference between engine and trainer. None if the step had no such
    samples: it has them in the first step after a publication."""
    ess: float = 1.0
    """Effective sample size of the step's tokens, from unclamped pi / mu. pi is the policy with which each
    token was accumulated."""
    reference_kl: float = 0.0
    """KL of the current policy to the reference model, in nats a token, by the algorithm's estimator."""
    value_loss: float = 0.0
    """Loss of the critic, normalised as `loss`."""
    skipped: bool = False
    """True if the gradient was not finite and the weights were left unchanged."""
    num_micro_batches: int = 0
    gpu: dict[str, float] = field(default_factory=dict)
    """Figures of the device since the last step, by name (`devices.used_on`); the largest of all ranks. Empty
    on a CPU, and where a service trains."""


class Trainer(Protocol):
    """One logical trainer of one or several ranks. It executes calls in the order in which they are made."""

    replicas: int = 1
    """Replicas, which share the units of a call."""

    async def accumulate(
        self, units: Sequence[Sequence[Sample]], *, version: int, replicas: int | None = None
    ) -> None:
        """Run forward and backward, and add the gradients to their sum. The weights do not change.

        Small units are computed together with the next units. The composition of micro-batches depends on
        the order of the units only, not on the number of calls: on a CPU in float32 the same units in the
        same order give bit-identical gradients. On CUDA they differ by rounding: the backward pass of
        attention adds in any order.

        Args:
            units: groups, or batches of shuffled samples.
            version: the published version. What is masked is in the samples (`Sample.num_masked`).
            replicas: the first so many replicas compute them; None: all. The gradients of all replicas are
                added at `step`. Replicas may have unequal shares or none.
        """

    async def step(self) -> StepStats:
        """Divide the accumulated gradient by its own number of samples or tokens, clip it, and do one
        optimizer step. A gradient that is not finite is discarded; the step is counted."""

    async def ess(self, units: Sequence[Sequence[Sample]], *, version: int) -> float:
        """Compute the effective sample size of the units' tokens under the current weights, a share in
        (0, 1]: (sum w)^2 / (N sum w^2) over N tokens, with unclamped w = pi / mu (PipelineRL 5). Costs a
        forward pass."""

    async def publish(self, version: int) -> Weights:
        """Make the current weights available to the engines as `version`."""

    async def sleep(self) -> None:
        """Move the parts of `OffloadSettings` off the devices, which engines share, and give back memory that
        is not in use. Until it wakes, `accumulate`, `step` and `ess` are a ScheduleError."""

    async def wake(self, replicas: int | None = None) -> None:
        """Take the parts back.

        Args:
            replicas: only so many, the first ones, and only to accumulate: optimizer state and gradients stay
                where they are. None: all replicas, whole.
        """

    async def save(self, folder: Path) -> Awaitable[None]:
        """Begin a checkpoint: model (a Hugging Face folder), optimizer, step count, random state.

        Returns when it has what the trainer may change from now on. At most one is written at a time. Raises
        a CheckpointError if it cannot be written. What is returned raises it, too.

        Returns:
            Waits until the checkpoint is complete and in its folder.
        """

    async def retire(self, older: Sequence[Path], newest: Path) -> None:
        """Check that the newest checkpoint reads as it was written, and then remove from older ones what only
        `restore` needs. They keep their models. Raises a CheckpointError if it is damaged, with nothing
        removed."""

    async def restore(self, folder: Path) -> None:
        """Continue from a checkpoint that `save` wrote. Raises a CheckpointError if it is damaged or belongs
        to another model."""


def is_checkpoint(path: Path) -> bool:
    """Whether a file or folder has the name of a checkpoint, which a copy of a user's own has not."""
    return re.fullmatch(r"round_\d{6,}(_step_\d{6,})?", path.name) is not None


class Reference(Protocol):
    """A frozen model to which the policy is kept close by a KL penalty."""

    async def logprobs(self, sample: Sample) -> list[float]:
        """Return the log-probs of a finished sample's tokens at the sampling temperature: [num_tokens]."""
