"""Processes whose parent dies: adopted, found, killed."""

import os
import signal
import subprocess
import sys

import pytest

from helpers.worker_cases import is_running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these signals and /proc")

ADOPTS = """
import subprocess, sys, time
from tailrace.drivers.workers.process_tree import adopt_orphans, children_of, kill_descendants
import os
adopt_orphans()
spared = subprocess.Popen(["sleep", "1000"])
# A shell that ends at once and leaves a process with a session of its own.
shell = ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"]
orphan = int(subprocess.run(shell, capture_output=True, text=True).stdout)
assert children_of(os.getpid()) == {spared.pid, orphan}
kill_descendants(spare={spared.pid})
print(int(os.path.exists(f"/proc/{orphan}")), int(os.path.exists(f"/proc/{spared.pid}")))
kill_descendants()
print(len(children_of(os.getpid())))
"""


def test_a_process_finds_and_kills_what_its_children_left() -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "0"]


FAMILY = """
import os, signal
from tailrace.drivers.workers.process_tree import is_stopped
os.setpgid(0, 0)
def fork():
    said, says = os.pipe()
    if child := os.fork():
        return child, os.read(said, 9)
    return 0, says
child, says = fork()
if not child:
    grandchild, _ = fork()
    if grandchild:
        os.write(says, b"%d" % grandchild)
    else:
        os.write(_, b".")
    signal.pause()
grandchild = int(says)
print(is_stopped(os.getpid()))
for each, number in ((grandchild, signal.SIGSTOP), (grandchild, signal.SIGCONT), (child, signal.SIGSTOP)):
    os.kill(each, number)
    while is_stopped(each) != (number == signal.SIGSTOP):
        pass
    print(is_stopped(os.getpid()))
os.killpg(0, signal.SIGKILL)
"""


def test_a_process_counts_as_stopped_if_a_descendant_of_its_group_is() -> None:
    done = subprocess.run([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["False", "True", "False", "True"]


PARENT = """
import os, signal, sys, time
from tailrace.drivers.workers.process_tree import signal_on_parent_death
parent = os.getpid()
read_end, write_end = os.pipe()
if (child := os.fork()) == 0:
    signal_on_parent_death(signal.SIGKILL, parent)
    os.write(write_end, b".")
    time.sleep(1000)
os.read(read_end, 1)
print(child, flush=True)
os.kill(child, signal.SIGSTOP)
os.kill(parent, signal.SIGKILL)
"""


def test_a_stopped_process_is_killed_when_its_parent_dies() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    child = int(done.stdout)
    for _ in range(1000):
        if not is_running(child):
            break
    assert not is_running(child)


def test_a_process_whose_parent_is_dead_already_is_killed() -> None:
    code = "from tailrace.drivers.workers.process_tree import *; signal_on_parent_death(signal.SIGKILL, 0)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL


def test_the_parent_of_this_process_is_found() -> None:
    from tailrace.drivers.workers.process_tree import children_of

    assert os.getpid() in children_of(os.getppid())
