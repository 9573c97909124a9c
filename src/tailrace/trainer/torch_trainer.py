"""The trainer of one rank: forward and backward as samples come, one optimizer step when asked.

    accumulate:  passes (passes.py) into the sum of gradients, helpers (helper.py) taking their part
    step:        add the helpers' sums -> all-reduce the sums and their counts -> divide -> clip -> AdamW

What is accumulated is a sum of gradients and a count in the loss's own unit (samples or tokens). The
division happens once, at `step`, by the count of the whole step: with several ranks by the sum of
theirs, so g = sum_r n_r gbar_r / sum_r n_r and never the mean of the ranks' means. Hence streaming a
batch group by group changes no gradient, and ranks may have unequal shares, even none. A critic is
treated alike.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tailrace.algo.ess import effective_sample_size, weight_sums
from tailrace.errors import ScheduleError
from tailrace.trainer import checkpoint
from tailrace.trainer.base import StepStats
from tailrace.trainer.checkpoint import TrainerState
from tailrace.trainer.flat import num_elements
from tailrace.trainer.helper import Helper
from tailrace.trainer.optimizer import Optimizer
from tailrace.trainer.packing import fed_tokens, share
from tailrace.trainer.passes import Passes
from tailrace.trainer.tally import Tally
from tailrace.trainer.wire import TrainingSample


class TorchTrainer:
    """One rank. Where torch.distributed is initialised, every rank calls `step` together."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._policy, self._critic = passes, passes.policy, passes.critic
        self._settings, self._algorithm = passes.settings, passes.algorithm
        self._optimizer = Optimizer(self._policy.parameters(), passes.settings)
        self._tally = Tally(self._policy.device)
        self._helpers: Sequence[Helper] = ()
        self._waiting: list[TrainingSample] = []
        """Accumulated and not computed yet."""
        self._without_gradient: list[TrainingSample] = []
        """The same; of these the statistics are all that is computed."""

    @property
    def num_parameters(self) -> int:
        """Of the policy."""
        return num_elements(list(self._policy.parameters().values()))

    def be_helped(self, helpers: Sequence[Helper], weights: Tensor) -> None:
        """From now on each helper takes its part of the samples when it may, and finds the weights in a
        vector, [num_parameters]. Not with a critic or recomputed old policies, which helpers lack."""
        self._helpers = helpers
        self._optimizer.move(weights)

    def accumulate(self, units: Sequence[Sequence[TrainingSample]], *, num_helpers: int = 0) -> None:
        """Add the units' gradients to the sum; the weights stay as they are.

        Units wait until together they are worth a pass, at most until the step. That is a matter of their
        order alone: the same units in the same order give the same bits, however many calls brought them.
        Where helpers take part, all that waits is computed at once: the rollout has ended, and the parts of
        one large pass take more alike than those of several.
        """
        for unit in units:
            self._tally.count(unit)
            for sample in unit:
                (self._waiting if self._passes.teaches(sample) else self._without_gradient).append(sample)
            if not num_helpers:
                self._pass(self._settings.least_tokens)
        if num_helpers:
            self._pass(num_helpers=num_helpers)

    def step(self, *, num_helpers: int = 0) -> StepStats:
        """Divide the sum by its count, clip it, and let the optimizer step once; a gradient that is not
        finite is left out.

        Returns:
            What the step did; `samples` and `compute_s` are this rank's own, all else is of all ranks.

        Raises:
            ScheduleError: nothing was accumulated since the last step.
        """
        self._pass(num_helpers=num_helpers)
        started = time.perf_counter()
        self._collect()
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
        if self._passes.published:
            self._passes.published.keep()
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
    def ess(self, units: Sequence[Sequence[TrainingSample]]) -> float:
        """Effective sample size of the units' tokens under the current weights (algo/ess.py).

        The pass counts as compute of the step it guards. Each rank answers for its own units.
        """
        started = time.perf_counter()
        weights = squares = 0.0
        num_tokens = 0
        samples = [sample for unit in units for sample in unit]
        for batch in self._policy.batches(samples, self._settings.token_budget):
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
        if self._passes.published:
            self._pass()  # what was accumulated before has the old policy of then
            self._passes.published.publish()
        return self.state()

    def save(self, folder: Path) -> None:
        """Write a checkpoint, whole or not at all. What is accumulated and not stepped is not in it."""
        states = {"cpu": torch.get_rng_state()}
        if self._policy.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._policy.device)
        critic = self._critic.state() if self._critic else None
        state = TrainerState(self._optimizer.state(), states, critic)
        checkpoint.write(folder, self._policy.model, state, tokenizer_from=self._passes.source)

    def restore(self, folder: Path) -> None:
        """Go on from `save`, as if just published. What is accumulated and not stepped is forgotten.

        Raises:
            CheckpointError: torn, or of another model.
        """
        self._collect()
        critic = self._critic.parameters() if self._critic else None
        state = checkpoint.read(folder, self._policy.model, critic=critic)
        self._optimizer.restore(state.optimizer)
        if self._critic and state.critic:
            self._critic.optimizer.restore(state.critic.optimizer)
        if self._passes.published:
            self._passes.published.publish()
        self._tally = Tally(self._policy.device)
        self._waiting.clear()
        self._without_gradient.clear()
        torch.set_rng_state(state.random_states["cpu"])
        if "cuda" in state.random_states and self._policy.device.type == "cuda":
            torch.cuda.set_rng_state(state.random_states["cuda"], self._policy.device)

    def _pass(self, least_tokens: int = 0, num_helpers: int = 0) -> None:
        """Compute what waits, where it has so many tokens."""
        started = time.perf_counter()
        due = [*_take(self._waiting, least_tokens), *_take(self._without_gradient, least_tokens)]
        mine, *others = share(due, 1 + min(num_helpers, len(self._helpers)), self._passes.cost)
        for helper, part in zip(self._helpers, others, strict=False):
            helper.begin(part)
        for sums in self._passes.run(mine):
            self._tally.add(sums)
        self._synchronize()
        self._tally.compute_s += time.perf_counter() - started

    def _collect(self) -> None:
        """Add what helpers computed."""
        for helper in self._helpers:
            if figures := helper.finish():
                self._tally.include(figures)
                self._optimizer.gradient += helper.gradient
                helper.gradient.zero_()

    def _optimizers(self) -> list[Optimizer]:
        """The policy's first."""
        return [self._optimizer, *([self._critic.optimizer] if self._critic else [])]

    def _synchronize(self) -> None:
        """Kernels run behind the host: a time taken before they end would be too short."""
        if self._policy.device.type == "cuda":
            torch.cuda.synchronize(self._policy.device)


def _take(waiting: list[TrainingSample], least_tokens: int) -> list[TrainingSample]:
    """What waits, which then waits no longer; nothing, if it has fewer tokens."""
    if sum(fed_tokens([sample]) for sample in waiting) < least_tokens:
        return []
    taken = list(waiting)
    waiting.clear()
    return taken
