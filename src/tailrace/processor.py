"""Which library multiplies matrices fastest on this machine's processor: float32, one thread of a CPU.

Torch's is MKL, which uses half of the vectors' width where AMD made the processor. OpenBLAS, which comes with
numpy, uses all of it, if it is told to take the processor for one that it knows. Measured in docs/log.md.
"""

from pathlib import Path

_CPUS = Path("/proc/cpuinfo")  # llvmlite would know, too, and takes a sixth of a second to load
_WORDS = set(_CPUS.read_text().split()) if _CPUS.exists() else set()
BY_NUMPY = {"AuthenticAMD", "avx512f"} <= _WORDS
"""Whether it is numpy's."""


def environment(num_threads: int) -> dict[str, str]:
    """Of a process that is to multiply by so many threads. The libraries read it once, as they are loaded."""
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    known = {"OPENBLAS_CORETYPE": "SKYLAKEX"} if BY_NUMPY else {}
    return dict.fromkeys(counts, str(num_threads)) | known
