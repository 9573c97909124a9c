"""The optimizer against torch's own AdamW, parameter by parameter."""

import torch
from torch import Tensor

from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.optimizer import Optimizer

SETTINGS = TrainerSettings(
    learning_rate=0.1, betas=(0.8, 0.9), weight_decay=0.3, max_grad_norm=1e9, warmup_steps=0
)


def make_parameters() -> dict[str, Tensor]:
    """Norms and matrices in turn, as in a model."""
    chance = torch.Generator().manual_seed(0)
    shapes = {"norm": (4,), "up": (4, 3), "bias": (3,), "down": (3, 4)}
    return {name: torch.randn(shape, generator=chance).requires_grad_() for name, shape in shapes.items()}


def add_gradients(parameters: dict[str, Tensor]) -> None:
    sum((weight * p.pow(2)).sum() for weight, p in enumerate(parameters.values(), 1)).backward()


def test_steps_equal_adamw_s_and_matrices_alone_decay() -> None:
    ours, theirs = make_parameters(), make_parameters()
    optimizer = Optimizer(ours, SETTINGS)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["up"], theirs["down"]], "weight_decay": 0.3},
            {"params": [theirs["norm"], theirs["bias"]], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.8, 0.9),
    )
    for _ in range(3):
        add_gradients(ours)
        optimizer.step(1)
        reference.zero_grad()
        add_gradients(theirs)
        reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], atol=1e-6, rtol=0)


def test_moments_are_known_by_parameter_and_another_goes_on_from_them() -> None:
    ours, others = make_parameters(), make_parameters()
    optimizer, another = Optimizer(ours, SETTINGS), Optimizer(others, SETTINGS)
    assert optimizer.state().first_moments == {}
    add_gradients(ours)
    gradients = {name: p.grad.clone() for name, p in ours.items() if p.grad is not None}
    optimizer.step(1)
    state = optimizer.state()
    assert state.first_moments.keys() == ours.keys()
    for name, moment in state.first_moments.items():
        torch.testing.assert_close(moment, 0.2 * gradients[name])
    with torch.no_grad():
        for name, parameter in others.items():
            parameter.copy_(ours[name])
    another.restore(state)
    for parameters, one in ((ours, optimizer), (others, another)):
        add_gradients(parameters)
        one.step(1)
    assert all(torch.equal(ours[name], others[name]) for name in ours)


def test_parameters_that_were_moved_to_another_vector_are_stepped_there() -> None:
    stayed, moved = make_parameters(), make_parameters()
    one, other = Optimizer(stayed, SETTINGS), Optimizer(moved, SETTINGS)
    vector = torch.zeros(4 + 12 + 3 + 12)
    other.move(vector)
    for parameters, optimizer in ((stayed, one), (moved, other)):
        add_gradients(parameters)
        optimizer.step(1)
    assert all(torch.equal(stayed[name], moved[name]) for name in stayed)
    everything = [stayed[name].detach().flatten() for name in ("up", "down", "norm", "bias")]
    assert torch.equal(vector, torch.cat(everything))  # matrices first
