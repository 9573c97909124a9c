"""The command line of an SGLang server that a run starts."""

import os
import subprocess
from pathlib import Path

from tailrace.engine.settings import SglangEngineSettings
from tailrace.engine.vllm_server import Launch
from tailrace.errors import ConfigError

PYTHON_VARIABLE = "SGLANG_PYTHON"
_FIND = "from importlib.util import find_spec; print(bool(find_spec('sglang')))"


def find_python(settings: SglangEngineSettings) -> str:
    """Return the Python interpreter that the settings, or $SGLANG_PYTHON, name.

    Raises:
        ConfigError: there is none, or its environment has no SGLang.
    """
    python = settings.python or os.environ.get(PYTHON_VARIABLE)
    remedy = f"name the interpreter of an environment with SGLang here or in ${PYTHON_VARIABLE}"
    if not python:
        problem = "the run must start SGLang and does not know with what"
        raise ConfigError("engine.python", None, problem, remedy)
    try:
        done = subprocess.run([python, "-c", _FIND], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError("engine.python", python, f"it cannot be started ({error})", remedy) from error
    if done.stdout.strip() != "True":
        raise ConfigError("engine.python", python, "its environment has no SGLang", remedy)
    return python


def launch(
    settings: SglangEngineSettings, *, model: Path, max_context: int, port: int, devices: str | None
) -> Launch:
    """The command line of one server on the loopback interface.

    Args:
        max_context: tokens of a prompt and its completion together.
        devices: CUDA_VISIBLE_DEVICES; None: as this process has it.
    """
    flags = {
        "--model-path": str(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": settings.dtype,
        "--context-length": str(max_context),
        "--max-running-requests": str(settings.max_num_seqs),
        "--tensor-parallel-size": str(settings.tensor_parallel_size),
    }
    words = [word for flag in flags.items() for word in flag]
    command = (find_python(settings), "-m", "sglang.launch_server", *words, "--disable-overlap-schedule")
    env = {"HF_HUB_OFFLINE": "1"} | ({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})
    return Launch((*command, *settings.args), env | settings.env)
