"""Losses a token each, against sums by hand and finite differences."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tailrace.drivers.trainer.losses import cispo, grpo, gspo, reinforce, token_weights, value_loss


def tensors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def logs(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


def test_grpo_clips_only_where_the_step_would_go_further() -> None:
    logprobs, old, advantages = tensors(logs(1.5, 1.5, 0.5, 0.5, 1.1), [0.0] * 5, [2.0, -2.0, 2.0, -2.0, 3.0])
    loss, clipped = grpo(logprobs, old, advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, *tensors([-1.28 * 2, 1.5 * 2, -0.5 * 2, 0.8 * 2, -1.1 * 3]))
    assert clipped.tolist() == [True, False, False, True, False]


def test_a_clipped_token_has_no_gradient_and_another_ratio_times_advantage() -> None:
    logprobs, old, advantages = tensors([0.5, 0.1, -0.5], [0.0, 0.0, 0.0], [1.0, 2.0, -1.0])
    logprobs.requires_grad_()
    grpo(logprobs, old, advantages, clip_low=0.2, clip_high=0.2).per_token.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, *tensors([0.0, -2.0 * math.exp(0.1), 0.0]))


def test_gspo_has_one_ratio_a_sequence_its_geometric_mean_a_token() -> None:
    # Ratios 2 and 8 have the mean 4, clipped at 3; 1.5 is not clipped; 1/4 and 1 have 1/2, clipped at 0.6.
    logprobs, old, advantages = tensors(logs(2, 8, 1.5, 0.25, 1), [0.0] * 5, [1.0, 1.0, 2.0, -1.0, -1.0])
    loss, clipped = gspo(logprobs, old, advantages, torch.tensor([2, 1, 2]), clip_low=0.4, clip_high=2.0)
    torch.testing.assert_close(loss, *tensors([-3.0, -3.0, -3.0, 0.6, 0.6]))
    assert clipped.tolist() == [True, True, False, True, True]


def test_the_gradient_of_gspo_is_shared_by_all_tokens_of_a_sequence() -> None:
    logprobs, old, advantages = tensors(logs(2, 8, 1.5), [0.0] * 3, [1.0, 1.0, 2.0])
    logprobs.requires_grad_()
    num_tokens = torch.tensor([2, 1])
    loss = gspo(logprobs, old, advantages, num_tokens, clip_low=0.4, clip_high=9.0).per_token
    (loss / torch.tensor([2, 2, 1])).sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, *tensors([-4 * 1 / 2, -4 * 1 / 2, -1.5 * 2]))


def test_cispo_bounds_the_weight_and_no_token_loses_its_gradient() -> None:
    logprobs, old, advantages = tensors(logs(6, 2, 0.1), [0.0] * 3, [1.0, -1.0, 2.0])
    logprobs.requires_grad_()
    loss, clipped = cispo(logprobs, old, advantages, clip_high=4.0)
    torch.testing.assert_close(
        loss.detach(), *tensors([-5 * math.log(6), 2 * math.log(2), -0.2 * math.log(0.1)])
    )
    assert clipped.tolist() == [True, False, False]
    loss.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, *tensors([-5.0, 2.0, -0.2]))


def test_reinforce_is_minus_advantage_times_log_prob() -> None:
    logprobs, advantages = tensors([-1.0, -2.0], [0.5, -3.0])
    loss, clipped = reinforce(logprobs, advantages)
    assert loss.tolist() == [0.5, -6.0]
    assert clipped.tolist() == [False, False]


def test_the_value_loss_is_half_the_square() -> None:
    assert value_loss(*tensors([1.0, -2.0], [0.0, 1.0])).tolist() == [0.5, 4.5]


OLD, ADVANTAGES = tensors([-1.1, -1.2, -0.9, -0.4], [0.7, -1.3, 2.0, 2.0])
NUM_TOKENS = torch.tensor([1, 1, 2])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: grpo(x, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.28).per_token,
        lambda x: gspo(x, OLD, ADVANTAGES, NUM_TOKENS, clip_low=0.2, clip_high=0.28).per_token,
        lambda x: reinforce(x, ADVANTAGES).per_token,
        lambda x: value_loss(x, ADVANTAGES),
    ],
    ids=["grpo", "gspo", "reinforce", "value_loss"],
)
def test_losses_agree_with_finite_differences(loss: Callable[[Tensor], Tensor]) -> None:
    (logprobs,) = tensors([-1.0, -2.0, -0.3, -0.5])
    assert torch.autograd.gradcheck(loss, (logprobs.requires_grad_(),))


def test_cispo_agrees_with_finite_differences_of_what_its_weights_hold_fast() -> None:
    """Its gradient is not the loss's own: the weight stands still."""
    (logprobs,) = tensors([-1.0, -2.0, 0.9, -0.5])
    weights = (logprobs - OLD).exp().clamp(max=1.28)
    step = 1e-6
    wanted = [
        (-(weights * ADVANTAGES * (logprobs + shift)) + weights * ADVANTAGES * (logprobs - shift)).sum()
        for shift in step * torch.eye(4, dtype=torch.float64)
    ]
    logprobs.requires_grad_()
    cispo(logprobs, OLD, ADVANTAGES, clip_high=0.28).per_token.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.stack(wanted) / (2 * step), atol=1e-8, rtol=0)


def weights(normalize: str, *counted: float) -> list[float]:
    """Of samples of four, one and two tokens, the limit being eight."""
    found = token_weights(
        torch.tensor(counted or [1.0] * 7),
        torch.tensor([4, 1, 2]),
        normalize,  # type: ignore[arg-type]
        max_completion_tokens=8,
    )
    return found.tolist()


def test_each_normalisation_weighs_tokens_as_it_says() -> None:
    assert weights("sample_mean") == [0.25] * 4 + [1.0] + [0.5] * 2
    assert weights("token_mean") == weights("sample_sum") == [1.0] * 7
    assert weights("fixed_length") == [0.125] * 7


def test_a_token_that_is_left_out_is_not_counted_either() -> None:
    counted = (0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0)
    assert weights("sample_mean", *counted) == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 1.0]
    assert weights("token_mean", *counted) == list(counted)
    assert weights("fixed_length", *counted) == [c / 8 for c in counted]
