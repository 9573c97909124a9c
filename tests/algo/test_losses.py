import math

import pytest
import torch
from torch import Tensor

from tailrace.algo.losses import grpo, kl_k3, reinforce, token_weights


def tensors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def test_grpo_clips_only_where_the_step_would_go_further() -> None:
    ratios = [1.5, 1.5, 0.5, 0.5, 1.1]
    logprobs, recorded, advantages = tensors(
        [math.log(r) for r in ratios], [0.0] * 5, [2.0, -2.0, 2.0, -2.0, 3.0]
    )
    loss, clipped = grpo(logprobs, recorded, advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, *tensors([-1.28 * 2, 1.5 * 2, -0.5 * 2, 0.8 * 2, -1.1 * 3]))
    assert clipped.tolist() == [True, False, False, True, False]


def test_a_clipped_token_has_no_gradient_and_another_ratio_times_advantage() -> None:
    logprobs, recorded, advantages = tensors([0.5, 0.1, -0.5], [0.0, 0.0, 0.0], [1.0, 2.0, -1.0])
    logprobs.requires_grad_()
    grpo(logprobs, recorded, advantages, clip_low=0.2, clip_high=0.2).per_token.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, *tensors([0.0, -2.0 * math.exp(0.1), 0.0]))


def test_losses_agree_with_finite_differences() -> None:
    logprobs, recorded, advantages = tensors([-1.0, -2.0, -0.3], [-1.1, -1.2, -0.9], [0.7, -1.3, 2.0])
    logprobs.requires_grad_()
    torch.autograd.gradcheck(
        lambda x: grpo(x, recorded, advantages, clip_low=0.2, clip_high=0.28).per_token, (logprobs,)
    )
    torch.autograd.gradcheck(lambda x: reinforce(x, advantages).per_token, (logprobs,))


def test_reinforce_is_minus_advantage_times_log_prob() -> None:
    logprobs, advantages = tensors([-1.0, -2.0], [0.5, -3.0])
    loss, clipped = reinforce(logprobs, advantages)
    assert loss.tolist() == [0.5, -6.0]
    assert clipped.tolist() == [False, False]


def test_sample_mean_weighs_samples_alike_and_token_mean_tokens() -> None:
    num_tokens = torch.tensor([4, 1, 2])
    assert token_weights(num_tokens, "sample_mean").tolist() == [0.25] * 4 + [1.0] + [0.5] * 2
    assert token_weights(num_tokens, "token_mean").tolist() == [1.0] * 7


@pytest.mark.parametrize("difference", [-0.7, 0.0, 0.4])
def test_k3_is_its_formula_and_never_negative(difference: float) -> None:
    logprobs, recorded = tensors([-1.0 + difference], [-1.0])
    (value,) = kl_k3(logprobs, recorded).tolist()
    assert value == pytest.approx(math.exp(difference) - 1 - difference, abs=1e-12)
    assert value >= 0


def test_k3_estimates_the_divergence_from_the_recorded_policy() -> None:
    recorded, current = tensors([0.7, 0.2, 0.1], [0.4, 0.4, 0.2])
    expected = (recorded * kl_k3(current.log(), recorded.log())).sum()
    exact = (recorded * (recorded / current).log()).sum()
    torch.testing.assert_close(expected, exact)
