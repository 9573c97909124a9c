"""A Slurm cluster whose two nodes are processes of this machine: munged, slurmctld and two slurmd."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=60
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
"""Nodes that differ by their ports. A job that is requeued may begin once its credential has expired."""


def missing() -> list[str]:
    """The programs of Slurm and munge that this machine lacks."""
    return [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }

    def call(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def submit(self, *words: str) -> str:
        """The number of a new job."""
        return self.call("sbatch", "--parsable", *words)

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        shown = self.call("scontrol", "show", "job", job, "--oneliner").split()
        return next(word.removeprefix(f"{name}=") for word in shown if word.startswith(f"{name}="))

    def wait(self, job: str, *states: str, timeout_s: float = 300.0) -> None:
        end_s = time.monotonic() + timeout_s
        while (state := self.field(job, "JobState")) not in states:
            assert time.monotonic() < end_s, (job, state)
            assert state not in ("FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"), (job, state)
            time.sleep(0.2)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Start the daemons in a folder, and end them with all jobs."""
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    with ExitStack() as free:
        opened = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        controller, first, second = (each.getsockname()[1] for each in opened)
    text = CONFIG.format(
        host=socket.gethostname().partition(".")[0],
        folder=folder,
        user=user,
        controller=controller,
        first=first,
        second=second,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(64))
    slurm = Slurm(folder)
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder / 'munge'}"]
        + [f"--{name}-file={folder / f'munged.{name}'}" for name in ("pid", "log", "seed")],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "node1"],
        ["slurmd", "-D", "-N", "node2"],
    ]
    with ExitStack() as running:
        for number, command in enumerate(commands):
            log = running.enter_context((folder / f"daemon-{number}.log").open("wb"))
            process = subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log)
            running.callback(process.wait, 60)
            running.callback(process.terminate)
            while not number and not (folder / "munge").exists():
                time.sleep(0.05)
        end_s = time.monotonic() + 60
        while "idle" not in (shown := _nodes(slurm)) or "down" in shown:
            assert time.monotonic() < end_s, shown
            time.sleep(0.2)
        try:
            yield slurm
        finally:
            slurm.call("scancel", "--user", user, "--full", "--signal=KILL")
            end_s = time.monotonic() + 60
            while slurm.call("squeue", "--noheader", "--states", "running,completing"):
                assert time.monotonic() < end_s
                time.sleep(0.2)


def _nodes(slurm: Slurm) -> str:
    """The states of the nodes, or that the controller does not answer."""
    words = ["sinfo", "--noheader", "--Node", "--format", "%T"]
    return subprocess.run(words, env=slurm.environment, capture_output=True, text=True).stdout or "down"
