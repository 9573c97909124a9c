"""Opens the environment of a run: tools of this package, or a user's own environment."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from typing_extensions import override

from tailrace.contracts.data import Prompts
from tailrace.contracts.environments import Environment, Outcome, Policy
from tailrace.drivers.data.encoding import Tokenizer
from tailrace.drivers.environments.history import RequestEncoder
from tailrace.drivers.environments.settings import EnvironmentSettings, PythonSettings
from tailrace.errors import ConfigError
from tailrace.importing import import_function
from tailrace.kinds import kind_of
from tailrace.types import Prompt


class EnvironmentKind:
    """A kind of environment: this one is "single_turn". The settings are always those of this kind."""

    sends_new: ClassVar[bool] = True
    """Whether it sends new messages only. Another one sends whole conversations, and compares them itself."""
    unrewarded: ClassVar[str] = ""
    """Episodes that it gives no reward although it gives every reward, for a warning."""

    def check(self, settings: Any) -> None:
        """Check what `open` needs and `tools` does not, before anything starts. Raises a ConfigError."""

    def tools(self, settings: Any) -> list[dict[str, object]]:
        """Return the tools of each prompt as JSON schemas. Raises a ConfigError if one has no description."""
        return []

    def reads_template(self, settings: Any) -> bool:
        """Return whether prompts of the data must go through the model's chat template."""
        return False

    def gives_every_reward(self, settings: Any) -> bool:
        """Return whether it gives the reward of every episode that it ends itself, as far as that can be
        known before it runs."""
        return bool(settings.always_rewards)

    def prompts(self, settings: Any, prompts: Prompts, encoder: Callable[[], RequestEncoder]) -> Prompts:
        """Return the prompts, or what programs that write their own leave of them."""
        return prompts

    @asynccontextmanager
    async def open(
        self, settings: Any, tokenizer: Tokenizer, encoder: RequestEncoder
    ) -> AsyncIterator[Environment | None]:
        """Open it for the length of the block; None for single turns. Raises a ConfigError if the settings
        name what cannot be imported or made. `encoder`: of requests of programs."""
        yield None


def environment_kind(settings: EnvironmentSettings) -> EnvironmentKind:
    """Return the kind of an environment."""
    kind: EnvironmentKind = kind_of("environment", settings.kind)
    return kind


class FromFunction(Environment):
    """An environment from an async function."""

    def __init__(self, function: Callable[[Prompt, Policy], Awaitable[Outcome]]) -> None:
        self._function = function

    @override
    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        return await self._function(prompt, policy)


class PythonEnvironments(EnvironmentKind):
    """An environment of the user's own."""

    @override
    def check(self, settings: PythonSettings) -> None:
        _import_environment(settings)

    @override
    @asynccontextmanager
    async def open(
        self, settings: PythonSettings, tokenizer: Tokenizer, encoder: RequestEncoder
    ) -> AsyncIterator[Environment]:
        yield _import_environment(settings)


def _import_environment(settings: PythonSettings) -> Environment:
    key, spec = "environment.environment", settings.environment
    found: Any = import_function(spec, key)
    if inspect.iscoroutinefunction(found):
        return FromFunction(found)
    try:
        environment: Any = found(**settings.arguments)
    except Exception as why:
        remedy = "check environment.arguments"
        raise ConfigError(key, spec, f"it cannot be made ({type(why).__name__}: {why})", remedy) from why
    if not inspect.iscoroutinefunction(getattr(environment, "run", None)):
        remedy = "write `async def run(self, prompt, policy)`, which returns an Outcome"
        raise ConfigError(key, spec, "it has no async method `run`", remedy)
    made: Environment = environment
    return made
