"""The [algorithm] section: what is learnt from the samples, whatever the schedule.

A preset names a published algorithm and sets the fields in which it differs from the defaults; whatever the
section says itself wins over the preset.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tailrace.settings import Settings

LossName = Literal["grpo", "gspo", "cispo", "reinforce"]
AdvantageName = Literal["group", "none", "rloo", "gae"]
Normalize = Literal["sample_mean", "token_mean", "sample_sum", "fixed_length"]
Correction = Literal["none", "truncate", "mask", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "ppo"]

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
}
"""Sources: GRPO 2402.03300 4.1. Dr. GRPO 2503.20783 3.2. DAPO 2503.14476 3 and 4.1 (clip 0.28, a soft
punishment over the last 4,096 of 20,480 tokens). GSPO 2507.18071 5.1. CISPO 2506.13585 3.1, which prints no
bound: weights up to 5, as TRL's documentation advises. RLOO 2402.14740. REINFORCE as PipelineRL 2, eq. 5
with the mean of the group. PPO 1707.06347."""


class AlgorithmSettings(Settings):
    """From rewards to a loss."""

    name: Preset = "grpo"
    """Sets the fields in which it differs from these defaults (PRESETS); the section may override each."""

    loss: LossName = "grpo"
    """grpo: the clipped surrogate, a ratio a token; PPO's too. gspo: a ratio a sequence. cispo: the ratio is
    clipped, its gradient is not. reinforce: log-prob times advantage. (algo/losses.py)"""
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    """cispo has this one only."""
    normalize: Normalize = "sample_mean"
    """What a token weighs. sample_mean: mean over samples of each one's token mean (GRPO eq. 3).
    token_mean: mean over all tokens of the step (DAPO eq. 8). sample_sum: mean over samples of each one's
    sum (REINFORCE, RLOO). fixed_length: that, divided by sampling.max_completion_tokens (Dr. GRPO)."""

    advantage: AdvantageName = "group"
    """group: by mean and deviation of the group (GRPO). none: by the mean only (Dr. GRPO). rloo: by the
    mean of the others. gae: a token each, by a critic that is trained beside the policy (PPO).
    (algo/advantages.py)"""
    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """1 with gamma 1: reward minus value (PipelineRL eq. 4)."""
    filter: Literal["none", "zero_variance"] = "none"
    """zero_variance: a group whose rewards are all equal teaches nothing and is replaced (DAPO 3.2)."""

    overlong_buffer: float = Field(default=0.0, ge=0, lt=1)
    """Share of the length limit, at its end, over which the punishment grows from 0 (DAPO eq. 13)."""
    overlong_penalty: float = Field(default=0.0, ge=0)
    """Taken from the reward of a sample as long as the limit."""

    old_policy: Literal["recorded", "recomputed"] = "recorded"
    """pi_old of the ratio. recorded: the log-probs of whoever drew the token. recomputed: those of the
    weights as last published, also for tokens that older ones drew (APRIL's code)."""
    correction: Correction = "none"
    """Weights for what was drawn by another policy mu: pi_old / mu, or pi / mu under reinforce, which has no
    pi_old. truncate: min(cap, w) a token. mask: w, or 0 above the cap. sequence: min(cap, product of a
    sample's w) for all of its tokens. (algo/corrections.py)"""
    correction_cap: float = Field(default=5.0, gt=0)
    mask_carried: bool = False
    """Tokens carried over from older versions than the published one teach nothing and are not counted
    (APRIL)."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Of the KL to the reference, which is the model that the run began with; 0: no reference is loaded."""
    kl_estimator: KLEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a token each, differentiated. reward: a sample's sum is taken from its reward. (algo/kl.py)"""
    kl_bias_correction: bool = False
    """In the loss: each token's estimate times its pi / pi_old, differentiated too: its gradient is then the
    KL's (DeepSeek-V3.2, 2512.02556)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, given: Any) -> Any:
        name = given.get("name", "grpo") if isinstance(given, Mapping) else None
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}  # type: ignore[call-overload]
        return {**preset, **given} if preset else given

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def learns_without_advantage(self) -> bool:
        """Whether a sample whose advantage is zero has a gradient: from a critic, or a KL in the loss."""
        return self.advantage == "gae" or (self.needs_reference and self.kl_in == "loss")
