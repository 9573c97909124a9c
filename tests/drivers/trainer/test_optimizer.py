"""The optimizer against torch's own AdamW, parameter by parameter."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import get_scheduler

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.optimizer import Optimizer
from tailrace.errors import ConfigError

SETTINGS = TrainerSettings(
    learning_rate=0.1, betas=(0.8, 0.9), weight_decay=0.3, max_grad_norm=1e9, warmup_steps=0
)


def make_parameters() -> dict[str, Tensor]:
    """Vectors and matrices in turn, as in a model."""
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
    assert optimizer.state().keys() == {"counts"}
    add_gradients(ours)
    gradients = {name: p.grad.clone() for name, p in ours.items() if p.grad is not None}
    optimizer.step(1)
    state = optimizer.state()
    assert state.keys() == {"counts"} | {f"{part}.{name}" for part in ("first", "second") for name in ours}
    for name, gradient in gradients.items():
        torch.testing.assert_close(state[f"first.{name}"], 0.2 * gradient)
    with torch.no_grad():
        for name, parameter in others.items():
            parameter.copy_(ours[name])
    another.restore(deepcopy(state))
    for parameters, one in ((ours, optimizer), (others, another)):
        add_gradients(parameters)
        one.step(1)
    assert all(torch.equal(ours[name], others[name]) for name in ours)


def test_a_gradient_above_the_limit_is_scaled_to_it_and_the_norm_returned_is_the_one_before() -> None:
    parameters = {"weight": torch.zeros(2, 2).requires_grad_()}
    settings = SETTINGS.model_copy(update={"betas": (0.0, 0.9), "max_grad_norm": 0.5})
    optimizer = Optimizer(parameters, settings)
    (parameters["weight"] * torch.tensor([[6.0, 0.0], [0.0, 8.0]])).sum().backward()
    assert optimizer.step(2) == 5.0  # of [[3, 0], [0, 4]]
    wanted = torch.tensor([[0.3, 0.0], [0.0, 0.4]])
    torch.testing.assert_close(optimizer.state()["first.weight"], wanted, atol=1e-6, rtol=0)
    assert not any(gradient.any() for gradient in optimizer.gradients())


def rates(optimizer: Optimizer, parameters: dict[str, Tensor], num: int) -> list[float]:
    found = []
    for _ in range(num):
        add_gradients(parameters)
        optimizer.step(1)
        found.append(optimizer.learning_rate)
    return found


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_after_the_warm_up_the_rate_falls_as_transformers_has_it_and_a_restored_one_goes_on(
    decay: str,
) -> None:
    settings = SETTINGS.changed(learning_rate_decay=decay, decay_steps=8, warmup_steps=2)
    parameters = make_parameters()
    optimizer = Optimizer(parameters, settings)
    theirs = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule = get_scheduler(decay, theirs, num_warmup_steps=2, num_training_steps=8)
    wanted = [0.05, 0.1]
    for number in range(8):
        wanted += [theirs.param_groups[0]["lr"]] if number >= 2 else []
        theirs.step()
        schedule.step()
    found = rates(optimizer, parameters, 5)
    state = deepcopy(optimizer.state())
    found += rates(optimizer, parameters, 5)
    assert found == pytest.approx([*wanted, 0.0, 0.0]) and found[2] == 0.1
    others = make_parameters()
    another = Optimizer(others, settings)
    another.restore(state)
    assert rates(another, others, 5) == found[5:]


def test_a_decay_over_unknown_steps_is_refused() -> None:
    parameters = make_parameters()
    with pytest.raises(
        ConfigError, match=r"trainer\.decay_steps = None: the steps of the decay are not known"
    ):
        rates(Optimizer(parameters, SETTINGS.changed(learning_rate_decay="linear")), parameters, 1)
