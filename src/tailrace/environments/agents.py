"""Agents from what the settings name: a function or a command."""

import asyncio
import contextvars
import inspect
import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from tailrace.environments.agent import Agent, Task
from tailrace.environments.agent_settings import MODEL, AgentSettings
from tailrace.environments.tools import in_thread
from tailrace.errors import ConfigError
from tailrace.importing import import_function
from tailrace.workers.orphans import exit_cause, kill_group, signal_on_parent_death

GIVEN = ("row", "messages", "base_url", "api_key", "model")
"""Arguments of a function."""
MAX_OUTPUT = 4000
"""Characters of a program's output that are kept; the end tells most."""


def make_agent(settings: AgentSettings) -> Agent:
    """Return the agent that the settings name.

    Raises:
        ConfigError: the function cannot be imported or called, or there is no such program.
    """
    return _function(settings.function) if settings.function else _command(settings.command)
