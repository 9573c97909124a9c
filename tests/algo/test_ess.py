"""The effective sample size against hand-computed cases."""

import math

import pytest
import torch
from torch import Tensor

from tailrace.drivers.trainer.losses import effective_sample_size, weight_sums


def size(logprobs: Tensor, recorded: Tensor) -> float:
    sums = weight_sums(logprobs, recorded, torch.ones_like(logprobs))
    return effective_sample_size(float(sums.weights), float(sums.squares), len(logprobs))


def test_equal_policies_have_a_full_effective_sample_size() -> None:
    logprobs = torch.tensor([-0.3, -2.0, -1.1])
    assert size(logprobs, logprobs) == pytest.approx(1.0, abs=1e-12)


def test_two_weights_of_one_and_three_give_four_fifths() -> None:
    # (1 + 3)^2 / (2 * (1 + 9)) = 16 / 20
    assert size(torch.tensor([0.0, math.log(3.0)]), torch.zeros(2)) == pytest.approx(0.8, abs=1e-6)


def test_the_sums_of_pieces_are_those_of_the_whole() -> None:
    logprobs, recorded = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    pieces = [
        weight_sums(logprobs[part], recorded[part], torch.ones_like(logprobs[part]))
        for part in (slice(1), slice(1, 3))
    ]
    whole = weight_sums(logprobs, recorded, torch.ones_like(logprobs))
    torch.testing.assert_close(pieces[0].weights + pieces[1].weights, whole.weights)
    torch.testing.assert_close(pieces[0].squares + pieces[1].squares, whole.squares)


@pytest.mark.parametrize("far", [900.0, 1e30])
def test_one_dominating_weight_leaves_one_token_of_many(far: float) -> None:
    assert size(torch.tensor([far, 0.0, 0.0, 0.0]), torch.zeros(4)) == pytest.approx(0.25, abs=1e-12)


def test_weights_all_too_small_to_tell_are_equal() -> None:
    assert size(torch.tensor([-900.0, -901.0]), torch.zeros(2)) == pytest.approx(1.0)


def test_a_common_factor_does_not_matter() -> None:
    logprobs, recorded = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    assert size(logprobs + 0.7, recorded) == pytest.approx(size(logprobs, recorded), rel=1e-6)


def test_an_empty_batch_has_a_full_effective_sample_size() -> None:
    assert size(torch.zeros(0), torch.zeros(0)) == 1.0
