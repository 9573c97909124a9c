"""Opens the environment that the [environment] section names."""

import importlib.util
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from typing_extensions import override

from tailrace.contracts.environments import Environment, Outcome, Policy
from tailrace.drivers.data.encoding import Tokenizer
from tailrace.drivers.environments.settings import (
    AgentSettings,
    EnvironmentSettings,
    EpisodeSettings,
    PythonSettings,
    SingleTurnSettings,
    ToolsSettings,
    VerifiersSettings,
)
from tailrace.drivers.environments.tools import ToolsEnvironment, import_tools, schemas_of
from tailrace.errors import ConfigError
from tailrace.extras.agents.history import RequestEncoder
from tailrace.extras.agents.loop_thread import LoopThread
from tailrace.importing import import_function, install
from tailrace.types import Prompt


class FromFunction(Environment):
    """An environment from an async function."""

    def __init__(self, function: Callable[[Prompt, Policy], Awaitable[Outcome]]) -> None:
        self._function = function

    @override
    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        return await self._function(prompt, policy)


@asynccontextmanager
async def open_environment(
    settings: EnvironmentSettings, tokenizer: Tokenizer, encoder: RequestEncoder
) -> AsyncIterator[Environment | None]:
    """Open an environment for the length of the block; None for single turns. Tokenizer and encoder are for
    agents and tasksets. Raises a ConfigError if the settings name what cannot be imported or made."""
    match settings:
        case SingleTurnSettings():
            yield None
        case ToolsSettings():
            yield ToolsEnvironment(settings, import_tools(settings))
        case PythonSettings():
            yield _import_environment(settings)
        case AgentSettings() | VerifiersSettings():
            async with _open_agents(settings, tokenizer, encoder) as agents:
                yield agents


def check_environment(settings: EnvironmentSettings) -> None:
    """Check what can be checked before anything starts. Raises a ConfigError as `open_environment`."""
    tools_of(settings)
    if isinstance(settings, PythonSettings):
        _import_environment(settings)
    if isinstance(settings, AgentSettings | VerifiersSettings):
        for package in ("fastapi", "prometheus_client", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                problem, remedy = f"the package `{package}` is missing", install("serve")
                raise ConfigError("environment.kind", settings.kind, problem, remedy)
    if isinstance(settings, AgentSettings):
        # Not at the top: it needs these packages.
        from tailrace.extras.agents.agents import make_agent

        make_agent(settings, LoopThread(settings.kind))


def gives_every_reward(settings: EpisodeSettings) -> bool:
    """Return whether the environment gives the reward of every episode that it ends itself, as far as that
    can be known before it runs: from its kind, or from the type hint of an agent."""
    if isinstance(settings, AgentSettings) and settings.function:
        function = import_function(settings.function, "environment.function")
        hint = inspect.signature(function).return_annotation
        return hint in (float, int, bool, "float", "int", "bool")
    return settings.always_rewards


def tools_of(settings: EnvironmentSettings) -> list[dict[str, object]]:
    """Return the tools that each prompt describes to the model, as JSON schemas. Raises a ConfigError if one
    cannot be imported or described."""
    return schemas_of(import_tools(settings)) if isinstance(settings, ToolsSettings) else []


@asynccontextmanager
async def _open_agents(
    settings: AgentSettings | VerifiersSettings, tokenizer: Tokenizer, encoder: RequestEncoder
) -> AsyncIterator[Environment]:
    from tailrace.extras.agents.agents import AgentEnvironment, make_agent
    from tailrace.extras.agents.session import SessionServer

    server, thread = SessionServer(tokenizer), LoopThread(settings.kind)
    try:
        if isinstance(settings, AgentSettings):
            yield AgentEnvironment(settings, make_agent(settings, thread), encoder, server)
        else:
            # Not at the top: verifiers takes seconds to import, and may not be installed.
            from tailrace.extras.verifiers.environment import open_verifiers

            async with open_verifiers(settings, encoder, server, thread) as environment:
                yield environment
    finally:
        await server.close()
        thread.close()


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
