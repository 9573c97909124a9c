"""`Environment` of an agent that talks to the policy as to an OpenAI server.

The agent runs beside the session: in a thread where it is a function, in a process where it is a command.
When the episode is interrupted, the agent is stopped; it begins again later, and the requests that it repeats
get the recorded replies.
"""

import asyncio
import inspect
import json
import math
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
from typing_extensions import override

from tailrace.contracts.environments import Environment, EpisodeOver, Message, Outcome, Policy
from tailrace.drivers.environments.history import RequestEncoder, opening_messages
from tailrace.drivers.environments.settings import MODEL
from tailrace.drivers.environments.tools import PARSERS, in_thread
from tailrace.drivers.workers import process_tree
from tailrace.errors import ConfigError, EnvironmentFailed
from tailrace.extras.agents.loop_thread import LoopThread
from tailrace.extras.agents.session import Session, SessionServer
from tailrace.extras.agents.settings import AgentSettings
from tailrace.importing import import_function
from tailrace.types import Prompt

GIVEN = ("row", "messages", "base_url", "api_key", "model")
"""Arguments that a function may name."""
VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
MAX_OUTPUT = 4000
"""Characters of a program's output that an error quotes; the end tells most."""


class AgentTask(NamedTuple):
    """The task of an agent for one episode."""

    row: Mapping[str, object]
    """The columns of the row."""
    messages: Sequence[Message]
    """The prompt of the data as chat messages."""
    base_url: str
    api_key: str


Agent = Callable[[AgentTask], Coroutine[Any, Any, float | None]]
"""Plays an episode, and returns its reward or None. Raises any exception. It may be cancelled."""


class AgentEnvironment(Environment):
    """Plays the episodes of an agent."""

    def __init__(
        self, settings: AgentSettings, agent: Agent, encoder: RequestEncoder, server: SessionServer
    ) -> None:
        self._settings, self._agent, self._encoder, self._server = settings, agent, encoder, server

    @override
    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        settings = self._settings
        contexts = self._encoder.contexts(prompt, settings.history, settings.max_branches)
        with self._server.session(contexts, PARSERS[settings.parser]) as session:
            task = AgentTask(prompt.row, opening_messages(prompt), self._server.url(session), session.key)
            ended = await session.serve(self._agent(task), policy, idle_timeout_s=settings.idle_timeout_s)
        return _outcome(session, ended)


def _outcome(session: Session, agent: "asyncio.Future[float | None]") -> Outcome:
    """Return the outcome of an agent that has ended.

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


class ProgramFailed(Exception):
    """A program ended with an error. The message has the end of its output."""


def make_agent(settings: AgentSettings, thread: LoopThread) -> Agent:
    """Return the agent that the settings name. An async function runs in the thread. Raises a ConfigError if
    the function cannot be imported or called, or there is no such program."""
    if settings.function:
        return _from_function(settings.function, thread)
    return _from_command(settings.command)


def _from_function(spec: str, thread: LoopThread) -> Agent:
    key = "environment.function"
    function: Any = import_function(spec, key)
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = [name for name in GIVEN if takes_all or any(each.name == name for each in parameters)]
    for each in parameters:
        may_stay_empty = each.default is not each.empty or each.kind in VARIADIC
        if each.kind is each.POSITIONAL_ONLY or not (each.name in GIVEN or may_stay_empty):
            problem = f"its parameter {each.name!r} is given by nothing"
            raise ConfigError(key, spec, problem, f"choose from {', '.join(GIVEN)}, by name")
    if "base_url" not in names:
        raise ConfigError(key, spec, "it does not take base_url, where the policy is", "add the parameter")

    async def play(task: AgentTask) -> float | None:
        given = {**task._asdict(), "model": MODEL}
        arguments = {name: given[name] for name in names}
        is_async = inspect.iscoroutinefunction(function)
        playing = thread.run(function(**arguments)) if is_async else in_thread(function, arguments)
        reward: float | None = await playing
        return reward

    return play


def _from_command(command: Sequence[str]) -> Agent:
    if shutil.which(command[0]) is None:
        problem = f"there is no program {command[0]!r}"
        raise ConfigError("environment.command", list(command), problem, "install it, or give its path")
    return partial(_run_command, command)


async def _run_command(command: Sequence[str], task: AgentTask) -> float | None:
    """Run a program for an episode. All that it started ends with the call, and with this process."""
    parent = os.getpid()
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", process_tree.__file__, *command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env=os.environ
            | {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "OPENAI_MODEL": MODEL},
            start_new_session=True,
            preexec_fn=lambda: process_tree.signal_on_parent_death(signal.SIGTERM, parent),
        )
    )
    try:
        # asyncio kills only the first process of a program whose start is cancelled.
        process = await asyncio.shield(starting)
        output, _ = await process.communicate(msgspec.json.encode(task.row))
    finally:
        process = await starting
        with suppress(ProcessLookupError):
            for each in (signal.SIGTERM, signal.SIGCONT):  # it may be stopped
                process.send_signal(each)
        await process.wait()
    text = output.decode(errors="replace")
    if process.returncode:
        raise ProgramFailed(f"{process_tree.exit_cause(process.returncode)}\n{text[-MAX_OUTPUT:]}")
    return _reward(text)


def _reward(output: str) -> float | None:
    """The reward in the last line of a program's output; None: it gives none."""
    last = output.strip().rpartition("\n")[-1]
    try:
        found = json.loads(last)
    except json.JSONDecodeError:
        return None
    reward = found.get("reward") if isinstance(found, dict) else None
    return reward if isinstance(reward, int | float) else None
