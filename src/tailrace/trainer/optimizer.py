"""AdamW with a linear warm-up and clipping by the global norm, on a sum of gradients.

All gradients are views of one vector (flat.py): reducing it over ranks, dividing, taking its norm and
clipping it are one operation each, however many parameters there are.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.checkpoint import OptimizerState
from tailrace.trainer.flat import gather_gradients, num_elements


class Optimizer:
    """Owns the gradients of the parameters: `backward` adds to them, `step` consumes them."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: TrainerSettings) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._settings = settings
        self.num_steps = 0
        self._num_updates = 0
        trained = list(self._parameters.values())
        self.gradient = torch.zeros(num_elements(trained), device=trained[0].device)
        """[number of parameters]: the sum since the last step."""
        gather_gradients(trained, self.gradient)
        self._adamw = torch.optim.AdamW(
            _decayed_apart(trained, settings.weight_decay),
            lr=settings.learning_rate,
            betas=settings.betas,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Of the last step: lr * min(1, steps / warmup_steps)."""
        warmup = self._settings.warmup_steps
        return self._settings.learning_rate * (min(1.0, self.num_steps / warmup) if warmup else 1.0)

    def step(self, count: int) -> float:
        """Step on gradient / count and begin a new sum. A gradient that is not finite moves nothing:
        neither the weights nor AdamW's moments and its count, though the step is counted.

        Returns:
            The norm of gradient / count, before clipping.
        """
        self.num_steps += 1
        self.gradient.div_(count)
        norm = float(torch.linalg.vector_norm(self.gradient))
        if math.isfinite(norm):
            self._update(norm)
        self.gradient.zero_()
        return norm

    def _update(self, norm: float) -> None:
        self._num_updates += 1
        if norm > self._settings.max_grad_norm:
            self.gradient.mul_(self._settings.max_grad_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()

    def state(self) -> OptimizerState:
        """What a checkpoint needs to go on bit for bit."""
        moments = {name: self._adamw.state[p] for name, p in self._parameters.items() if self._num_updates}
        return OptimizerState(
            num_steps=self.num_steps,
            num_updates=self._num_updates,
            first_moments={name: state["exp_avg"] for name, state in moments.items()},
            second_moments={name: state["exp_avg_sq"] for name, state in moments.items()},
        )

    def restore(self, state: OptimizerState) -> None:
        """Go on from `state`, with an empty sum."""
        self.num_steps, self._num_updates = state.num_steps, state.num_updates
        self.gradient.zero_()
        self._adamw.state.clear()
        for name in state.first_moments:
            parameter = self._parameters[name]
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(state.num_updates), device=parameter.device),
                "exp_avg": state.first_moments[name].to(parameter.device),
                "exp_avg_sq": state.second_moments[name].to(parameter.device),
            }


def _decayed_apart(parameters: list[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
