"""Importance weights: three samples of two, one and two tokens, by hand."""

import math

import pytest
import torch

from tailrace.drivers.trainer.losses import importance_weights

RATIOS = [2.0, 8.0, 0.5, 6.0, 0.25]
NUM_TOKENS = torch.tensor([2, 1, 2])


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ("none", [1.0] * 5),
        ("truncate", [2.0, 5.0, 0.5, 5.0, 0.25]),
        ("mask", [2.0, 0.0, 0.5, 0.0, 0.25]),
        ("sequence", [5.0, 5.0, 0.5, 1.5, 1.5]),
    ],
)
def test_each_correction_weighs_as_it_says(correction: str, weights: list[float]) -> None:
    recorded = torch.tensor([-1.0, -2.0, -0.1, -3.0, -0.7], dtype=torch.float64)
    logprobs = recorded + torch.tensor(RATIOS, dtype=torch.float64).log()
    found = importance_weights(
        logprobs.requires_grad_(),
        recorded,
        NUM_TOKENS,
        correction=correction,  # type: ignore[arg-type]
        cap=5.0,
    )
    torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float64))
    assert not found.requires_grad


@pytest.mark.parametrize(("correction", "far"), [("truncate", 5.0), ("mask", 0.0), ("sequence", 5.0)])
def test_a_weight_that_overflows_is_above_the_cap(correction: str, far: float) -> None:
    found = importance_weights(
        torch.tensor([0.0, -math.log(2)]),
        torch.tensor([-900.0, 0.0]),
        torch.tensor([1, 1]),
        correction=correction,  # type: ignore[arg-type]
        cap=5.0,
    )
    torch.testing.assert_close(found, torch.tensor([far, 0.5]))
