"""Refuses settings of an algorithm that contradict each other."""

from tailrace.algo.base import AlgorithmSettings
from tailrace.engine.base import SamplingSettings
from tailrace.errors import ConfigError


def check_algorithm(
    algorithm: AlgorithmSettings, *, group_size: int, sampling: SamplingSettings | None
) -> None:
    """Check the settings of [algorithm] against each other and against the run.

    Args:
        algorithm: the section.
        group_size: samples of a prompt.
        sampling: None in a simulated run, which samples nothing.

    Raises:
        ConfigError: two settings contradict each other.
    """
    _check_group(algorithm, group_size)
    _check_ratio(algorithm)
    if algorithm.kl_bias_correction and algorithm.kl_in == "reward":
        raise ConfigError(
            "algorithm.kl_bias_correction",
            True,
            "a KL in the reward is not differentiated, so there is no gradient to correct",
            "leave it out, or set algorithm.kl_in = 'loss'",
        )
    if algorithm.overlong_penalty and not algorithm.overlong_buffer:
        raise ConfigError(
            "algorithm.overlong_buffer",
            0.0,
            "the overlong penalty needs a range of tokens over which it rises",
            "set it to a share of the length limit, 0.2 as DAPO does",
        )
    if sampling and algorithm.correction != "none" and (sampling.top_p < 1 or sampling.top_k > 0):
        raise ConfigError(
            "algorithm.correction",
            algorithm.correction,
            "with top_p or top_k tokens are sampled from a truncated distribution, and recorded log-probs "
            "are those of the full one: pi / mu would not be the importance weight",
            "set sampling.top_p = 1 and sampling.top_k = 0, or the correction to 'none'",
        )


def _check_group(algorithm: AlgorithmSettings, group_size: int) -> None:
    if group_size > 1:
        return
    if algorithm.filter == "zero_variance":
        raise ConfigError(
            "algorithm.filter",
            algorithm.filter,
            "a group of one sample always has zero variance: every group would be filtered",
            "raise run.group_size",
        )
    if algorithm.advantage != "gae":
        raise ConfigError(
            "algorithm.advantage",
            algorithm.advantage,
            "a group of one sample always has an advantage of zero",
            "raise run.group_size, or use a critic: 'gae'",
        )


def _check_ratio(algorithm: AlgorithmSettings) -> None:
    if algorithm.loss == "reinforce" and algorithm.old_policy == "recomputed":
        raise ConfigError(
            "algorithm.old_policy",
            algorithm.old_policy,
            "reinforce has no ratio to an old policy",
            "leave it out, or choose the loss 'grpo'",
        )
    recorded = algorithm.old_policy == "recorded"
    if algorithm.loss != "reinforce" and recorded and algorithm.correction != "none":
        raise ConfigError(
            "algorithm.correction",
            algorithm.correction,
            f"the ratio of {algorithm.loss} already has the recorded log-probs in its denominator",
            "set algorithm.old_policy = 'recomputed', or the correction to 'none'",
        )
    if algorithm.loss == "gspo" and algorithm.mask_carried:
        raise ConfigError(
            "algorithm.mask_carried",
            True,
            "gspo has one ratio for a sequence: single tokens cannot be masked",
            "leave it out, or choose the loss 'grpo'",
        )
    if algorithm.loss == "gspo" and algorithm.normalize != "sample_mean":
        raise ConfigError(
            "algorithm.normalize",
            algorithm.normalize,
            "gspo has one ratio for a sequence, which this would count once for each token",
            "choose 'sample_mean'",
        )
