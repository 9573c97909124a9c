"""AdamW with a linear warm-up and clipping by the global norm, on a sum of gradients.

All gradients are views of one vector, and all parameters of another (flat.py): reducing the sum over ranks,
dividing it, taking its norm, clipping it and the update itself are an operation or two each, however many
parameters there are.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.checkpoint import OptimizerState
from tailrace.trainer.flat import gather_gradients, halves, move, num_elements, parts_of


class Optimizer:
    """Owns the memory of the parameters and of their gradients: `backward` adds to these, `step` consumes
    them."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: TrainerSettings) -> None:
        self._halves = halves({name: p for name, p in parameters.items() if p.requires_grad})
        self._parameters = [parameter for half in self._halves for parameter in half.values()]
        self._settings = settings
        self.num_steps = 0
        self._num_updates = 0
        self.gradient = torch.zeros(num_elements(self._parameters), device=self._parameters[0].device)
        """[number of parameters]: the sum since the last step."""
        gather_gradients(self._parameters, self.gradient)
        weights = torch.empty_like(self.gradient)
        self._wholes = [Parameter(part) for part in self._split(weights)]
        """Each half as AdamW sees it."""
        for whole, gradient in zip(self._wholes, self._split(self.gradient), strict=True):
            whole.grad = gradient
        self.move(weights)
        decays = settings.weight_decay, 0.0
        self._adamw = torch.optim.AdamW(
            [{"params": [w], "weight_decay": d} for w, d in zip(self._wholes, decays, strict=True)],
            lr=settings.learning_rate,
            betas=settings.betas,
            fused=True,
        )

    def move(self, weights: Tensor) -> None:
        """From now on the parameters are kept in this vector, [number of parameters]."""
        move(self._parameters, weights)
        for whole, part in zip(self._wholes, self._split(weights), strict=True):
            whole.data = part

    def _split(self, vector: Tensor) -> list[Tensor]:
        """What of it belongs to each half."""
        return list(torch.split(vector, [num_elements(list(half.values())) for half in self._halves]))

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
        return OptimizerState(
            num_steps=self.num_steps,
            num_updates=self._num_updates,
            first_moments=self._moments("exp_avg"),
            second_moments=self._moments("exp_avg_sq"),
        )

    def restore(self, state: OptimizerState) -> None:
        """Go on from `state`, with an empty sum."""
        self.num_steps, self._num_updates = state.num_steps, state.num_updates
        self.gradient.zero_()
        self._adamw.state.clear()
        if not state.num_updates:
            return
        for half, whole in zip(self._halves, self._wholes, strict=True):
            self._adamw.state[whole] = {
                "step": torch.tensor(float(state.num_updates), device=whole.device),
                "exp_avg": _joined(state.first_moments, half, whole.device),
                "exp_avg_sq": _joined(state.second_moments, half, whole.device),
            }

    def _moments(self, which: str) -> dict[str, Tensor]:
        """By parameter; none before the first update."""
        moments: dict[str, Tensor] = {}
        for half, whole in zip(self._halves, self._wholes, strict=True):
            if whole in self._adamw.state:
                parts = parts_of(list(half.values()), self._adamw.state[whole][which])
                moments |= zip(half, parts, strict=True)
        return moments


def _joined(moments: Mapping[str, Tensor], names: Iterable[str], device: torch.device) -> Tensor:
    return torch.cat([torch.empty(0, device=device), *(moments[name].flatten().to(device) for name in names)])
