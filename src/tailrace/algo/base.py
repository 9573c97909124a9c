"""The [algorithm] section: the loss, independent of the schedule.

A preset names a published algorithm and sets the fields in which it differs from the defaults. Fields that
the section sets itself win over the preset. Settings that contradict each other
are refused.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tailrace.contracts.sampling import SamplingSettings
from tailrace.errors import ConfigError
from tailrace.settings import Settings

LossName = Literal["grpo", "gspo", "cispo", "reinforce"]
AdvantageName = Literal["group", "none", "rloo", "gae", "batch"]
Normalize = Literal["sample_mean", "token_mean", "sample_sum", "fixed_length"]
Correction = Literal["none", "truncate", "mask", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
TokenLossName = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"
]
"""Losses of Tinker's `forward_backward`, which are sums over tokens (losses.token_loss)."""
Preset = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "ppo", "one_sample", "distillation"
]

PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "none", "normalize": "fixed_length"},
    "dapo": {
        "clip_high": 0.28,
        "normalize": "token_mean",
        "filter": "zero_variance",
        "overlong_buffer": 0.2,
        "overlong_penalty": 1.0,
    },
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"loss": "cispo", "clip_high": 4.0, "normalize": "token_mean"},
    "rloo": {
        "loss": "reinforce",
        "advantage": "rloo",
        "normalize": "sample_sum",
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    "reinforce": {
        "loss": "reinforce",
        "advantage": "none",
        "normalize": "sample_sum",
        "correction": "truncate",
    },
    "ppo": {"advantage": "gae", "normalize": "token_mean", "kl_estimator": "k1", "kl_in": "reward"},
    "one_sample": {"advantage": "batch"},
    "distillation": {
        "loss": "reinforce",
        "advantage": "none",
        "normalize": "token_mean",
        "correction": "truncate",
        "distill_coef": 1.0,
        "reward_coef": 0.0,
    },
}
"""Sources: GRPO 2402.03300 4.1. Dr. GRPO 2503.20783 3.2. DAPO 2503.14476 3 and 4.1 (clip 0.28, an overlong
penalty over the last 4,096 of 20,480 tokens). GSPO 2507.18071 5.1. CISPO 2506.13585 3.1, which prints no
bound: weights up to 5, as TRL's documentation advises. RLOO 2402.14740. REINFORCE as PipelineRL 2, eq. 5
with the mean of the group and the ratio of each token. PPO 1707.06347. One sample a prompt, with an advantage
over the batch, is of 2606.17250, of which the abstract alone was at hand: its negative token filtering, which
it holds necessary for stable training, is not implemented. The loss is GRPO's. On-policy distillation: the
reverse KL to a teacher on the student's own samples as an advantage of each token (2306.13649 with lambda 1;
2606.22600, eq. of A_OPD, as TRL's IWOPDTrainer with gamma 0), weighted for tokens of older weights."""


class AlgorithmSettings(Settings):
    """The algorithm: advantages, loss, corrections, KL."""

    name: Preset = "grpo"
    """A preset (PRESETS): sets the fields in which it differs from these defaults; the section may
    override."""

    loss: LossName = "grpo"
    """grpo: the clipped surrogate of PPO with a ratio for each token. gspo: with a ratio for each sequence.
    cispo: the ratio is clipped, its gradient is not. reinforce: log-prob times advantage."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below 1 - clip_low. Not used by cispo."""
    clip_high: float = Field(default=0.2, gt=0, le=1000)
    """The ratio is clipped above 1 + clip_high."""
    normalize: Normalize = "sample_mean"
    """How token losses are averaged. sample_mean: mean over samples of the mean over each sample's tokens
    (GRPO eq. 3). token_mean: mean over all tokens of the step (DAPO eq. 8). sample_sum: mean over samples of
    the sum over each sample's tokens (REINFORCE, RLOO). fixed_length: sample_sum divided by
    sampling.max_completion_tokens (Dr. GRPO)."""

    advantage: AdvantageName = "group"
    """group: reward minus the group's mean, divided by its standard deviation (GRPO). none: reward minus the
    group's mean (Dr. GRPO). rloo: reward minus the mean of the other samples. gae: generalised advantage
    estimation with a critic (PPO). batch: as group, over all samples of the optimizer step, for
    `run.group_size = 1`; gradients then wait for the last sample of the step."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount a token, for gae."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Lambda of gae. 1 with gamma 1: reward minus value (PipelineRL eq. 4)."""
    filter: Literal["none", "zero_variance"] = "none"
    """zero_variance: a group whose rewards are all equal is replaced by another group (DAPO 3.2). A thousand
    filtered groups in succession end the run."""

    overlong_buffer: float = Field(default=0.0, ge=0, lt=1)
    """Share of the length limit, at its end, over which the overlong penalty rises from 0 (DAPO eq. 13)."""
    overlong_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the reward of a sample that reaches the length limit."""

    old_policy: Literal["recorded", "recomputed"] | None = None
    """pi_old of the ratio. Left out: recomputed for april and april_dapo, recorded for all others. recorded:
    the log-probs of the engine. recomputed: those of the trainer with the weights of the last publication,
    also for tokens of older weights (APRIL's code); after the first optimizer step of a publication this
    costs a copy of the weights and one more forward pass. Not with reinforce, which has no ratio."""
    correction: Correction = "none"
    """Importance weights w for tokens that another policy mu generated. w is pi_old / mu, or pi / mu under
    reinforce. truncate: min(cap, w) for each token (a reading of PipelineRL eq. 5). mask: w, or 0 above the
    cap. sequence: min(cap, product of a sample's w) for all of its tokens (eq. 5 as printed)."""
    correction_cap: float = Field(default=5.0, gt=0)
    """Cap of the importance weights."""
    mask_carried: bool = False
    """Exclude tokens that were generated before the last publication from the loss and its count (APRIL)."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL to the reference model, which is the model that the run began with. 0: no
    reference model is loaded."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of that KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: an estimate for each token, differentiated. reward: a sample's sum lowers its reward."""
    kl_bias_correction: bool = False
    """Multiply each estimate in the loss by pi / pi_old, differentiated: its gradient is then the KL's
    (DeepSeek-V3.2, 2512.02556)."""

    distill_coef: float = Field(default=0.0, ge=0)
    """Factor of log p_teacher - log mu, which is added to the advantage of each token. mu generated it. The
    teacher is that of [teacher]. 0: there is none."""
    reward_coef: float = Field(default=1.0, ge=0)
    """Factor of the advantage that comes from rewards. 0: rewards are a metric only. Not used by gae."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        name = given.get("name", "grpo") if isinstance(given, Mapping) else None
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}  # type: ignore[call-overload]
        return {**preset, **given} if preset else given

    @property
    def needs_reference(self) -> bool:
        """Whether samples need log-probs under another model: the reference, or a teacher."""
        return self.kl_coef > 0 or self.distill_coef > 0

    @property
    def learns_without_advantage(self) -> bool:
        """Whether a sample with an advantage of zero has a gradient: from a critic, a teacher or a KL in the
        loss."""
        in_loss = self.kl_coef > 0 and self.kl_in == "loss"
        return self.advantage == "gae" or self.distill_coef > 0 or in_loss


def check_algorithm(
    algorithm: AlgorithmSettings, *, group_size: int, sampling: SamplingSettings | None
) -> None:
    """Check the settings of [algorithm] against each other and against the run. Raises a ConfigError if two
    settings contradict each other. `sampling`: None in a simulated run, which samples nothing."""

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
        group_size == 1 and algorithm.advantage not in ("gae", "batch") and not algorithm.distill_coef,
        "advantage",
        "a group of one sample always has an advantage of zero",
        "raise run.group_size, compare the samples of a step: 'batch', or use a critic: 'gae'",
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
        algorithm.distill_coef > 0 and algorithm.kl_coef > 0,
        "kl_coef",
        "a sample has log-probs under one other model, and with distill_coef that is the teacher",
        "set it to 0, or algorithm.distill_coef to 0",
    )
    refuse(
        not algorithm.distill_coef and not algorithm.reward_coef,
        "reward_coef",
        "nothing else gives an advantage",
        "raise it, or choose algorithm.name = 'distillation'",
    )
    refuse(
        algorithm.distill_coef > 0 and algorithm.advantage in ("gae", "batch"),
        "advantage",
        "a teacher gives an advantage for each token, beside that of a group alone",
        "choose 'group', 'none' or 'rloo'",
    )
    refuse(
        algorithm.distill_coef > 0 and algorithm.loss == "gspo",
        "loss",
        "gspo has one ratio for a sequence, and a teacher gives an advantage for each token",
        "choose 'reinforce'",
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
