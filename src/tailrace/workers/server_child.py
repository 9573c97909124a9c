"""The parent of an inference server that a run starts: it ends with the server, and the server with it.

The server's own processes may start others, and may be killed at any time. This process adopts what they
leave behind. When the controller lets go, or dies, it kills them all. If it is itself killed, as by Ray when
an actor ends, a guard kills them.
"""

import os
import shutil
import subprocess
import threading

from tailrace.engine.vllm import write_plugin
from tailrace.workers.child import begin, end_with_controller
from tailrace.workers.orphans import adopt_orphans, guard_group, kill_descendants
from tailrace.workers.server_messages import ServerJob

_OURS = ("PYTHONPATH", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Environment variables that were set for this process alone (process.py)."""


def main() -> None:
    end, job = begin(ServerJob)
    adopt_orphans()
    guard_group()
    if job.plugins:
        write_plugin(job.plugins)

    def clean_up() -> None:
        kill_descendants()
        if job.plugins:
            shutil.rmtree(job.plugins, ignore_errors=True)

    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    server = subprocess.Popen(job.command, env={**inherited, **job.env})
    end_with_controller(end, clean_up=clean_up)

    def watch() -> None:
        code = server.wait()
        clean_up()
        if code < 0:  # end in the same way
            os.kill(os.getpid(), -code)
        os._exit(code)

    threading.Thread(target=watch, name="end with server", daemon=True).start()
    end.recv(1)  # nothing is ever sent: the controller lets go
    clean_up()
    os._exit(0)


if __name__ == "__main__":
    main()
