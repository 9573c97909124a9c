"""KL estimators: their formulas, what they estimate, and what their gradients are of."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from tailrace.algo.advantages import kl_penalty
from tailrace.drivers.trainer.losses import kl

tensor = partial(torch.tensor, dtype=torch.float64)
P = tensor([0.7, 0.2, 0.1])
Q = tensor([0.4, 0.4, 0.2])
EXACT = float((P * (P / Q).log()).sum())
LOGITS = tensor([0.3, -0.8, 1.1])


@pytest.mark.parametrize("difference", [-0.7, 0.0, 0.4])
def test_each_estimator_is_its_formula(difference: float) -> None:
    """log r = log q - log p"""
    logprobs, other = tensor([-1.0]), tensor([-1.0 + difference])
    assert kl(logprobs, other, "k1").item() == pytest.approx(-difference, abs=1e-12)
    assert kl(logprobs, other, "k2").item() == pytest.approx(difference**2 / 2, abs=1e-12)
    k3 = kl(logprobs, other, "k3").item()
    assert k3 == pytest.approx(math.exp(difference) - 1 - difference, abs=1e-12)
    assert k3 >= 0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_where_p_drew_the_tokens(estimator: str) -> None:
    expected = (P * kl(P.log(), Q.log(), estimator)).sum()  # type: ignore[arg-type]
    assert float(expected) == pytest.approx(EXACT, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_agree_with_finite_differences(estimator: str) -> None:
    logprobs = tensor([-1.0, -0.2, -3.0], requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kl(x, Q.log(), estimator), (logprobs,))  # type: ignore[arg-type]


def gradient(of: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(of, logits)[0]


def test_in_a_loss_k2_pulls_as_the_divergence_does_and_k1_nowhere() -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    drawn_by = logprobs.exp().detach()
    exact = gradient((logprobs.exp() * (logprobs - Q.log())).sum(), logits)
    k2 = gradient((drawn_by * kl(logits.log_softmax(-1), Q.log(), "k2")).sum(), logits)
    k1 = gradient((drawn_by * kl(logits.log_softmax(-1), Q.log(), "k1")).sum(), logits)
    torch.testing.assert_close(k2, exact)
    torch.testing.assert_close(k1, torch.zeros_like(exact))


def test_in_the_reward_k1_pulls_as_the_divergence_does() -> None:
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    exact = gradient((logprobs.exp() * (logprobs - Q.log())).sum(), logits)
    logprobs = logits.log_softmax(-1)
    penalties = tensor(
        [kl_penalty([p], [q], "k1") for p, q in zip(logprobs.tolist(), Q.log().tolist(), strict=True)]
    )
    score = gradient((logprobs.exp().detach() * penalties * logprobs).sum(), logits)
    torch.testing.assert_close(score, exact)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_sample_s_penalty_is_the_sum_of_its_tokens_estimates(estimator: str) -> None:
    logprobs, reference = [-1.0, -0.5, -2.0], [-1.5, -0.4, -0.1]
    wanted = kl(tensor(logprobs), tensor(reference), estimator).sum()  # type: ignore[arg-type]
    assert kl_penalty(logprobs, reference, estimator) == pytest.approx(float(wanted), abs=1e-12)  # type: ignore[arg-type]
