"""AdamW on a sum of gradients, with linear warm-up and clipping by the global norm.

If the model is sharded, each rank has a shard of every parameter, gradient and moment (distributed.py).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.checkpoint import OptimizerState
from tailrace.trainer.distributed import Ranks, gather, local


class Optimizer:
    """Owns the gradients of the parameters: backward passes add to them, `step` consumes them."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: TrainerSettings) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._settings = settings
        self.num_steps = 0
        self._num_updates = 0
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        matrices = [p for p in self._parameters.values() if p.ndim >= 2]
        others = [p for p in self._parameters.values() if p.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step: lr * min(1, steps / warmup_steps)."""
        warmup = self._settings.warmup_steps
        return self._settings.learning_rate * (min(1.0, self.num_steps / warmup) if warmup else 1.0)

    def gradients(self) -> list[Tensor]:
        """The sum of gradients since the last step, by parameter."""
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]

    def add_replicas(self, ranks: Ranks) -> None:
        """Add up the gradients of all replicas."""
        ranks.sum_over_replicas([local(gradient) for gradient in self.gradients()])

    def step(self, count: int) -> float:
        """Do one step on gradient / count and reset the gradient.

        A gradient that is not finite changes neither the weights nor AdamW's moments and step count; the
        step is counted.

        Returns:
            The norm of gradient / count before clipping.
        """
        self.num_steps += 1
        gradients = self.gradients()
        for gradient in gradients:
            gradient.div_(count)
        total_norm = gather(get_total_norm(gradients))
        norm = float(total_norm)
        if math.isfinite(norm):
            self._num_updates += 1
            clip_grads_with_norm_(self._parameters.values(), self._settings.max_grad_norm, total_norm)
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=False)
        return norm

    def state(self) -> OptimizerState:
        """Everything that a checkpoint needs to continue bit for bit."""
        return OptimizerState(
            num_steps=self.num_steps,
            num_updates=self._num_updates,
            first_moments=self._moments("exp_avg"),
            second_moments=self._moments("exp_avg_sq"),
        )

    def restore(self, state: OptimizerState) -> None:
        """Continue from `state`, with a gradient of zero. Its moments become those of this optimizer."""
        self.num_steps, self._num_updates = state.num_steps, state.num_updates
        self._adamw.zero_grad(set_to_none=False)
        self._adamw.state.clear()
        if not state.num_updates:
            return
        for name, parameter in self._parameters.items():
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(state.num_updates), device=parameter.device),
                "exp_avg": state.first_moments[name],
                "exp_avg_sq": state.second_moments[name],
            }

    def _moments(self, which: str) -> dict[str, Tensor]:
        """By parameter name; empty before the first update."""
        state = self._adamw.state
        return {name: state[p][which] for name, p in self._parameters.items() if p in state}
