"""The trainer of one process, which may be one of several (distributed.py).

    accumulate:  forward and backward (forward_backward.py) into a sum of gradients
    step:        add the sums of the replicas and their counts -> divide -> clip -> AdamW

The gradient is a sum, and its count is in the unit of the loss (samples or tokens). It is divided once, at
`step`, by the count of the whole step; with several replicas by the sum of their counts: g = sum_r n_r
gbar_r / sum_r n_r, never the mean of the replicas' means. Streaming a batch group by group therefore does not
change the gradient, and replicas may have unequal shares or none. A critic is treated alike.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import StepStats, TrainerSettings
from tailrace.contracts.weights import DTYPE
from tailrace.devices import used_on
from tailrace.drivers.models.causal_lm import as_in_files
from tailrace.drivers.trainer import checkpoint
from tailrace.drivers.trainer.batch import AdamStep, LossDatum, LossOutput, TokenLoss, TrainingSample
from tailrace.drivers.trainer.checkpoint import prefixed, section
from tailrace.drivers.trainer.critic import Critic
from tailrace.drivers.trainer.distributed import Ranks, gather
from tailrace.drivers.trainer.forward_backward import ForwardBackward, PublishedPolicy, StepStatistics
from tailrace.drivers.trainer.losses import effective_sample_size, weight_sums
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.offload import Offloaded
from tailrace.drivers.trainer.optimizer import Optimizer
from tailrace.drivers.trainer.packing import take_full
from tailrace.errors import ScheduleError
from tailrace.model_folder import draft_tensors


class TorchTrainer:
    """One process. All ranks of a replica make the same calls in the same order. Replicas
    make the same calls, but for `accumulate`."""

    def __init__(
        self,
        path: Path,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        sampling: SamplingSettings,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        """Load a Hugging Face folder, and a critic of it if the algorithm needs one. Log-probs are those at
        the sampling temperature. Without `ranks` this process is alone. Raises as `PolicyModel.load`."""
        self._settings, self._algorithm = settings, algorithm
        self._ranks = ranks = ranks or Ranks()
        torch.manual_seed(0)  # of a critic's head, and of the random state that checkpoints keep
        self._policy = policy = PolicyModel.load(path, settings, sampling.temperature, ranks)
        if ranks.rank == 0:
            checkpoint.try_export(policy, path)
        self._base = path, draft_tensors(path) if ranks.rank == 0 else {}
        self._critic = Critic(path, settings, ranks, policy.packing) if algorithm.advantage == "gae" else None
        self._published = PublishedPolicy(policy) if algorithm.old_policy == "recomputed" else None
        self._forward_backward = ForwardBackward(policy, self._critic, self._published, algorithm, sampling)
        self._optimizer = Optimizer(policy.parameters(), settings)
        self._statistics = StepStatistics(policy.device, ranks)
        self._parts = {part: Offloaded(place) for part, place in settings.offload.places().items()}
        self._asleep = False
        self._waiting: list[TrainingSample] = []
        """Accumulated samples that are not computed yet."""
        self._weights_published = True
        """Whether the current weights are those of the last publication. The engines start with them."""

    def accumulate(self, units: Sequence[Sequence[TrainingSample]]) -> None:
        """Add the gradients of units to their sum, as `base.Trainer.accumulate`.

        Units wait until together they fill micro-batches (`take_full`), at most until the step.
        """
        self._check_awake("accumulate", "weights")
        least = self._settings.least_tokens() * self._ranks.num_shards
        for unit in units:
            self._statistics.add_unit(unit)
            full, self._waiting = take_full(
                [*self._waiting, *unit], least, self._settings.max_tokens_per_microbatch, self._policy.packing
            )
            self._compute(full)

    def run_tokens(
        self, data: Sequence[LossDatum], loss: TokenLoss, *, with_gradient: bool
    ) -> list[LossOutput]:
        """Run a loss over single tokens. The gradients are part of the next `step_sum`."""
        self._check_awake("run_tokens", "weights")
        with self._parts["gradients"].added_to(self._optimizer.parameters):
            return self._forward_backward.run_tokens(
                data, loss, with_gradient=with_gradient, share_prompts=self._ranks.num_shards == 1
            )

    def step_sum(self, adam: AdamStep) -> float:
        """Step on the sum of the gradients of `run_tokens`, as Tinker's `optim_step`. Returns the norm of the
        sum before clipping."""
        self._check_awake("step_sum", *self._parts)
        self._optimizer.add_replicas(self._ranks)
        self._weights_published = False
        return self._optimizer.step(1, adam)

    def step(self) -> StepStats:
        """Step as `base.Trainer.step`. `samples`, `compute_s` and `gpu` are those of this process. Raises a
        ScheduleError if nothing was accumulated since the last step, or the trainer is asleep."""
        self._check_awake("step", *self._parts)
        self._compute_waiting()
        started = time.perf_counter()
        statistics, self._statistics = self._statistics, StepStatistics(self._policy.device, self._ranks)
        for optimizer in self._optimizers():
            optimizer.add_replicas(self._ranks)
        statistics.add_others()
        totals = statistics.totals()
        if totals.num_samples == 0:
            raise ScheduleError("step: nothing was accumulated since the last one; accumulate a group first")
        by_token = self._algorithm.normalize == "token_mean"
        count = max(1, totals.num_tokens if by_token else totals.num_samples)
        if self._published:
            self._published.keep()
        norms = [optimizer.step(count) for optimizer in self._optimizers()]
        self._weights_published = False
        self._policy.synchronize()
        sums, num_tokens = totals.sums, max(1, totals.num_tokens)
        mismatch_tokens = sums.engine_mismatch_tokens
        return StepStats(
            num_steps=self._optimizer.num_steps,
            samples=tuple(statistics.samples),
            num_tokens=totals.num_tokens,
            compute_s=statistics.compute_s + time.perf_counter() - started,
            loss=sums.loss / count,
            grad_norm=norms[0],
            learning_rate=self._optimizer.learning_rate,
            entropy=sums.entropy / num_tokens,
            clip_ratio=sums.clipped / num_tokens,
            kl=sums.kl / num_tokens,
            engine_mismatch_kl=sums.engine_mismatch_kl / mismatch_tokens if mismatch_tokens else None,
            ess=effective_sample_size(sums.weights, sums.squares, totals.num_tokens),
            reference_kl=sums.reference_kl / num_tokens,
            value_loss=sums.value_loss / count,
            skipped=not all(map(math.isfinite, norms)),
            num_micro_batches=totals.num_micro_batches,
            gpu=used_on(self._policy.device),
        )

    @torch.no_grad()
    def ess(self, units: Sequence[Sequence[TrainingSample]]) -> float:
        """Compute the effective sample size of the units' tokens in the loss under the current weights.

        Its time counts as compute of the step that it guards. Each replica answers for its own units.
        """
        self._check_awake("ess", "weights")
        started = time.perf_counter()
        totals = torch.zeros(3, dtype=torch.float64, device=self._policy.device)
        samples = list(chain.from_iterable(units))
        for batch in self._policy.own_micro_batches(samples):
            counted = (~batch.masked).double()
            sums = weight_sums(self._policy.logprobs(batch).logprobs, batch.behavior_logprobs, counted)
            if not batch.is_filler:
                totals += torch.stack([*sums, counted.sum()])
        self._ranks.sum_over_shards(totals)
        weights, squares, num_tokens = totals.tolist()
        self._statistics.compute_s += time.perf_counter() - started
        return effective_sample_size(weights, squares, int(num_tokens))

    @property
    def way(self) -> str:
        """How the model computes several samples, in words."""
        return self._policy.way

    def logprobs(self, sample: TrainingSample) -> list[float]:
        """Compute the log-probs of a sample's completion tokens under the current weights."""
        return self._policy.logprobs_of([sample])[0]

    def rounded_logprobs(self, sample: TrainingSample, dtype: DTYPE) -> list[float]:
        """Compute log-probs under weights that were rounded to a type."""
        with self._policy.rounded(dtype):
            return self.logprobs(sample)

    def reference_logprobs(self, sample: TrainingSample) -> list[float]:
        """Compute log-probs without the adapter: under the model that training began with."""
        assert self._policy.adapter
        with self._policy.adapter.off():
            return self.logprobs(sample)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights to publish: the current ones with the names of Hugging Face files, tied ones
        once, or the adapter alone. All ranks of the replica must take them if they are sharded."""
        if self._settings.adapter is None:
            for name, weight in self._policy.weights():
                yield from as_in_files(self._policy.model, name, weight)
            return
        for name, parameter in self._policy.parameters().items():
            yield name, gather(parameter)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Declare the current weights the published ones, and return them as `weights`."""
        if not self._weights_published:
            self._compute_waiting()  # samples accumulated before have the old policy of then
        if self._published:
            self._published.renew()
        self._weights_published = True
        return self.weights()

    def save(self, folder: Path) -> Callable[[], None]:
        """Begin a checkpoint without the accumulated gradients. Returns what writes it, as
        `checkpoint.writing`: in a thread, or with `async_checkpoints = false` before the next call."""
        rank = self._ranks.rank
        state = {f"random.cpu.{rank}": torch.get_rng_state()}
        if self._policy.device.type == "cuda":
            state[f"random.cuda.{rank}"] = torch.cuda.get_rng_state(self._policy.device)
        state |= prefixed("policy.", self._optimizer.state())
        if self._critic:
            state |= prefixed("critic.", self._critic.optimizer.state())
            state |= prefixed("critic.weight.", self._critic.parameters())
        copied = self._settings.async_checkpoints
        return checkpoint.writing(folder, self._policy, state, *self._base, self._ranks, copied=copied)

    def restore(self, folder: Path, *, optimizer: bool = True) -> None:
        """Continue from a checkpoint, as if its weights were just published. Accumulated gradients are
        discarded. Raises as `checkpoint.read`. `optimizer`: False: AdamW begins anew."""
        parameters = self._critic.parameters() if self._critic else None
        state = checkpoint.read(folder, self._policy, parameters, self._ranks)
        begun_anew = {"counts": torch.zeros(2, dtype=torch.int64)}
        self._optimizer.restore(section("policy.", state) if optimizer else begun_anew)
        if self._critic:
            self._critic.optimizer.restore(section("critic.", state))
        if self._published:
            self._published.renew()
        self._weights_published = True
        self._statistics = StepStatistics(self._policy.device, self._ranks)
        self._waiting.clear()
        for random in section("random.cpu.", state).values():
            torch.set_rng_state(random)
        for random in section("random.cuda.", state).values() if self._policy.device.type == "cuda" else ():
            torch.cuda.set_rng_state(random, self._policy.device)

    def sleep(self) -> None:
        """Move the parts of the state to their places (`OffloadSettings`). All values stay as they are."""
        self._asleep = True
        for name, part in self._parts.items():
            part.leave(self._tensors(name))

    def wake(self, *, early: bool = False) -> None:
        """Take the parts back. `early`: only those that `accumulate` needs (base.Trainer.wake)."""
        for name, part in self._parts.items():
            if not early or name == "weights":
                part.come_back()
        self._asleep = False

    @contextmanager
    def present(self, *parts: str) -> Iterator[None]:
        """Inside the block parts of the state are on the device, also while the trainer sleeps."""
        away = [name for name in parts if self._parts[name].is_away]
        for name in away:
            self._parts[name].come_back()
        try:
            yield
        finally:
            for name in away:
                self._parts[name].leave(self._tensors(name))

    def _tensors(self, part: str) -> Iterator[Tensor]:
        """All parameters of policy and critic, by name."""
        if part == "gradients":
            yield from chain.from_iterable(each.gradients() for each in self._optimizers())
        elif part == "optimizer":
            yield from chain.from_iterable(each.moments() for each in self._optimizers())
        else:
            yield from self._policy.model.parameters()
            yield from self._critic.parameters().values() if self._critic else ()
            yield from self._published.copies() if self._published else ()

    def _check_awake(self, verb: str, *parts: str) -> None:
        away = [name for name in parts if self._parts[name].is_away]
        if self._asleep or away:
            missing = f"; away are: {', '.join(f'trainer.offload.{name}' for name in away)}" if away else ""
            raise ScheduleError(
                f"{verb}: the trainer is asleep, because engines generate on its devices (placement.kind)"
                f"{missing}; wake it first"
            )

    def _compute_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._compute(waiting)

    def _compute(self, samples: Sequence[TrainingSample]) -> None:
        if not samples:
            return
        started = time.perf_counter()
        trained = chain.from_iterable(each.parameters for each in self._optimizers())
        with self._parts["gradients"].added_to(trained):
            for sums in self._forward_backward.run(samples, weights_published=self._weights_published):
                self._statistics.add_micro_batch(sums)
        self._policy.synchronize()
        self._statistics.compute_s += time.perf_counter() - started

    def _optimizers(self) -> list[Optimizer]:
        """The policy's first."""
        return [self._optimizer, *([self._critic.optimizer] if self._critic else [])]
