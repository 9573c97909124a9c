"""A plug-in of vLLM in place of extras/http/vllm_plugin.py: its backend, with the fault that a file names."""

import os
from pathlib import Path
from typing import Any

FILE = "PLANTED_FAULT"
"""The environment variable with the path of the file."""


def fault() -> str:
    """The fault that is to happen now; empty: none."""
    return Path(os.environ[FILE]).read_text()


def register() -> None:
    """Name the backend to vLLM, and let its prefix cache obey."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.core import kv_cache_utils

    if getattr(kv_cache_utils, "planted", False):
        return
    kv_cache_utils.planted = True
    WeightTransferEngineFactory.register_engine("tailrace", "planted_transfer", "PlantedTransfer")
    inner, salts = kv_cache_utils.generate_block_hash_extra_keys, []

    def keys(request: Any, *place: int) -> Any:
        """A block's keys; with the fault it counts as one of the version before."""
        salt = request.cache_salt
        if salt and salt not in salts:
            salts.append(salt)
        if fault() == "an old prefix cache":
            request.cache_salt = salts[-2]
        try:
            return inner(request, *place)
        finally:
            request.cache_salt = salt

    kv_cache_utils.generate_block_hash_extra_keys = keys
