"""Hostile programs in the sandbox of code rewards: none may escape, and none may wedge the run.

    python benchmarks/sandbox.py [--programs 2000] [--at-a-time 4] [--seed 0] [--json FILE]

The programs are drawn from hostile_programs.txt, several variants of each kind, in which names in braces are
replaced: {SECRET} by the path of a file of the host that nothing may read or change, {FOLDER} by its folder,
{PORT} by a port of the host on which a server listens, on all addresses, for TCP and UDP, {ADDRESS} by an
address of the host, {SOCKET} by the name of an abstract Unix socket of the host, {N} by a number that differs
between programs.

A program has *escaped* if it prints the content of a secret file or an environment variable of the host,
changes that file or its folder, or reaches a server of the host (TCP, UDP or an abstract Unix socket). It
has *wedged* the run if it does not end within its time limit plus one second, or if its sandbox fails. At
the end no process of a sandbox may be left, and shared memory (tmpfs, memfd, System V) must be back where it
was.
"""

import asyncio
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from common import run, write
from tailrace import clock
from tailrace.drivers.reward.settings import CodeSettings
from tailrace.drivers.workers.process_tree import adopt_orphans, children_of
from tailrace.errors import SandboxFailed
from tailrace.extras.sandbox.sandbox import Sandbox, check_installed
from tailrace.rollout.reward_timeout import TimeLimit

LIMIT_S = 1.0
SLACK_S = 1.0
LIMITS = CodeSettings(memory_mib=128, processes=8, tmp_mib=32, output_kib=256)
SHARED_MIB = 64
"""Growth of the machine's shared memory that other processes may cause meanwhile."""


PROGRAMS = Path(__file__).with_name("hostile_programs.txt")
"""Each program follows a line `---- KIND`."""


def read_kinds() -> dict[str, list[str]]:
    """Return the variants of each kind."""
    kinds: dict[str, list[str]] = {}
    for part in PROGRAMS.read_text(encoding="utf-8").removeprefix("---- ").split("\n---- "):
        kind, _, text = part.partition("\n")
        kinds.setdefault(kind, []).append(text)
    return kinds


class Hostile(NamedTuple):
    kind: str
    text: str


def corpus(count: int, seed: int, names: dict[str, str]) -> Iterator[Hostile]:
    """Yield programs: the kinds in turn, a variant of each drawn from the seed; each combines it with noise.

    Args:
        names: what the names in braces are replaced by.
    """
    chance = random.Random(f"hostile {seed}")
    variants = read_kinds()
    kinds = list(variants)
    orders = {kind: chance.sample(texts, len(texts)) for kind, texts in variants.items()}
    for number in range(count):
        kind = kinds[number % len(kinds)]
        turn = number // len(kinds)
        text = orders[kind][turn % len(orders[kind])]
        for name, value in {**names, "N": str(chance.randrange(1, 100_000))}.items():
            text = text.replace(f"{{{name}}}", value)
        yield Hostile(kind, _disguised(text, chance))


def _disguised(text: str, chance: random.Random) -> str:
    """Return a program that does the same: directly, in a function, a thread, a child or at the exit."""
    body = f"exec({text!r}, {{'__name__': '__main__'}})"
    forms = (
        text,
        f"def main():\n    {body}\nmain()",
        f"import threading\nt = threading.Thread(target=lambda: {body})\nt.start()\nt.join()",
        f"import os\nif os.fork() == 0:\n    {body}\nelse:\n    os.wait()",
        f"import atexit\natexit.register(lambda: {body})",
        f"import sys, subprocess\nprint(subprocess.run([sys.executable, '-c', {text!r}], stdout=1))",
    )
    return chance.choice(forms)


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
        self.file.write_text(self.secret, encoding="utf-8")
        self.file.chmod(0o666)
        self.tcp, self.unix = socket.socket(), socket.socket(socket.AF_UNIX)
        self.udp = socket.socket(type=socket.SOCK_DGRAM)
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
        self.names = {"SECRET": str(self.file), "FOLDER": str(folder), "PORT": str(port)}
        self.names |= {"ADDRESS": address, "SOCKET": name}

    def reached(self) -> str:
        """Return what was reached since the last call; empty: nothing."""
        found = []
        takes = {"TCP": self.tcp.accept, "UDP": lambda: self.udp.recv(1), "Unix": self.unix.accept}
        for name, take in takes.items():
            with suppress(BlockingIOError):
                take()
                found.append(name)
        if [path.name for path in self.folder.iterdir()] != [self.file.name]:
            found.append("folder")
        elif self.file.read_text(encoding="utf-8") != self.secret:
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
                print(findings.programs, "programs", findings.ends, flush=True)

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
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Shmem:"))


def main(programs: int = 2000, at_a_time: int = 4, seed: int = 0, json: Path | None = None) -> None:
    check_installed()
    with host() as attacked:
        findings = asyncio.run(attack(corpus(programs, seed, attacked.names), attacked, at_a_time))
    print(*(f"{key:18} {value}" for key, value in asdict(findings).items()), sep="\n")
    write(json, asdict(findings))
    raise SystemExit(findings.escaped + findings.wedged > 0)


if __name__ == "__main__":
    run(main)
