"""The trainer of one rank: forward and backward as samples come, one optimizer step when asked.

    accumulate:  pack -> (values ->) log-probs -> loss summed with its weights -> backward into the sum
                 (forward only, where the advantage is zero and nothing else has a gradient)
    step:        all-reduce the sums and their counts -> divide -> clip -> AdamW

What is accumulated is a sum of gradients and a count in the loss's own unit (samples or tokens). The
division happens once, at `step`, by the count of the whole step: with several ranks by the sum of
theirs, so g = sum_r n_r gbar_r / sum_r n_r and never the mean of the ranks' means. Hence streaming a
batch group by group changes no gradient, and ranks may have unequal shares, even none. A critic is
treated alike.
"""

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tailrace.algo.base import AlgorithmSettings
from tailrace.algo.ess import effective_sample_size, weight_sums
from tailrace.algo.kl import kl
from tailrace.algo.losses import token_weights, value_loss
from tailrace.algo.segments import spread
from tailrace.errors import ScheduleError
from tailrace.trainer import checkpoint
from tailrace.trainer.base import StepStats, TrainerSettings
from tailrace.trainer.checkpoint import TrainerState
from tailrace.trainer.critic import Critic, token_advantages
from tailrace.trainer.objective import objective
from tailrace.trainer.old_policy import PublishedPolicy
from tailrace.trainer.optimizer import Optimizer
from tailrace.trainer.packing import MicroBatch, fed_tokens, pack
from tailrace.trainer.policy import DTYPES, Policy
from tailrace.trainer.tally import Sums, Tally
from tailrace.trainer.threads import side_by_side
from tailrace.trainer.wire import TrainSample

WORTH_SHARING = 512
"""Tokens that are computed faster by two threads than by one."""

Gradients = Sequence[Tensor | None]


class TorchTrainer:
    """One rank. Where torch.distributed is initialised, every rank calls `step` together."""

    def __init__(
        self,
        policy: Policy,
        critic: Critic | None,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        *,
        max_tokens: int,
        source: Path,
    ) -> None:
        self._policy, self._critic = policy, critic
        self._settings, self._algorithm = settings, algorithm
        self._max_tokens = max_tokens
        self._source = source
        self._published = PublishedPolicy(policy) if algorithm.old_policy == "recomputed" else None
        self._optimizer = Optimizer(policy.parameters(), settings)
        self._tally = Tally(policy.device)
        self._waiting: list[TrainSample] = []
        """Accumulated and not computed yet."""
        self._without_gradient: list[TrainSample] = []
        """The same; of these the statistics are all that is computed."""

    @classmethod
    def from_pretrained(
        cls,
        path: Path,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        *,
        temperature: float,
        max_tokens: int,
    ) -> "TorchTrainer":
        """Train the model in a Hugging Face folder, and the critic that the algorithm may want.

        Args:
            temperature: of sampling: log-probs are of the distribution the tokens were drawn from.
            max_tokens: the limit of a completion.

        Raises:
            ConfigError: the architecture cannot run packed.
        """
        device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
        policy = Policy.load(path, temperature=temperature, device=device, dtype=dtype)
        critic = Critic.load(path, settings, dtype) if algorithm.advantage == "gae" else None
        return cls(policy, critic, settings, algorithm, max_tokens=max_tokens, source=path)

    def accumulate(self, units: Sequence[Sequence[TrainSample]], *, threads: int = 1) -> None:
        """Add the units' gradients to the sum; the weights stay as they are.

        Units wait until together they are worth a pass, at most until the step. That is a matter of their
        order alone: the same units in the same order give the same bits, however many calls brought them,
        where the same number of threads, each with a part of the samples, computed them.
        """
        for unit in units:
            self._tally.count(unit)
            for sample in unit:
                (self._waiting if self._teaches(sample) else self._without_gradient).append(sample)
            self._pass(self._settings.least_tokens * threads, threads)

    def step(self, *, threads: int = 1) -> StepStats:
        """Divide the sum by its count, clip it, and let the optimizer step once; a gradient that is not
        finite is left out.

        Returns:
            What the step did; `samples` and `compute_s` are this rank's own, all else is of all ranks.

        Raises:
            ScheduleError: nothing was accumulated since the last step.
        """
        self._pass(threads=threads)
        started = time.perf_counter()
        tally, self._tally = self._tally, Tally(self._policy.device)
        if dist.is_initialized():
            for optimizer in self._optimizers():
                dist.all_reduce(optimizer.gradient)
            tally.all_reduce()
        totals = tally.totals()
        if totals.num_samples == 0:
            raise ScheduleError("step: nothing was accumulated since the last one; accumulate a group first")
        by_token = self._algorithm.normalize == "token_mean"
        count = max(1, int(totals.sums.counted) if by_token else totals.num_samples)
        if self._published:
            self._published.keep()
        norms = [optimizer.step(count) for optimizer in self._optimizers()]
        self._synchronize()
        num_tokens = max(1, totals.num_tokens)
        sums = totals.sums
        return StepStats(
            num_steps=self._optimizer.num_steps,
            samples=tuple(tally.samples),
            num_tokens=totals.num_tokens,
            compute_s=tally.compute_s + time.perf_counter() - started,
            loss=sums.loss / count,
            grad_norm=norms[0],
            learning_rate=self._optimizer.learning_rate,
            entropy=sums.entropy / num_tokens,
            clip_ratio=sums.clipped / num_tokens,
            kl=sums.kl / num_tokens,
            ess=effective_sample_size(sums.weights, sums.squares, totals.num_tokens),
            reference_kl=sums.reference_kl / num_tokens,
            value_loss=sums.value_loss / count,
            skipped=not all(map(math.isfinite, norms)),
            num_micro_batches=totals.num_micro_batches,
        )

    @torch.no_grad()
    def ess(self, units: Sequence[Sequence[TrainSample]]) -> float:
        """Effective sample size of the units' tokens under the current weights (algo/ess.py).

        The pass counts as compute of the step it guards. Each rank answers for its own units.
        """
        started = time.perf_counter()
        weights = squares = 0.0
        num_tokens = 0
        for samples in pack([sample for unit in units for sample in unit], self._settings.token_budget):
            batch = MicroBatch.of(samples, self._policy.device)
            sums = weight_sums(self._policy.logprobs(batch).logprobs, batch.recorded_logprobs)
            weights, squares = weights + float(sums.weights), squares + float(sums.squares)
            num_tokens += len(batch.targets)
        self._tally.compute_s += time.perf_counter() - started
        return effective_sample_size(weights, squares, num_tokens)

    def state(self) -> Mapping[str, Tensor]:
        """The current weights by their Hugging Face names, tied ones once; not copies."""
        return {name: parameter.detach() for name, parameter in self._policy.parameters().items()}

    def publish(self) -> Mapping[str, Tensor]:
        """The current weights as `state`, which are from now on the published ones."""
        if self._published:
            self._pass()  # what was accumulated before has the old policy of then
            self._published.publish()
        return self.state()

    def save(self, folder: Path) -> None:
        """Write a checkpoint, whole or not at all. What is accumulated and not stepped is not in it."""
        states = {"cpu": torch.get_rng_state()}
        if self._policy.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._policy.device)
        critic = self._critic.state() if self._critic else None
        state = TrainerState(self._optimizer.state(), states, critic)
        checkpoint.write(folder, self._policy.model, state, tokenizer_from=self._source)

    def restore(self, folder: Path) -> None:
        """Go on from `save`, as if just published. What is accumulated and not stepped is forgotten.

        Raises:
            CheckpointError: torn, or of another model.
        """
        critic = self._critic.parameters() if self._critic else None
        state = checkpoint.read(folder, self._policy.model, critic=critic)
        self._optimizer.restore(state.optimizer)
        if self._critic and state.critic:
            self._critic.optimizer.restore(state.critic.optimizer)
        if self._published:
            self._published.publish()
        self._tally = Tally(self._policy.device)
        self._waiting.clear()
        self._without_gradient.clear()
        torch.set_rng_state(state.random_states["cpu"])
        if "cuda" in state.random_states and self._policy.device.type == "cuda":
            torch.cuda.set_rng_state(state.random_states["cuda"], self._policy.device)

    def _teaches(self, sample: TrainSample) -> bool:
        return sample.advantage != 0.0 or self._algorithm.learns_without_advantage

    def _pass(self, least_tokens: int = 0, threads: int = 1) -> None:
        """Forward and backward of what waits, where it has so many tokens."""
        started = time.perf_counter()
        if self._critic or self._published:  # a critic adds its own gradients, an old policy takes turns
            threads = 1
        jobs = [partial(self._learn, batch) for batch in self._batches(self._waiting, least_tokens, threads)]
        others = self._batches(self._without_gradient, least_tokens, threads)
        jobs += [partial(self._measure, batch) for batch in others]
        for gradients, sums in side_by_side(jobs, threads):
            if gradients:
                self._optimizer.add(gradients)
            self._tally.add(sums)
        self._synchronize()
        self._tally.compute_s += time.perf_counter() - started

    def _batches(self, waiting: list[TrainSample], least_tokens: int, threads: int) -> list[MicroBatch]:
        """What waits, which then waits no longer; none, if it has fewer tokens."""
        num_tokens, budget = sum(map(fed_tokens, waiting)), self._settings.token_budget
        if num_tokens < least_tokens:
            return []
        if num_tokens >= WORTH_SHARING:
            budget = min(budget, math.ceil(num_tokens / threads))
        bins = pack(waiting, budget)
        waiting.clear()
        return [MicroBatch.of(samples, self._policy.device) for samples in bins]

    def _learn(self, batch: MicroBatch) -> tuple[Gradients, Sums[Tensor]]:
        loss, sums = self._loss(batch)
        return self._optimizer.gradients(loss), sums

    @torch.no_grad()
    def _measure(self, batch: MicroBatch) -> tuple[Gradients, Sums[Tensor]]:
        """No gradients."""
        return [], self._loss(batch)[1]

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, Sums[Tensor]]:
        """Summed with its weights, and its statistics."""
        left_out = batch.carried if self._algorithm.mask_carried else torch.zeros_like(batch.carried)
        counted = (~left_out).float()
        normalize = self._algorithm.normalize
        weights = token_weights(counted, batch.num_tokens, normalize, max_tokens=self._max_tokens)
        advantages, critic_loss = self._judge(batch, weights)
        old_logprobs = self._published.logprobs(batch) if self._published else batch.recorded_logprobs
        logprobs, entropy = self._policy.logprobs(batch)
        current = logprobs.detach()
        if old_logprobs is None:  # the current weights are the published ones
            old_logprobs = current
        loss, clipped, reference_kl = objective(
            self._algorithm, batch, logprobs, old_logprobs, advantages, weights
        )
        sums = Sums(
            loss=loss.detach(),
            entropy=entropy.sum(),
            clipped=clipped.sum(),
            kl=kl(batch.recorded_logprobs, current, "k3").sum(),
            **weight_sums(current, batch.recorded_logprobs)._asdict(),
            counted=counted.sum(),
            reference_kl=reference_kl,
            value_loss=critic_loss,
        )
        return loss, sums

    def _judge(self, batch: MicroBatch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The advantage of each token, [C], and the critic's summed loss, its gradient being taken."""
        if self._critic is None:
            return spread(batch.advantages, batch.num_tokens), torch.zeros((), device=self._policy.device)
        values = self._critic.values(batch)
        advantages = token_advantages(values, batch, self._algorithm)
        loss = (value_loss(values, advantages + values.detach()) * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return advantages, loss.detach()

    def _optimizers(self) -> list[Optimizer]:
        """The policy's first."""
        return [self._optimizer, *([self._critic.optimizer] if self._critic else [])]

    def _synchronize(self) -> None:
        """Kernels run behind the host: a time taken before they end would be too short."""
        if self._policy.device.type == "cuda":
            torch.cuda.synchronize(self._policy.device)
