"""A process that opens many connections to a port, sends the same bytes on each, and keeps them."""

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

_SCRIPT = """
import resource, socket, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
opened = []
for _ in range(int(sys.argv[2])):
    each = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)
    each.sendall(bytes.fromhex(sys.argv[3]))
    opened.append(each)
print("open", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def flood(port: int, num: int, sent: bytes = b"") -> AsyncIterator[None]:
    """Inside the block the connections are open, but for those that the port has closed."""
    pipe, words = asyncio.subprocess.PIPE, (str(port), str(num), sent.hex())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SCRIPT, *words, stdin=pipe, stdout=pipe
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"open\n"
        await asyncio.sleep(0.1)  # the last ones are accepted
        yield
    finally:
        process.kill()
        await process.communicate()


@contextmanager
def file_limit(num: int) -> Iterator[None]:
    """This process may have so many descriptors more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + num, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_connections(port: int, pid: int | str = "self") -> int:
    """The descriptors of a process that are connections to its port."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] != "0A"}
    num = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            num += os.readlink(each) in inodes
    return num
