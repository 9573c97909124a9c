"""What a worker finds where it runs."""

import json
import os
import sys
from pathlib import Path

import torch

VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "NEW", "OLD")


def tell() -> None:
    """Print it as JSON, and exit."""
    found = {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "folder": os.getcwd(),
        "cpus": list(os.sched_getaffinity(0)),
        "torch threads": torch.get_num_threads(),
        "sockets": len([each for each in os.listdir("/proc/self/fd") if _is_socket(each)]),
        **{key: os.environ.get(key) for key in VARIABLES},
    }
    print(json.dumps(found), flush=True)
    sys.exit(7)


def _is_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
    except FileNotFoundError:  # that of the listing
        return False
