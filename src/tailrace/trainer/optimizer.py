"""AdamW with a linear warm-up and clipping by the global norm, on a sum of gradients.

All gradients are views of one flat vector: reducing it over ranks, dividing, taking its norm and
clipping it are one operation each, however many parameters there are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.checkpoint import OptimizerState


class Optimizer:
    """Owns the gradients of the parameters: `backward` or `add` adds to them, `step` consumes them."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: TrainerSettings) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._settings = settings
        self.num_steps = 0
        self._num_updates = 0
        self.gradient = _flat_gradient(list(self._parameters.values()))
        """[number of parameters]: the sum since the last step."""
        self._adamw = torch.optim.AdamW(
            _decayed_apart(list(self._parameters.values()), settings.weight_decay),
            lr=settings.learning_rate,
            betas=settings.betas,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Of the last step: lr * min(1, steps / warmup_steps)."""
        warmup = self._settings.warmup_steps
        return self._settings.learning_rate * (min(1.0, self.num_steps / warmup) if warmup else 1.0)

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """Of a loss, for `add`."""
        return list(torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True))

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """To the sum."""
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            if gradient is not None:
                assert parameter.grad is not None
                parameter.grad += gradient

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


def _flat_gradient(parameters: list[Tensor]) -> Tensor:
    flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    parts = torch.split(flat, [p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def _decayed_apart(parameters: list[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
