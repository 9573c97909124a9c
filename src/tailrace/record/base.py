"""The settings of what a run records."""

from pydantic import Field

from tailrace.settings import RunFunction, Settings


class RecordSettings(Settings):
    """Records of a run besides its metrics, and limits that warn."""

    sinks: tuple[RunFunction, ...] = ()
    """Your own sinks: 'package.module:function' or 'file.py:function'. The function gets the output
    directory (a `Path`) and returns an object with `on(event)` and `close()`; `tailrace.record.events` has
    the events."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that get the rows of metrics.jsonl, of runs and of simulations: `trackio`, `wandb`,
    `tensorboard`, `mlflow`, `swanlab`, each an extra of its name, or one that another package registers."""
    tracker_samples: int = Field(default=0, ge=0)
    """Samples of each optimizer step that wandb, trackio and mlflow get as a table: prompt, response, reward.
    0: no text of a sample leaves the machine."""
    project: str = Field(default="tailrace", min_length=1)
    """The project in trackio, wandb and swanlab, and the experiment in mlflow. The run has the name of the
    output directory."""
    print_samples_every: int = Field(default=20, ge=0)
    """Optimizer steps between two samples whose text the terminal shows, from the first step on. 0: none."""
    verbose: bool = False
    """Whether the terminal's line of a step has every figure, or those that fit 80 columns."""
    token_samples: int = Field(default=16, ge=0)
    """Samples of each step whose tokens and log-probs are recorded for `tailrace view`. At least 0."""
    alarm_kl: float = Field(default=0.1, gt=0)
    """KL in nats a token between engine and trainer, on samples of the very weights that are trained, above
    which the terminal shows an alarm. Above 0."""
    alarm_ess: float = Field(default=0.3, ge=0, le=1)
    """Effective sample size of a step without older tokens, as a share, below which the terminal shows an
    alarm. Range: [0, 1]."""
    alarm_masked: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's completion tokens that are masked, above which the terminal says so once."""
