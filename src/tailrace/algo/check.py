"""Refuses settings of an algorithm that contradict each other."""

from tailrace.algo.base import AlgorithmSettings
from tailrace.engine.settings import SamplingSettings
from tailrace.errors import ConfigError


def check_algorithm(
    algorithm: AlgorithmSettings, *, group_size: int, sampling: SamplingSettings | None
) -> None:
    """Check the settings of [algorithm] against each other and against the run.

    Args:
        sampling: None in a simulated run, which samples nothing.

    Raises:
        ConfigError: two settings contradict each other.
    """

    def refuse(when: bool, key: str, problem: str, remedy: str) -> None:
        if when:
            raise ConfigError(f"algorithm.{key}", getattr(algorithm, key), problem, remedy)

    reinforce, gspo = algorithm.loss == "reinforce", algorithm.loss == "gspo"
    corrected = algorithm.correction != "none"
    refuse(
        group_size == 1 and algorithm.filter == "zero_variance",
        "filter",
        "a group of one sample always has zero variance: every group would be filtered",
        "raise run.group_size",
    )
    refuse(
        group_size == 1 and algorithm.advantage != "gae",
        "advantage",
        "a group of one sample always has an advantage of zero",
        "raise run.group_size, or use a critic: 'gae'",
    )
    refuse(
        reinforce and algorithm.old_policy == "recomputed",
        "old_policy",
        "reinforce has no ratio to an old policy",
        "leave it out, or choose the loss 'grpo'",
    )
    refuse(
        not reinforce and corrected and algorithm.old_policy == "recorded",
        "correction",
        f"the ratio of {algorithm.loss} already has the recorded log-probs in its denominator",
        "set algorithm.old_policy = 'recomputed', or the correction to 'none'",
    )
    refuse(
        gspo and algorithm.mask_carried,
        "mask_carried",
        "gspo has one ratio for a sequence: single tokens cannot be masked",
        "leave it out, or choose the loss 'grpo'",
    )
    refuse(
        gspo and algorithm.normalize != "sample_mean",
        "normalize",
        "gspo has one ratio for a sequence, which this would count once for each token",
        "choose 'sample_mean'",
    )
    refuse(
        algorithm.kl_bias_correction and algorithm.kl_in == "reward",
        "kl_bias_correction",
        "a KL in the reward is not differentiated, so there is no gradient to correct",
        "leave it out, or set algorithm.kl_in = 'loss'",
    )
    refuse(
        algorithm.overlong_penalty > 0 and not algorithm.overlong_buffer,
        "overlong_buffer",
        "the overlong penalty needs a range of tokens over which it rises",
        "set it to a share of the length limit, 0.2 as DAPO does",
    )
    refuse(
        corrected and sampling is not None and (sampling.top_p < 1 or sampling.top_k > 0),
        "correction",
        "with top_p or top_k tokens are sampled from a truncated distribution, and recorded log-probs are "
        "those of the full one: pi / mu would not be the importance weight",
        "set sampling.top_p = 1 and sampling.top_k = 0, or the correction to 'none'",
    )
