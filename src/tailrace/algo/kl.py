"""Estimators of a KL divergence from tokens that one of the two policies generated."""

from torch import Tensor

from tailrace.algo.base import KLEstimator


def kl(logprobs: Tensor, other_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(p || q) at each token that p generated (Schulman 2020, "Approximating KL Divergence"): [C].

        r = q / p
        k1 = -log r             unbiased, of high variance; its own gradient is zero in expectation
        k2 = (log r)^2 / 2      biased, of low variance; its gradient is that of the KL
        k3 = (r - 1) - log r    unbiased and never negative (GRPO, DeepSeekMath, eq. 4)

    In a loss, k1 therefore has no effect on average. In the reward its gradient is the KL's
    (algo/compute_advantages.py).

    Args:
        logprobs: [C] log p
        other_logprobs: [C] log q
    """
    log_ratio = other_logprobs - logprobs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return log_ratio.expm1() - log_ratio
