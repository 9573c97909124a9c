"""A process that opens many connections to a port, sends the same bytes on each, and keeps them."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCRIPT = """
import socket, sys
opened = []
for _ in range(int(sys.argv[2])):
    each = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)
    each.sendall(bytes.fromhex(sys.argv[3]))
    opened.append(each)
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def flood(port: int, num: int, sent: bytes = b"") -> Iterator[None]:
    """Inside the block the connections are open, but for those that the port has closed."""
    command = [sys.executable, "-c", _SCRIPT, str(port), str(num), sent.hex()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, preexec_fn=_many_files) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield
        process.kill()


def _many_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_connections(port: int, pid: int | None = None) -> int:
    """The descriptors of a process that are connections to its port."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] != "0A"}
    return sum(link in inodes for link in links(pid))


def links(pid: int | None = None) -> Iterator[str]:
    """The targets of the descriptors of a process."""
    for each in Path(f"/proc/{pid or 'self'}/fd").iterdir():
        try:
            yield os.readlink(each)
        except FileNotFoundError:  # closed since
            continue
