"""Agents from what the settings name: a function or a command."""

import asyncio
import inspect
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from tailrace.environments.agent import Agent, Task
from tailrace.environments.agent_thread import AgentThread
from tailrace.environments.settings import MODEL, AgentSettings
from tailrace.environments.tools import in_thread
from tailrace.errors import ConfigError
from tailrace.importing import import_function
from tailrace.workers import orphans

GIVEN = ("row", "messages", "base_url", "api_key", "model")
"""Arguments that a function may name."""
VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
MAX_OUTPUT = 4000
"""Characters of a program's output that an error quotes; the end tells most."""


class ProgramFailed(Exception):
    """A program ended with an error. The message has the end of its output."""


def make_agent(settings: AgentSettings, thread: AgentThread) -> Agent:
    """Return the agent that the settings name.

    Args:
        thread: for an async function.

    Raises:
        ConfigError: the function cannot be imported or called, or there is no such program.
    """
    if settings.function:
        return _from_function(settings.function, thread)
    return _from_command(settings.command)


def _from_function(spec: str, thread: AgentThread) -> Agent:
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

    async def play(task: Task) -> float | None:
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


async def _run_command(command: Sequence[str], task: Task) -> float | None:
    """Run a program for an episode. All that it started ends with the call, and with this process."""
    parent = os.getpid()
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", orphans.__file__, *command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env=os.environ
            | {
                "OPENAI_BASE_URL": task.base_url,
                "OPENAI_API_KEY": task.api_key,
                "OPENAI_MODEL": MODEL,
            },
            start_new_session=True,
            preexec_fn=lambda: orphans.signal_on_parent_death(signal.SIGTERM, parent),
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
        raise ProgramFailed(f"{orphans.exit_cause(process.returncode)}\n{text[-MAX_OUTPUT:]}")
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
