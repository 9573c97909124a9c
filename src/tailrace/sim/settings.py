"""A simulated set-up: what costs how much time."""

from pydantic import Field

from tailrace.settings import Settings


class SimEngineSettings(Settings):
    """Continuous batching in whole decode steps of base_s + slope_s * running."""

    count: int = Field(default=1, ge=1)
    slots: int = Field(default=256, ge=1)
    base_s: float = Field(default=6e-3, gt=0)
    slope_s: float = Field(default=0.06e-3, ge=0)
    kv_tokens: int = Field(default=10_000_000, ge=1)
    prefill_tokens_per_s: float = Field(default=100_000.0, gt=0)
    abort_s: float = Field(default=0.05, ge=0)
    """From cancelling a request until the engine stops working on it."""
    load_s: float = Field(default=1.0, ge=0)
    """Taking new weights."""


class SimTrainerSettings(Settings):
    """A trainer of fixed speed."""

    tokens_per_s: float = Field(default=60_000.0, gt=0)
    """Prompts included."""
    step_s: float = Field(default=0.5, ge=0)
    publish_s: float = Field(default=0.0, ge=0)
    drift: float = Field(default=0.5, ge=0)
    """How fast the log importance weights spread with the age of a token: a model of the ESS."""


class SimReferenceSettings(Settings):
    """A reference model on a device of its own, a sample at a time."""

    tokens_per_s: float = Field(default=180_000.0, gt=0)
    """Prompts included. A forward pass: a third of a training pass."""


class SimLengthSettings(Settings):
    """Response lengths: lognormal, correlated within a group, clipped."""

    median_tokens: float = Field(default=1230.0, gt=0)
    sigma: float = Field(default=1.3, ge=0)
    correlation: float = Field(default=0.7, ge=0, le=1)
    """Of the log-lengths of two responses to one prompt."""
    max_tokens: int = Field(default=16_384, ge=1)
    prompt_tokens: int = Field(default=100, ge=1)
    rows: int | None = Field(default=None, ge=1)
    """So many prompts, which come again every epoch; None: endless ones, each once."""


class SimRewardSettings(Settings):
    """Rewards of lognormal duration on a bounded number of workers; some fail, some hang."""

    workers: int = Field(default=64, ge=1)
    median_s: float = Field(default=0.3, ge=0)
    sigma: float = Field(default=0.8, ge=0)
    timeout_s: float = Field(default=10.0, gt=0)
    failing: float = Field(default=0.0, ge=0, le=1)
    """Share that raises."""
    hanging: float = Field(default=0.0, ge=0, le=1)
    """Share that never returns."""
    solvable: tuple[float, float] = (0.6, 0.6)
    """Beta distribution of the prompts' solve rates."""


class SimSettings(Settings):
    """The [sim] section."""

    engines: SimEngineSettings = SimEngineSettings()
    trainer: SimTrainerSettings = SimTrainerSettings()
    lengths: SimLengthSettings = SimLengthSettings()
    rewards: SimRewardSettings = SimRewardSettings()
    reference: SimReferenceSettings = SimReferenceSettings()
