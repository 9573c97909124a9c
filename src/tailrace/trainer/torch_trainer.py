"""The trainer of one rank: forward and backward as samples come, one optimizer step when asked.

    accumulate:  per unit: pack -> log-probs -> loss summed with its weights -> backward into the sum
    step:        all-reduce the sums and their counts -> divide -> clip -> AdamW

What is accumulated is a sum of gradients and a count in the loss's own unit (samples or tokens). The
division happens once, at `step`, by the count of the whole step: with several ranks by the sum of
theirs, so g = sum_r n_r gbar_r / sum_r n_r and never the mean of the ranks' means. Hence streaming a
batch group by group changes no gradient, and ranks may have unequal shares, even none.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tailrace.algo import losses
from tailrace.algo.ess import effective_sample_size
from tailrace.errors import ScheduleError
from tailrace.trainer import checkpoint
from tailrace.trainer.base import StepStats, TrainerSettings
from tailrace.trainer.optimizer import Optimizer
from tailrace.trainer.packing import MicroBatch, pack
from tailrace.trainer.policy import Policy
from tailrace.trainer.tally import Tally
from tailrace.trainer.wire import TrainSample

Loss = Callable[[Tensor, Tensor, Tensor], losses.PolicyLoss]
"""(logprobs, recorded_logprobs, advantages), [C] each."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchTrainer:
    """One rank. Where torch.distributed is initialised, every rank calls `step` together."""

    def __init__(self, policy: Policy, settings: TrainerSettings, *, source: Path) -> None:
        self._policy = policy
        self._settings = settings
        self._source = source
        self._loss = _loss_of(settings)
        self._optimizer = Optimizer(policy.parameters(), settings)
        self._tally = Tally(policy.device)

    @classmethod
    def from_pretrained(cls, path: Path, settings: TrainerSettings, *, temperature: float) -> "TorchTrainer":
        """Train the model in a Hugging Face folder.

        Args:
            temperature: of sampling: log-probs are of the distribution the tokens were drawn from.

        Raises:
            ConfigError: the architecture cannot run packed.
        """
        policy = Policy.load(
            path,
            temperature=temperature,
            device=torch.device(settings.device),
            dtype=DTYPES[settings.dtype],
        )
        return cls(policy, settings, source=path)

    def accumulate(self, units: Sequence[Sequence[TrainSample]]) -> None:
        """Add the units' gradients to the sum; the weights stay as they are.

        Micro-batches never straddle units: the same units in the same order give the same bits, however
        many calls brought them.
        """
        started = time.perf_counter()
        for unit in units:
            self._tally.count(unit)
            for samples in pack(unit, self._settings.token_budget):
                self._backward(MicroBatch.of(samples, self._policy.device))
        self._synchronize()
        self._tally.compute_s += time.perf_counter() - started

    def step(self) -> StepStats:
        """Divide the sum by its count, clip it, and let the optimizer step once.

        Returns:
            What the step did; `samples` and `compute_s` are this rank's own, all else is of all ranks.

        Raises:
            ScheduleError: nothing was accumulated since the last step.
        """
        started = time.perf_counter()
        tally, self._tally = self._tally, Tally(self._policy.device)
        if dist.is_initialized():
            dist.all_reduce(self._optimizer.gradient)
            tally.all_reduce()
        totals = tally.totals()
        if totals.num_samples == 0:
            raise ScheduleError("step: nothing was accumulated since the last one; accumulate a group first")
        sample_mean = self._settings.normalize == "sample_mean"
        count = max(1, totals.num_samples if sample_mean else totals.num_tokens)
        grad_norm = self._optimizer.step(count)
        self._synchronize()
        num_tokens = max(1, totals.num_tokens)
        return StepStats(
            num_steps=self._optimizer.num_steps,
            samples=tuple(tally.samples),
            num_tokens=totals.num_tokens,
            compute_s=tally.compute_s + time.perf_counter() - started,
            loss=totals.loss / count,
            grad_norm=grad_norm,
            learning_rate=self._optimizer.learning_rate,
            entropy=totals.entropy / num_tokens,
            clip_ratio=totals.clipped / num_tokens,
            kl=totals.kl / num_tokens,
            num_micro_batches=totals.num_micro_batches,
        )

    @torch.no_grad()
    def ess(self, units: Sequence[Sequence[TrainSample]]) -> float:
        """Effective sample size of the units' tokens under the current weights (algo/ess.py).

        The pass counts as compute of the step it guards. Each rank answers for its own units.
        """
        started = time.perf_counter()
        batches = [
            MicroBatch.of(samples, self._policy.device)
            for unit in units
            for samples in pack(unit, self._settings.token_budget)
        ]
        nothing_T = torch.zeros(0, device=self._policy.device)
        logprobs_T = torch.cat([nothing_T, *(self._policy.logprobs(batch).logprobs for batch in batches)])
        recorded_T = torch.cat([nothing_T, *(batch.recorded_logprobs for batch in batches)])
        size = effective_sample_size(logprobs_T, recorded_T)
        self._tally.compute_s += time.perf_counter() - started
        return size

    def state(self) -> Mapping[str, Tensor]:
        """The current weights by their Hugging Face names, tied ones once; not copies."""
        return {name: parameter.detach() for name, parameter in self._policy.parameters().items()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint, whole or not at all. What is accumulated and not stepped is not in it."""
        states = {"cpu": torch.get_rng_state()}
        if self._policy.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._policy.device)
        state = self._optimizer.state(random_states=states)
        checkpoint.write(folder, self._policy.model, state, tokenizer_from=self._source)

    def restore(self, folder: Path) -> None:
        """Go on from `save`. What is accumulated and not stepped is forgotten.

        Raises:
            CheckpointError: torn, or of another model.
        """
        state = checkpoint.read(folder, self._policy.model)
        self._optimizer.restore(state)
        self._tally = Tally(self._policy.device)
        torch.set_rng_state(state.random_states["cpu"])
        if "cuda" in state.random_states and self._policy.device.type == "cuda":
            torch.cuda.set_rng_state(state.random_states["cuda"], self._policy.device)

    def _backward(self, batch: MicroBatch) -> None:
        logprobs, entropy = self._policy.logprobs(batch)
        per_token, clipped = self._loss(logprobs, batch.recorded_logprobs, batch.advantages)
        weights = losses.token_weights(batch.num_tokens, self._settings.normalize)
        loss = (per_token * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        kl = losses.kl_k3(logprobs.detach(), batch.recorded_logprobs)
        self._tally.add(loss=loss.detach(), entropy=entropy.sum(), clipped=clipped.sum(), kl=kl.sum())

    def _synchronize(self) -> None:
        """Kernels run behind the host: a time taken before they end would be too short."""
        if self._policy.device.type == "cuda":
            torch.cuda.synchronize(self._policy.device)


def _loss_of(settings: TrainerSettings) -> Loss:
    if settings.loss == "reinforce":
        return lambda logprobs, _, advantages: losses.reinforce(logprobs, advantages)
    return partial(losses.grpo, clip_low=settings.clip_low, clip_high=settings.clip_high)
