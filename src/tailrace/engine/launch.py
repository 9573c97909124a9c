"""How an inference server is started: its command line, and the interpreter that has it."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from tailrace.engine.settings import ServerEngineSettings
from tailrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started.

    Args:
        env: environment variables beside those of this process.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]


def find_interpreter(
    settings: ServerEngineSettings, server: str, variable: str, question: str
) -> tuple[str, str]:
    """Find the Python interpreter that the settings, or an environment variable, name.

    Args:
        server: name of what its environment must have.
        question: a program that prints something if the environment has it.

    Returns:
        The interpreter, and what the program printed.

    Raises:
        ConfigError: none is named, it cannot be started, or its environment lacks the server.
    """
    python = settings.python or os.environ.get(variable)
    remedy = f"name the interpreter of an environment with {server} here or in ${variable}"
    if not python:
        problem = f"the run must start {server} and does not know with what"
        raise ConfigError("engine.python", None, problem, remedy)
    try:
        done = subprocess.run([python, "-c", question], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError("engine.python", python, f"it cannot be started ({error})", remedy) from error
    if not (found := done.stdout.strip()):
        raise ConfigError("engine.python", python, f"its environment has no {server}", remedy)
    return python, found
