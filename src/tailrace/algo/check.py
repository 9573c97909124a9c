"""Which settings of an algorithm cannot be honoured together, and why."""

from tailrace.algo.base import AlgorithmSettings
from tailrace.engine.base import SamplingSettings
from tailrace.errors import ConfigError


def check_algorithm(
    algorithm: AlgorithmSettings, *, group_size: int, sampling: SamplingSettings | None
) -> None:
    """
    Args:
        sampling: None in a run that samples nothing, a simulated one.

    Raises:
        ConfigError: the algorithm would not be what its settings say.
    """
    _check_group(algorithm, group_size)
    _check_ratio(algorithm)
    if algorithm.kl_bias_correction and algorithm.kl_in == "reward":
        raise ConfigError(
            "algorithm.kl_bias_correction",
            True,
            "in the reward there is nothing to correct: nothing is differentiated there",
            "leave it out, or set algorithm.kl_in = 'loss'",
        )
    if algorithm.overlong_penalty and not algorithm.overlong_buffer:
        raise ConfigError(
            "algorithm.overlong_buffer",
            0.0,
            "a punishment that grows over no tokens cannot be given",
            "set it to the share of the limit over which it grows, 0.2 as DAPO does",
        )
    if sampling and algorithm.correction != "none" and (sampling.top_p < 1 or sampling.top_k > 0):
        raise ConfigError(
            "algorithm.correction",
            algorithm.correction,
            "with top_p or top_k tokens are drawn from a truncated distribution, and recorded log-probs are "
            "of the whole one: pi / mu would not weigh what was drawn",
            "set sampling.top_p = 1 and sampling.top_k = 0, or the correction to 'none'",
        )


def _check_group(algorithm: AlgorithmSettings, group_size: int) -> None:
    if group_size > 1:
        return
    if algorithm.filter == "zero_variance":
        raise ConfigError(
            "algorithm.filter",
            algorithm.filter,
            "it would filter every group of one sample",
            "raise run.group_size",
        )
    if algorithm.advantage != "gae":
        raise ConfigError(
            "algorithm.advantage",
            algorithm.advantage,
            "a group of one sample has nobody to compare it with: every advantage would be zero",
            "raise run.group_size, or let a critic judge it: 'gae'",
        )


def _check_ratio(algorithm: AlgorithmSettings) -> None:
    recorded = algorithm.old_policy == "recorded"
    if algorithm.loss == "reinforce" and not recorded:
        raise ConfigError(
            "algorithm.old_policy",
            algorithm.old_policy,
            "reinforce has no ratio to an old policy",
            "leave it out, or choose the loss 'grpo'",
        )
    if algorithm.loss != "reinforce" and recorded and algorithm.correction != "none":
        raise ConfigError(
            "algorithm.correction",
            algorithm.correction,
            f"the ratio of {algorithm.loss} is to the recorded log-probs: it corrects for them already",
            "set algorithm.old_policy = 'recomputed', or the correction to 'none'",
        )
    if algorithm.loss == "gspo" and algorithm.mask_carried:
        raise ConfigError(
            "algorithm.mask_carried",
            True,
            "gspo has one ratio a sequence: its tokens cannot be taken apart",
            "leave it out, or choose the loss 'grpo'",
        )
    if algorithm.loss == "gspo" and algorithm.normalize != "sample_mean":
        raise ConfigError(
            "algorithm.normalize",
            algorithm.normalize,
            "gspo has one ratio a sequence, which this would count once a token",
            "choose 'sample_mean'",
        )
