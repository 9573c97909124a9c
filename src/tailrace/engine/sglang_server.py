"""The command line of an SGLang server that a run starts."""

from pathlib import Path

from tailrace.engine.launch import Launch, find_interpreter
from tailrace.engine.settings import SglangEngineSettings

PYTHON_VARIABLE = "SGLANG_PYTHON"
_FIND = "from importlib.util import find_spec; print(find_spec('sglang') or '')"


def find_python(settings: SglangEngineSettings) -> str:
    """Return the Python interpreter that the settings, or $SGLANG_PYTHON, name.

    Raises:
        ConfigError: there is none, or its environment has no SGLang.
    """
    python, _ = find_interpreter(settings, "SGLang", PYTHON_VARIABLE, _FIND)
    return python


def launch(settings: SglangEngineSettings, *, model: Path, max_context: int, port: int) -> Launch:
    """The command line of one server on the loopback interface.

    Args:
        max_context: tokens of a prompt and its completion together.
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
    return Launch((*command, *settings.args), {"HF_HUB_OFFLINE": "1"} | settings.env)
