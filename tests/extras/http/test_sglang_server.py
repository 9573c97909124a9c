"""The command line of an SGLang server."""

import sys
from pathlib import Path

import pytest

from tailrace.errors import ConfigError
from tailrace.extras.http.dialect import find_interpreter
from tailrace.extras.http.settings import SglangEngineSettings
from tailrace.extras.http.sglang import launch


def test_a_run_that_knows_no_python_with_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PYTHON", raising=False)
    for python, problem in ((None, "does not know with what"), ("/no/python", "cannot be started")):
        with pytest.raises(ConfigError, match=problem):
            find_interpreter(SglangEngineSettings(python=python))
    with pytest.raises(ConfigError, match="its environment has no SGLang"):
        find_interpreter(SglangEngineSettings(python=sys.executable))


def test_the_command_line_has_the_settings_and_what_an_update_in_flight_needs(tmp_path: Path) -> None:
    python = tmp_path / "python"  # stands for an environment with SGLang
    python.write_text("#!/bin/sh\necho True\n")
    python.chmod(0o755)
    settings = SglangEngineSettings(
        python=str(python),
        tensor_parallel_size=2,
        max_num_seqs=7,
        args=("--log-level", "error"),
        env={"A": "1"},
    )
    server = launch(settings, model=tmp_path, max_context=99, port=1234)
    assert server.command == (
        *(str(python), "-m", "sglang.launch_server", "--model-path", str(tmp_path), "--host", "127.0.0.1"),
        *("--port", "1234", "--dtype", "float32", "--context-length", "99", "--max-running-requests", "7"),
        *("--tensor-parallel-size", "2", "--disable-overlap-schedule", "--log-level", "error"),
    )
    assert server.env == {"HF_HUB_OFFLINE": "1", "A": "1"}
