"""Programs in the sandbox: what they return, what stops them, what they cannot reach."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from helpers.bubblewrap import needs_bubblewrap
from tailrace.drivers.reward.settings import CodeSettings, SandboxKind
from tailrace.errors import ConfigError, SandboxFailed
from tailrace.extras.sandbox import sandbox as module
from tailrace.extras.sandbox.sandbox import Execution, Sandbox, check_installed
from tailrace.rollout.reward_timeout import TimeLimit

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
async def test_a_program_whose_start_is_cancelled_ends(kind: SandboxKind) -> None:
    """At any moment of the start."""
    box = Sandbox(kind, SETTINGS)
    for millisecond in range(40):
        running = asyncio.create_task(box.run({"program": ""}, "", TimeLimit(20.0)))
        await asyncio.sleep(millisecond / 1000)
        running.cancel()
        async with asyncio.timeout(30):
            await asyncio.wait([running])


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


SEEKS = """
import gc, os, re, sys
def found(value, seen):
    if isinstance(value, (str, bytes)):
        text = value if isinstance(value, str) else value.decode(errors="replace")
        return re.findall("secret-[0-9]+", text)
    if id(value) in seen:
        return []
    seen.add(id(value))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [each for part in inner for each in found(part, seen)]
def cheat(words):
    for fd in range(3, 64):
        for word in words:
            try: os.write(fd, word.encode())
            except OSError: pass
    os._exit(0)
"""
ATTACKS = {
    "frames": """
words, frame = [], sys._getframe()
while frame:
    words += found(dict(frame.f_locals), set()) + found(frame.f_globals, set())
    frame = frame.f_back
cheat(words)
""",
    "objects": "cheat([word for each in gc.get_objects() for word in found(each, set())])",
    "descriptors": """
words = []
for fd in range(3, 64):
    try:
        os.set_blocking(fd, False)
        words += found(os.read(fd, 65536), set())
    except OSError:
        pass
    try:
        words += found(open(f"/proc/self/fd/{fd}", "rb", buffering=0).read(65536), set())
    except OSError:
        pass
cheat(words)
""",
    "replaced functions": """
import builtins, json
builtins.exec = builtins.eval = builtins.compile = lambda *given: None
builtins.bytes = bytearray
os.write = lambda fd, data: len(data)
json.loads = lambda text: {}
""",
    "at exit": """
import atexit
atexit.register(lambda: cheat([word for each in gc.get_objects() for word in found(each, set())]))
""",
    "traceback": """
def hook(kind, value, trace):
    words = []
    while trace:
        words += found(dict(trace.tb_frame.f_locals), set())
        trace = trace.tb_next
    cheat(words)
sys.excepthook = hook
""",
    "thread": """
import threading, time
def watch():
    while True:
        for frame in sys._current_frames().values():
            while frame:
                if words := found(dict(frame.f_locals), set()): cheat(words)
                frame = frame.f_back
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
""",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_looks_for_the_secret_does_not_pass_an_assertion(kind: SandboxKind) -> None:
    assertion = "import time; time.sleep(0.2); assert False"
    jobs = [
        {"program": SEEKS + attack, "assertion": assertion, "secret": "s3cret"} for attack in ATTACKS.values()
    ]
    ends = dict(zip(ATTACKS, run_all(*jobs, kind=kind, limit_s=10.0), strict=True))
    assert {name: ended.answer for name, ended in ends.items() if b"secret-11" in ended.answer} == {}


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
def test_files_without_content_and_buffers_of_sockets_are_bounded() -> None:
    """Neither the size of /tmp nor the address space counts them."""
    folders, buffers, sockets = run_all(
        "import os\nfor i in range(10**9): os.mkdir(f'/tmp/{i}')",
        "import socket\nends = socket.socketpair()\nends[0].setblocking(False)\n"
        "for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):\n"
        "    try: ends[0].setsockopt(socket.SOL_SOCKET, option, 2**24)\n"
        "    except PermissionError: print('refused')\n"
        "sent = 0\ntry:\n    while True: sent += ends[0].send(bytes(4096))\n"
        "except BlockingIOError: print(sent < 2**19)",
        "import socket\nfor family in (1, 2, 10, 16, 17, 38, 40):\n"
        "    try: socket.socket(family, socket.SOCK_STREAM); print(family)\n    except PermissionError: pass",
        limit_s=60.0,
    )
    assert folders.end == "flood" and folders.seconds < 60
    assert (buffers.output, sockets.output) == (b"refused\nrefused\nTrue\n", b"1\n")


@needs_bubblewrap
def test_python_may_lie_below_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(dir="/tmp") as parent:
        folder = f"{parent}/venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        monkeypatch.setattr(sys, "prefix", folder)
        monkeypatch.setattr(sys, "executable", str(Path(folder, "bin", "python")))
        (ended,) = run_all(
            "import os, sys\nprint(sys.prefix)\nopen('/tmp/x', 'w')\nprint(sorted(os.listdir('/tmp')))"
        )
        assert ended.output.decode() == f"{folder}\n{sorted([Path(parent).name, 'x'])}\n"


@needs_bubblewrap
def test_the_path_of_the_interpreter_may_lead_through_a_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(dir="/tmp") as parent:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{parent}/venv"], check=True)
        Path(parent, "here").mkdir()
        monkeypatch.setattr(sys, "prefix", f"{parent}/venv")
        monkeypatch.setattr(sys, "executable", f"{parent}/here/../venv/bin/python")
        (ended,) = run_all("import sys\nprint(sys.prefix)")
        assert ended.output.decode() == f"{parent}/venv\n"


@needs_bubblewrap
def test_processes_and_files_are_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_SECRET", "secret")
    forks, environment, network, files, home, shared, traced = run_all(
        "import os, signal\nchildren = 0\ntry:\n    while True:\n"
        "        if os.fork() == 0: signal.pause()\n        children += 1\n"
        "except BlockingIOError: print(children)",
        "import os\nprint('TAILRACE_SECRET' in os.environ, os.environ['HOME'])",
        "print([line.split(':')[0].strip() for line in open('/proc/net/dev')][2:])",
        "import os\nfor folder in ('/', '/usr', '/dev', '/dev/shm', '/proc/sys/kernel', '/tmp'):\n"
        "    try:\n        open(folder + '/x', 'w'); print(folder)\n    except OSError: pass",
        f"import os\nprint(os.path.exists({__file__!r}), os.getuid(), len(os.listdir('/proc/self/fd')))",
        "import os\ntry: os.memfd_create('x')\nexcept PermissionError: print('refused')",
        "import ctypes\nprint(ctypes.CDLL(None).ptrace(0, 0, 0, 0))",
    )
    assert forks.output == b"3\n"
    assert environment.output == b"False /tmp\n"
    assert network.output == b"['lo']\n"
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


@needs_bubblewrap
@pytest.mark.parametrize("place", [shutil.copy, lambda source, target: Path(target).symlink_to(source)])
def test_bubblewrap_may_lie_in_any_folder_of_the_path(
    monkeypatch: pytest.MonkeyPatch, place: Callable[[str, str], object]
) -> None:
    """Where no usual folder has one."""
    with TemporaryDirectory(dir="/var") as folder:
        os.chmod(folder, 0o755)
        for tool in map(shutil.which, ("bwrap", "setpriv")):
            place(str(tool), f"{folder}/{Path(str(tool)).name}")
        monkeypatch.setenv("PATH", folder)
        monkeypatch.setitem(module._ENVIRONMENT, "PATH", "/nowhere")
        asyncio.run(Sandbox("bubblewrap", SETTINGS).check())
        (ended,) = run_all("print(1)")
    assert (ended.end, ended.output) == ("exited", b"1\n")


def test_bubblewrap_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": "/nowhere"})
    with pytest.raises(ConfigError, match=r"there is no program 'bwrap' here; install bubblewrap, or set it"):
        check_installed()
