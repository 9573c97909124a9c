"""The environment "agent", and what it has in common with others whose programs ask the policy over HTTP."""

import importlib.util
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tailrace.contracts.environments import Environment
from tailrace.drivers.data.encoding import Tokenizer
from tailrace.drivers.environments.episodes import EpisodeKind
from tailrace.drivers.environments.history import RequestEncoder
from tailrace.errors import ConfigError
from tailrace.extras.agents.loop_thread import LoopThread
from tailrace.extras.agents.settings import AgentSettings
from tailrace.importing import import_function, install

if TYPE_CHECKING:  # it needs packages that `check` looks for
    from tailrace.extras.agents.session import SessionServer


@asynccontextmanager
async def serving(kind: str, tokenizer: Tokenizer) -> AsyncIterator["tuple[SessionServer, LoopThread]"]:
    """Open the server that programs ask, and the thread of async functions, for the length of the block."""
    from tailrace.extras.agents.session import SessionServer

    server, thread = SessionServer(tokenizer), LoopThread(kind)
    try:
        yield server, thread
    finally:
        await server.close()
        thread.close()


class Programs(EpisodeKind):
    """Environments whose programs send whole conversations, and write the first request themselves."""

    sends_new = False

    @override
    def check(self, settings: Any) -> None:
        for package in ("fastapi", "prometheus_client", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                problem, remedy = f"the package `{package}` is missing", install("serve")
                raise ConfigError("environment.kind", settings.kind, problem, remedy)

    @override
    def writes_first(self, settings: Any) -> bool:
        return not self.reads_template(settings)


class Agents(Programs):
    """Agents: functions or programs."""

    settings = AgentSettings

    unrewarded = "episodes that end because no room is left"

    @override
    def check(self, settings: AgentSettings) -> None:
        super().check(settings)
        from tailrace.extras.agents.agents import make_agent

        make_agent(settings, LoopThread(settings.kind))

    @override
    def reads_template(self, settings: AgentSettings) -> bool:
        return settings.prompt == "data"

    @override
    def gives_every_reward(self, settings: AgentSettings) -> bool:
        if not settings.function:
            return False
        function = import_function(settings.function, "environment.function")
        return inspect.signature(function).return_annotation in (float, int, bool, "float", "int", "bool")

    @override
    @asynccontextmanager
    async def open(
        self, settings: AgentSettings, tokenizer: Tokenizer, encoder: RequestEncoder
    ) -> AsyncIterator[Environment]:
        from tailrace.extras.agents.agents import AgentEnvironment, make_agent

        async with serving(settings.kind, tokenizer) as (server, thread):
            yield AgentEnvironment(settings, make_agent(settings, thread), encoder, server)
