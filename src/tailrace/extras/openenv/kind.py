"""The environment "openenv"."""

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from typing_extensions import override

from tailrace.contracts.environments import Environment
from tailrace.drivers.data.encoding import Tokenizer
from tailrace.drivers.environments.episodes import EpisodeKind
from tailrace.drivers.environments.history import RequestEncoder
from tailrace.errors import ConfigError
from tailrace.extras.openenv.settings import OpenEnvSettings


class OpenEnvEnvironments(EpisodeKind):
    """Environments behind servers of OpenEnv. Each episode has a session of its own."""

    settings = OpenEnvSettings

    sends_new = False

    @override
    def check(self, settings: OpenEnvSettings) -> None:
        if importlib.util.find_spec("openenv") is None:
            remedy = "see docs/how-to/episodes.md"
            raise ConfigError("environment.kind", settings.kind, "openenv is not installed", remedy)
        action_schema(settings)

    @override
    def reads_template(self, settings: OpenEnvSettings) -> bool:
        return True

    @override
    def writes_first(self, settings: OpenEnvSettings) -> bool:
        return True

    @override
    @asynccontextmanager
    async def open(
        self, settings: OpenEnvSettings, tokenizer: Tokenizer, encoder: RequestEncoder
    ) -> AsyncIterator[Environment]:
        # Not at the top: openenv takes seconds to import, and may not be installed.
        from tailrace.extras.openenv.environment import OpenEnvEnvironment

        yield OpenEnvEnvironment(settings, action_schema(settings), encoder)


def action_schema(settings: OpenEnvSettings) -> dict[str, Any]:
    """Return the JSON schema of the actions that a server takes. Raises a ConfigError if it gives none."""
    url = f"{settings.url.rstrip('/')}/schema"
    try:
        reply = httpx.get(url, timeout=settings.step_timeout_s, trust_env=False)
        schema: dict[str, Any] = reply.raise_for_status().json()["action"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as why:
        problem = f"no server of OpenEnv answers GET {url} ({type(why).__name__}: {why})"
        raise ConfigError("environment.url", settings.url, problem, "start it, or name another") from why
    return schema
