"""The parts that a run is made of, and its settings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, model_validator

from tailrace.contracts.data import PoolSettings, Prompts
from tailrace.contracts.engine import Engine
from tailrace.contracts.reward import Rewards
from tailrace.contracts.trainer import Reference, Trainer
from tailrace.ledger.prices import Prices
from tailrace.rollout.members import GroupSettings
from tailrace.rollout.placement import DISAGGREGATED, DeviceSharing
from tailrace.rollout.reward_timeout import Anchors
from tailrace.rollout.router import RunEpisode
from tailrace.settings import PlainPath, Resumable, Settings


class RunSettings(Settings):
    """The [run] section: how long a run is, and what it does between rounds."""

    rounds: Resumable[int] = Field(ge=1)
    """Rounds of the schedule."""
    group_size: int = Field(ge=1, le=65_536)
    """Samples of one prompt (K)."""
    groups: GroupSettings = GroupSettings()
    seed: int = Field(default=0, ge=0)
    """Seed of the prompt order and of the sampling noise."""
    eval_every: Resumable[int] = Field(default=0, ge=0)
    """Rounds between evaluations; there is also one at the start and one at the end. 0: none."""
    eval_prompts: Resumable[int] = Field(default=128, ge=1)
    """Held-out prompts of an evaluation; fewer if there are fewer rows, each of which is evaluated once."""
    eval_samples: Resumable[int] = Field(default=1, ge=1, le=10_000)
    """Samples of each held-out prompt (n of avg@n and pass@k). More than one needs `eval_greedy = false`."""
    eval_solved_at: Resumable[float] = Field(default=1.0, allow_inf_nan=False)
    """Reward from which a sample counts as solved, in pass@k."""
    eval_greedy: Resumable[bool] = True
    """Whether evaluations take the most likely token; false: they sample."""
    eval_temperature: Resumable[float | None] = Field(default=None, gt=0, le=100, allow_inf_nan=False)
    """Sampling temperature of evaluations. None: that of training. It needs `eval_greedy = false`."""
    eval_top_p: Resumable[float | None] = Field(default=None, gt=0, le=1)
    """Top-p of evaluations. None: that of training. It needs `eval_greedy = false`."""
    eval_beside: Resumable[bool] = False
    """Whether training goes on while an evaluation runs, on the version of the weights with which it began.
    A publication that would take this version from the engines waits for its end. They keep as many versions
    as they serve adapters (trainer.lora.versions), else one. The trainer needs devices of its own."""
    stop_after_evaluations: Resumable[int] = Field(default=0, ge=0)
    """Evaluations in succession that are no better than the best one before them, after which the run ends.
    0: it makes all rounds."""
    checkpoint_every: Resumable[int] = Field(default=0, ge=0)
    """Rounds between checkpoints. 0: only at the end of the run, which always has one."""
    keep_checkpoints: Resumable[int] = Field(default=2, ge=0)
    """Newest checkpoints that are kept, beside that of the best evaluation. The others are deleted. 0: all
    are kept."""
    keep_optimizer: Resumable[int] = Field(default=1, ge=0)
    """Newest checkpoints that keep the state of the optimizer, two thirds of their size, from which a run
    resumes. Older ones keep their models, and the untrained start goes. 0: all keep it. With 1 a run whose
    newest checkpoint is damaged cannot go on; with 2 it goes on from the one before."""
    step_warning_timeout_s: Resumable[float] = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds without an optimizer step after which the run says which task waits for what."""
    step_timeout_s: Resumable[float] = Field(default=86_400.0, gt=0, allow_inf_nan=False)
    """Seconds without an optimizer step after which the run ends with that as its error. If it has not ended
    ten minutes later, because something hangs, the process ends."""
    replay: PlainPath | None = None
    """Output directory of a run whose recorded samples are trained again (`tailrace train --replay`)."""
    accept_changed_inputs: Resumable[bool] = False
    """Whether a resumed run may find rows, functions or a model folder whose content has changed."""

    @property
    def num_trained(self) -> int:
        """Samples of one prompt that are trained."""
        return self.groups.keep or self.group_size

    @property
    def eval_sampling(self) -> dict[str, Any]:
        """How evaluations sample, as `held_out_samples` takes it."""
        how = {"greedy": self.eval_greedy, "temperature": self.eval_temperature, "top_p": self.eval_top_p}
        return {**how, "per_prompt": self.eval_samples}

    @model_validator(mode="after")
    def _check_samples(self) -> "RunSettings":
        if self.num_trained > self.group_size:
            raise ValueError(f"groups.keep = {self.groups.keep} is more than group_size = {self.group_size}")
        for key in ("eval_temperature", "eval_top_p"):
            if getattr(self, key) is not None and self.eval_greedy:
                raise ValueError(f"{key} needs eval_greedy = false")
        if self.eval_samples > 1 and self.eval_greedy:
            raise ValueError(
                "eval_samples above 1 needs eval_greedy = false: greedy samples are all the same"
            )
        return self


@dataclass(frozen=True, slots=True)
class RunComponents:
    """Parts of a run, live or simulated."""

    engines: Sequence[Engine]
    trainer: Trainer
    rewards: Rewards
    """The scorers; rollout/rewards.py has the chain around them."""
    prompts: Prompts
    held_out: Prompts
    pools: PoolSettings = field(default_factory=PoolSettings)
    """Difficulty pools of the training prompts."""
    reference: Reference | None = None
    """The reference model; None: the algorithm has no KL to one."""
    sharing: DeviceSharing = DISAGGREGATED
    """Whether engines and trainer have devices in common."""
    anchors: Anchors = field(default_factory=Anchors)
    """Longest known times of correct responses, for adaptive limits. A run saves and restores them."""
    synchronous_rewards: bool = False
    """Whether rewards wait until no request is served."""
    max_failures: int | None = None
    """Samples in sequence without a reward that end the run. None: there is no limit."""
    run_episode: RunEpisode | None = None
    """How turns become a sample (rollout/episodes.py). None: a sample is one turn."""
    prices: Prices | None = None
    """Prices of the run's devices and tokens. None: its cost is not known."""
