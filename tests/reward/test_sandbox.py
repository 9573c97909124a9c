"""Programs in the sandbox: what they return, what stops them, what they cannot reach."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import pytest

from helpers.bubblewrap import needs_bubblewrap
from tailrace.errors import ConfigError, SandboxFailed
from tailrace.reward import sandbox as module
from tailrace.reward.base import CodeSettings, SandboxKind
from tailrace.reward.sandbox import Execution, Sandbox, check_installed
from tailrace.reward.timeout import TimeLimit

KINDS = [pytest.param("bubblewrap", marks=needs_bubblewrap), "none"]
SETTINGS = CodeSettings(memory_mib=128, processes=4, tmp_mib=8, output_kib=16)


def run_all(
    *jobs: Mapping[str, Any] | str, kind: SandboxKind = "bubblewrap", stdin: str = "", limit_s: float = 20.0
) -> list[Execution]:
    """Run programs side by side."""

    async def main() -> list[Execution]:
        box = Sandbox(kind, SETTINGS)
        whole = [{"program": job} if isinstance(job, str) else job for job in jobs]
        return await asyncio.gather(*(box.run(job, stdin, TimeLimit(limit_s)) for job in whole))

    return asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_reads_a_text_and_prints_another(kind: SandboxKind) -> None:
    (ended,) = run_all("print(input()[::-1])", kind=kind, stdin="abc\n")
    assert (ended.end, ended.exit_code, ended.output, ended.answer) == ("exited", 0, b"cba\n", b"")


@pytest.mark.parametrize("kind", KINDS)
def test_calls_and_assertions_report_their_outcome(kind: SandboxKind) -> None:
    program = (
        "print('noise')\nclass Solution:\n    def double(self, x): return [x, x]\ndef add(a, b): return a + b"
    )
    checked = {"program": program, "secret": "s3cret"}
    added, doubled, held, failed, left = run_all(
        {"program": program, "function": "add", "arguments": [2, 3]},
        {"program": program, "function": "double", "arguments": ["x"]},
        {**checked, "assertion": "assert add(1, 1) == 2"},
        {**checked, "assertion": "assert add(1, 1) == 3"},
        {**checked, "program": "raise SystemExit(0)", "assertion": ""},
        kind=kind,
    )
    assert (added.answer, doubled.answer, held.answer) == (b"5", b'["x", "x"]', b"s3cret")
    assert (failed.answer, failed.exit_code, left.answer, left.exit_code) == (b"", 1, b"", 0)
    assert added.output == b""


@pytest.mark.parametrize("kind", KINDS)
def test_time_and_output_are_bounded(kind: SandboxKind) -> None:
    (endless,) = run_all("while True: pass", kind=kind, limit_s=0.3)
    assert endless.end == "timeout"
    flood, report = run_all(
        "while True: print('x' * 1000)",
        {"program": "def f(): return 'x' * 10**6", "function": "f", "arguments": []},
        kind=kind,
    )
    assert (flood.end, flood.output) == ("flood", ((b"x" * 1000 + b"\n") * 17)[:16384])
    assert report.end == "flood"


@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_files_are_bounded(kind: SandboxKind) -> None:
    memory, file = run_all(
        "try: bytearray(2**28)\nexcept MemoryError: print('refused')",
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "import tempfile\nwith tempfile.TemporaryFile(buffering=0) as file:\n"
        "    try: print(file.write(bytes(2**24)), file.write(b'x'))\n    except OSError: print('refused')",
        kind=kind,
    )
    assert (memory.output, file.output) == (b"refused\n", b"refused\n")


@needs_bubblewrap
def test_processes_and_files_are_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_SECRET", "secret")
    forks, environment, network, files, home, shared, traced = run_all(
        "import os, signal\nchildren = 0\ntry:\n    while True:\n"
        "        if os.fork() == 0: signal.pause()\n        children += 1\n"
        "except BlockingIOError: print(children)",
        "import os\nprint('TAILRACE_SECRET' in os.environ, os.environ['HOME'])",
        "import socket\nprint(socket.if_nameindex())",
        "import os\nfor folder in ('/', '/usr', '/dev', '/dev/shm', '/proc/sys/kernel', '/tmp'):\n"
        "    try:\n        open(folder + '/x', 'w'); print(folder)\n    except OSError: pass",
        f"import os\nprint(os.path.exists({__file__!r}), os.getuid(), len(os.listdir('/proc/self/fd')))",
        "import os\ntry: os.memfd_create('x')\nexcept PermissionError: print('refused')",
        "import ctypes\nprint(ctypes.CDLL(None).ptrace(0, 0, 0, 0))",
    )
    assert forks.output == b"3\n"
    assert environment.output == b"False /tmp\n"
    assert network.output == b"[(1, 'lo')]\n"
    assert files.output == b"/tmp\n"
    assert home.output == b"False 1000 5\n"  # the job's descriptor is closed, the answer's, too
    assert (shared.output, traced.output) == (b"refused\n", b"-1\n")


@needs_bubblewrap
def test_a_daemon_ends_with_its_program() -> None:
    (ended,) = run_all("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint(1)")
    assert (ended.end, ended.output) == ("exited", b"1\n")


def test_a_sandbox_that_does_not_start_its_program_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INSIDE", "raise SystemExit('no such thing')")
    with pytest.raises(SandboxFailed, match="no such thing"):
        run_all("", kind="none")
    with pytest.raises(
        ConfigError, match=r"^reward.sandbox = 'none': no program can be run: no such thing; "
    ):
        asyncio.run(Sandbox("none", SETTINGS).check())


def test_bubblewrap_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": "/nowhere"})
    with pytest.raises(ConfigError, match=r"there is no program 'bwrap' here; install bubblewrap, or set it"):
        check_installed()
