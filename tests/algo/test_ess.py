"""The effective sample size against hand-computed cases."""

import math

import pytest
import torch

from tailrace.algo.ess import effective_sample_size


def test_equal_policies_have_a_full_effective_sample_size() -> None:
    logprobs = torch.tensor([-0.3, -2.0, -1.1])
    assert effective_sample_size(logprobs, logprobs) == pytest.approx(1.0, abs=1e-12)


def test_two_weights_of_one_and_three_give_four_fifths() -> None:
    # (1 + 3)^2 / (2 * (1 + 9)) = 16 / 20
    found = effective_sample_size(torch.tensor([0.0, math.log(3.0)]), torch.tensor([0.0, 0.0]))
    assert found == pytest.approx(0.8, abs=1e-6)


def test_one_dominating_weight_leaves_one_token_of_many() -> None:
    found = effective_sample_size(torch.tensor([900.0, 0.0, 0.0, 0.0]), torch.zeros(4))
    assert found == pytest.approx(0.25, abs=1e-12)


def test_a_common_factor_does_not_matter() -> None:
    logprobs, recorded = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    found = effective_sample_size(logprobs, recorded)
    assert effective_sample_size(logprobs + 0.7, recorded) == pytest.approx(found, rel=1e-6)


def test_an_empty_batch_has_a_full_effective_sample_size() -> None:
    assert effective_sample_size(torch.zeros(0), torch.zeros(0)) == 1.0
