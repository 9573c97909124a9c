"""Hostile programs in the sandbox of code rewards: none may escape, and none may wedge the run.

    python benchmarks/sandbox.py [--programs 2000] [--at-a-time 4] [--seed 0] [--json FILE]

A program has *escaped* if it prints the content of a secret file or an environment variable of the host,
changes that file or its folder, or reaches a server of the host (TCP, UDP or an abstract Unix socket). It
has *wedged* the run if it does not end within its time limit plus one second, or if its sandbox fails. At
the end no process of a sandbox may be left, and shared memory (tmpfs, memfd, System V) must be back where it
was.
"""

import argparse
import asyncio
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hostile import Hostile, corpus
from tailrace import clock
from tailrace.errors import SandboxFailed
from tailrace.reward.base import CodeSettings
from tailrace.reward.sandbox import Sandbox, check_installed
from tailrace.reward.timeout import TimeLimit
from tailrace.workers.orphans import adopt_orphans, children_of

LIMIT_S = 1.0
SLACK_S = 1.0
LIMITS = CodeSettings(memory_mib=128, processes=8, tmp_mib=32, output_kib=256)
SHARED_MIB = 64
"""Growth of the machine's shared memory that other processes may cause meanwhile."""


@dataclass
class Findings:
    """What the programs did."""

    programs: int = 0
    escaped: int = 0
    wedged: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    """How they ended."""
    slowest_s: float = 0.0
    """The longest time from the start of a sandbox to its end."""
    processes_left: int = 0
    shared_mib_grown: float = 0.0
    seconds: float = 0.0


class Host:
    """What a program must not reach."""

    def __init__(self, folder: Path) -> None:
        self.secret = os.urandom(16).hex()
        self.folder = folder
        folder.chmod(0o755)  # the sandbox, not the file's mode, must keep programs out
        self.file = folder / "secret.txt"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        self.tcp, self.udp, self.unix = (
            socket.socket(),
            socket.socket(type=socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX),
        )
        self.tcp.bind(("", 0))
        port = self.tcp.getsockname()[1]
        self.udp.bind(("", port))
        name = f"tailrace-{self.secret[:8]}"
        self.unix.bind(f"\0{name}")
        for server in (self.tcp, self.udp, self.unix):
            server.setblocking(False)
        self.tcp.listen()
        self.unix.listen()
        os.environ["TAILRACE_SECRET"] = self.secret
        address = socket.gethostbyname(socket.gethostname())
        self.names = {
            **{"SECRET": str(self.file), "FOLDER": str(folder), "PORT": str(port)},
            **{"ADDRESS": address, "SOCKET": name},
        }

    def reached(self) -> str:
        """Return what was reached since the last call; empty: nothing."""
        found = []
        for name, take in (
            ("TCP", self.tcp.accept),
            ("UDP", lambda: self.udp.recv(1)),
            ("Unix", self.unix.accept),
        ):
            try:
                take()
                found.append(name)
            except BlockingIOError:
                pass
        if [path.name for path in self.folder.iterdir()] != [self.file.name]:
            found.append("folder")
        elif self.file.read_text() != self.secret:
            found.append("file")
        return ", ".join(found)


@contextmanager
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as folder:
        made = Host(Path(folder))
        try:
            yield made
        finally:
            del os.environ["TAILRACE_SECRET"]
            for server in (made.tcp, made.udp, made.unix):
                server.close()


async def attack(programs: Iterator[Hostile], host: Host, at_a_time: int) -> Findings:
    """Run all programs, several at a time."""
    adopt_orphans()  # whatever a sandbox leaves behind becomes a child of this process
    sandbox = Sandbox("bubblewrap", LIMITS)
    await sandbox.check()
    findings = Findings()
    children, shared, start_s = children_of(os.getpid()), shared_mib(), clock.now()

    async def work() -> None:
        for program in programs:
            began_s = clock.now()
            try:
                ended = await sandbox.run({"program": program.text}, "", TimeLimit(LIMIT_S))
            except SandboxFailed as why:
                findings.wedged += 1
                print(f"FAILED {program.kind}: {why}\n{program.text}")
                continue
            finally:
                findings.programs += 1
            seconds = clock.now() - began_s
            findings.slowest_s = max(findings.slowest_s, seconds)
            findings.ends[ended.end] = findings.ends.get(ended.end, 0) + 1
            leaked = host.secret.encode() in ended.output
            if (reached := host.reached()) or leaked:
                findings.escaped += 1
                print(f"ESCAPED {program.kind} ({reached or 'secret printed'}):\n{program.text}")
            if seconds > LIMIT_S + SLACK_S:
                findings.wedged += 1
                print(f"WEDGED {program.kind} for {seconds:.2f} s:\n{program.text}")
            if findings.programs % 100 == 0:
                print(
                    f"{findings.programs} programs, {clock.now() - start_s:.0f} s, {findings.ends}",
                    flush=True,
                )

    await asyncio.gather(*(work() for _ in range(at_a_time)))
    findings.processes_left = await asyncio.to_thread(processes_left, children)
    findings.shared_mib_grown = round(max(0.0, shared_mib() - shared), 1)
    findings.seconds = round(clock.now() - start_s, 1)
    findings.slowest_s = round(findings.slowest_s, 2)
    if findings.processes_left or findings.shared_mib_grown > SHARED_MIB:
        findings.wedged += 1
    return findings


def processes_left(before: set[int]) -> int:
    """Return how many children there are that were not there before, without those that are ending."""
    for _ in range(50):
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not (left := children_of(os.getpid()) - before):
            break
        time.sleep(0.1)
    return len(left)


def shared_mib() -> float:
    """Return the machine's memory in tmpfs, memfd and System V segments."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check_installed()
    with host() as attacked:
        programs = corpus(options.programs, options.seed, attacked.names)
        findings = asyncio.run(attack(programs, attacked, options.at_a_time))
    report = asdict(findings)
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report))
    raise SystemExit(findings.escaped + findings.wedged > 0)


if __name__ == "__main__":
    main()
