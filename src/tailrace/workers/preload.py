"""What the fork server of the workers imports before it forks them (process.py).

It runs no computation, has one thread and does not touch a GPU, so that its children can. The kernel kills it
when the controller dies, and then its workers. An import that fails is repeated in the worker that needs it.
"""

import gc
import importlib
import os
import signal
from contextlib import suppress

from tailrace.workers.process_tree import signal_on_parent_death

MODULES = (
    "tailrace.engine.native.engine",
    "tailrace.trainer.reference",
    "tailrace.trainer.trainer",
    "tailrace.weights.transports",
    "transformers.models.auto.modeling_auto",  # the first config of a model loads it
)

os.setsid()  # signals to the controller's group are the controller's to handle
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)
signal_on_parent_death(signal.SIGKILL, os.getppid())
_own = os.getpid()
os.register_at_fork(  # also one that is stopped before it has begun
    after_in_child=lambda: os.getppid() == _own and signal_on_parent_death(signal.SIGKILL, _own)
)
for _standard in (0, 1, 2):
    os.dup2(os.open(os.devnull, os.O_RDWR), _standard)
# Threads of BLAS libraries would not survive a fork. To ask NVML for GPUs does not initialise CUDA.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ |= {"OMP_WAIT_POLICY": "passive", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
for _module in MODULES:
    with suppress(Exception):
        importlib.import_module(_module)
gc.freeze()
