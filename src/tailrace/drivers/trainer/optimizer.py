"""AdamW on a sum of gradients, with linear warm-up, decay, and clipping by the global norm.

If the model is sharded, each rank has a shard of every parameter, gradient and moment (distributed.py). Where
its layers are divided, too, some parameters are divided over processes that others are not: torch's functions
take those of one mesh, and so do the groups here.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import AdamStep
from tailrace.drivers.trainer.distributed import Ranks, gather, local, mesh_of
from tailrace.errors import ConfigError

MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}
"""AdamW's names of its moments."""


@cache
def decay(name: str, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """Return transformers' factor of the learning rate, "linear" or "cosine", by the steps before a step."""
    from transformers import get_scheduler

    without_weights = torch.optim.SGD([torch.zeros(1)])
    schedule = get_scheduler(name, without_weights, num_warmup_steps=warmup_steps, num_training_steps=steps)
    factor: Callable[[int], float] = schedule.lr_lambdas[0]
    return factor


class Optimizer:
    """Owns the gradients of the parameters: backward passes add to them, `step` consumes them."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: TrainerSettings) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._settings = settings
        self.num_steps = 0
        self._num_updates = 0
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        meshes: dict[object, list[Tensor]] = {}
        for parameter in self._parameters.values():
            meshes.setdefault(mesh_of(parameter), []).append(parameter)
        self._meshes = list(meshes.values())
        """The parameters of each mesh."""
        decays = {True: settings.weight_decay, False: 0.0}
        self._adamw = torch.optim.AdamW(
            [
                {"params": params, "weight_decay": decay, "decays": decays_here}
                for decays_here, decay in decays.items()
                for group in self._meshes
                if (params := [each for each in group if (each.ndim >= 2) is decays_here])
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            fused=True,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step: lr * (steps / warmup_steps) in the warm-up, then lr, or a factor of
        it, which is 1 in its first step. Raises a ConfigError if the steps of the decay are not known."""
        warmup, settings = self._settings.warmup_steps, self._settings
        if warmup and self.num_steps <= warmup:
            return settings.learning_rate * (self.num_steps / warmup)
        if settings.learning_rate_decay == "constant":
            return settings.learning_rate
        if settings.decay_steps is None:
            raise ConfigError("trainer.decay_steps", None, "the steps of the decay are not known", "set it")
        num_before = min(self.num_steps - 1, settings.decay_steps)  # a cosine would rise again
        return settings.learning_rate * decay(settings.learning_rate_decay, warmup, settings.decay_steps)(
            num_before
        )

    @property
    def parameters(self) -> Collection[Tensor]:
        """Return the trained parameters."""
        return self._parameters.values()

    def gradients(self) -> list[Tensor]:
        """The sum of gradients since the last step, by parameter."""
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]

    def moments(self) -> list[Tensor]:
        """Return the moments of AdamW."""
        return [tensor for state in self._adamw.state.values() for tensor in state.values()]

    def add_replicas(self, ranks: Ranks) -> None:
        """Add up the gradients of all replicas."""
        ranks.sum_over_replicas([local(gradient) for gradient in self.gradients()])

    def step(self, count: int, adam: AdamStep | None = None) -> float:
        """Do one step on gradient / count and reset the gradient. Return the norm before clipping. A gradient
        that is not finite changes neither the weights nor AdamW's moments and step count; the step is
        counted. `adam`: parameters of this step in place of the settings'."""
        self.num_steps += 1
        gradients = self.gradients()
        for gradient in gradients:
            gradient.div_(count)
        norms = [gather(get_total_norm([p.grad for p in g if p.grad is not None])) for g in self._meshes]
        total_norm = get_total_norm(norms)
        norm = float(total_norm)
        if math.isfinite(norm):
            self._num_updates += 1
            max_norm = adam.max_grad_norm if adam else self._settings.max_grad_norm
            if max_norm:
                for group in self._meshes:
                    clip_grads_with_norm_(group, max_norm, total_norm)
            for options in self._adamw.param_groups:
                options["lr"] = adam.learning_rate if adam else self.learning_rate
                if adam:
                    options.update(betas=adam.betas, eps=adam.eps)
                if adam and options["decays"]:
                    options["weight_decay"] = adam.weight_decay
            self._adamw.step()
        self._reset()
        return norm

    def _reset(self) -> None:
        for gradient in self.gradients():
            local(gradient).zero_()

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint needs to continue bit for bit (checkpoint.State)."""
        states = self._adamw.state
        moments = {
            f"{part}.{name}": states[parameter][key]
            for part, key in MOMENTS.items()
            for name, parameter in self._parameters.items()
            if parameter in states
        }
        return {"counts": torch.tensor([self.num_steps, self._num_updates]), **moments}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, with a gradient of zero. Its moments become those of this optimizer."""
        self.num_steps, self._num_updates = map(int, state["counts"].tolist())
        self._reset()
        self._adamw.state.clear()
        for name, parameter in self._parameters.items() if self._num_updates else ():
            step = torch.tensor(float(self._num_updates), device=parameter.device)
            moments = {key: state[f"{part}.{name}"] for part, key in MOMENTS.items()}
            self._adamw.state[parameter] = {"step": step, **moments}
