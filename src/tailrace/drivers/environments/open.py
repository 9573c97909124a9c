"""A kind of environment, as a run asks it. Kinds of several turns are in episodes.py."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from tailrace.contracts.data import Prompts
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import Reference
from tailrace.drivers.data.encoding import Tokenizer
from tailrace.drivers.data.settings import DataSettings
from tailrace.drivers.environments.settings import EnvironmentSettings
from tailrace.kinds import kind_of
from tailrace.rollout.router import RunEpisode


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of a run that an environment is checked against, and played with."""

    data: DataSettings
    sampling: SamplingSettings
    tokenizer: Tokenizer
    max_context_tokens: int


class EnvironmentKind:
    """A kind of environment: this one is "single_turn". The settings are always those of this kind."""

    unrewarded: ClassVar[str] = ""
    """Episodes that it gives no reward although it gives every reward, for a warning."""

    def check_episodes(self, settings: Any, run: Surroundings) -> None:
        """Check the environment before anything starts. Raises a ConfigError if it cannot be imported, the
        model has no chat template that suits it, or the data do not use the template."""

    def tools(self, settings: Any) -> list[dict[str, object]]:
        """Return the tools of each prompt as JSON schemas. Raises a ConfigError if one has no description."""
        return []

    def gives_every_reward(self, settings: Any) -> bool:
        """Return whether it gives the reward of every episode that it ends itself, as far as that can be
        known before it runs."""
        return False

    def prompts(self, settings: Any, prompts: Prompts, run: Surroundings) -> Prompts:
        """Return the prompts, or what programs that write their own leave of them."""
        return prompts

    @asynccontextmanager
    async def play(
        self, settings: Any, run: Surroundings, reference: Reference | None, *, must_reward: bool
    ) -> AsyncIterator[RunEpisode | None]:
        """Open it for the length of the block; None for single turns. Raises a ConfigError if the settings
        name what cannot be imported or made. `must_reward`: whether nothing else gives rewards."""
        yield None


def environment_kind(settings: EnvironmentSettings) -> EnvironmentKind:
    """Return the kind of an environment."""
    kind: EnvironmentKind = kind_of("environment", settings.kind)
    return kind
