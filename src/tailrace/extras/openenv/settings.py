"""Settings of environments behind servers of OpenEnv."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from tailrace.drivers.environments.settings import EpisodeSettings
from tailrace.settings import Resumable


class OpenEnvSettings(EpisodeSettings):
    """An environment behind a server of OpenEnv: each turn of the model is an action."""

    always_rewards: ClassVar[bool] = True

    kind: Literal["openenv"] = "openenv"
    """Selects this kind of environment."""
    url: Resumable[str] = Field(pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$")
    """Base address of the server, such as `http://127.0.0.1:8000`."""
    reset: Mapping[str, str] = {}
    """Arguments of the environment's `reset`, each with the column of the row that has its value. Without
    `seed` the seed is the number of the row, so that the samples of a group play the same task."""
    observation: str = ""
    """The field of an observation that the model reads. Empty: all fields, as JSON."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of the episode, of the rewards of its steps."""
    max_turns: int = Field(default=8, ge=1, le=100_000)
    """Actions in an episode; at least 1."""
    max_sessions: Resumable[int] = Field(default=64, ge=1, le=65_536)
    """Episodes at a time; at most what the server was started for (`max_concurrent_envs`)."""
    step_timeout_s: Resumable[float] = Field(default=60.0, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds for a connection, and for each answer of the server; above 0, at most a day."""
