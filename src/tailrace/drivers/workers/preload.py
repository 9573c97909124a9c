"""Imports of the workers' fork server before it forks them (process.py).

It runs no computation, has one thread and does not touch a GPU, so that its children can. The kernel kills it
when the controller dies, and then its workers. An import that fails is repeated in the worker that needs it.
"""

import gc
import importlib
import os
import signal
import threading
from contextlib import suppress

from tailrace.drivers.workers.process_tree import CONTROLLER, signal_on_parent_death
from tailrace.kinds import BUILT_IN, built_in

MODULES = (
    "tailrace.drivers.engine.native.engine",
    "tailrace.drivers.trainer.trainer",
    "tailrace.drivers.weights.transports",
    "tailrace.drivers.workers.engine",
    "tailrace.drivers.workers.reference",
    "tailrace.drivers.workers.reward_process",
    "tailrace.drivers.workers.trainer",
    "transformers.models.auto.modeling_auto",  # the first config of a model loads it
    *(BUILT_IN[f"workers.{name}"].partition(":")[0] for name in built_in("workers")),
)

_SERVER = os.getpid()


def _die_with_server() -> None:
    """Let a child of the server die with it. The child's own children inherit this, too."""
    if os.getppid() == _SERVER:
        signal_on_parent_death(signal.SIGKILL, _SERVER)


os.setsid()  # signals to the controller's group are the controller's to handle
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)
signal_on_parent_death(signal.SIGKILL, int(os.environ.pop(CONTROLLER, os.getppid())))
os.register_at_fork(after_in_child=_die_with_server)  # also if it is stopped before it has begun
for _standard in (0, 1, 2):
    os.dup2(os.open(os.devnull, os.O_RDWR), _standard)
# Threads of BLAS libraries would not survive a fork. To ask NVML for GPUs does not initialise CUDA.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ |= {"OMP_WAIT_POLICY": "passive", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
for _module in MODULES:
    with suppress(Exception):
        importlib.import_module(_module)
with suppress(Exception):  # a lock between processes is a semaphore that outlives a worker that is killed
    importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
gc.freeze()
