"""`Environment` (base.py) of an agent that talks to the policy as to an OpenAI server.

The agent runs beside the session: in a thread where it is a function, in a process where it is a command.
When the episode is interrupted, the agent is stopped; it begins again later, and the requests that it repeats
get the recorded replies.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tailrace.environments.agent_prompts import RequestEncoder, opening_messages
from tailrace.environments.base import EpisodeOver, Message, Outcome, Policy
from tailrace.environments.session import Session
from tailrace.environments.session_server import SessionServer
from tailrace.environments.settings import AgentSettings
from tailrace.environments.tool_calls import PARSERS
from tailrace.errors import EnvironmentFailed
from tailrace.types import Prompt

STOP_S = 5.0
"""Seconds in which an agent that is stopped must end; one that does not is left alone."""


class Task(NamedTuple):
    """What an agent is given for an episode.

    Args:
        row: the columns of the row.
        messages: the prompt of the data as chat messages.
    """

    row: Mapping[str, object]
    messages: Sequence[Message]
    base_url: str
    api_key: str


Agent = Callable[[Task], Awaitable[float | None]]
"""Plays an episode, and returns its reward or None. Raises any exception. It may be cancelled."""


class AgentEnvironment:
    """`Environment` (base.py).

    Args:
        server: open.
    """

    def __init__(
        self, settings: AgentSettings, agent: Agent, encoder: RequestEncoder, server: SessionServer
    ) -> None:
        self._settings, self._agent, self._encoder, self._server = settings, agent, encoder, server

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """As Environment.run."""
        settings = self._settings
        contexts = self._encoder.contexts(prompt, settings.history, settings.max_branches)
        with self._server.session(contexts, PARSERS[settings.parser]) as session:
            task = Task(prompt.row, opening_messages(prompt), self._server.url(session), session.key)
            agent = asyncio.ensure_future(self._agent(task))
            try:
                await self._serve(session, agent, policy)
                return _outcome(session, agent)
            finally:
                agent.cancel()
                await asyncio.wait([agent], timeout=STOP_S)

    async def _serve(self, session: Session, agent: "asyncio.Future[float | None]", policy: Policy) -> None:
        """Answer requests until the agent has ended."""
        while True:
            waiting = asyncio.ensure_future(session.waiting())
            limit_s, either = self._settings.idle_timeout_s, asyncio.FIRST_COMPLETED
            both: list[asyncio.Future[Any]] = [waiting, agent]
            try:
                await asyncio.wait(both, timeout=limit_s, return_when=either)
            finally:
                waiting.cancel()
            if agent.done():
                return
            if not waiting.done():
                raise EnvironmentFailed("agent timeout", f"no request for {limit_s:g} s")
            await session.answer(waiting.result(), policy)


def _outcome(session: Session, agent: "asyncio.Future[float | None]") -> Outcome:
    """What follows from an agent that has ended.

    Raises:
        EpisodeOver: it has raised because no room was left.
        EnvironmentFailed: it has raised for another reason, made no request, or its reward is no number.
    """
    try:
        reward = agent.result()
    except (Exception, SystemExit) as why:
        if session.is_over:
            raise EpisodeOver from why
        reason = "rewritten history" if session.num_refused else "agent"
        raise EnvironmentFailed(reason, f"{type(why).__name__}: {why}") from why
    if not session.num_turns:
        raise EnvironmentFailed("no request", "the agent ended and had sent no request")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise EnvironmentFailed("reward", f"the agent returned {reward!r:.80}, which is no number")
    return Outcome(reward, {"rewritten_history": session.num_rewritten})
