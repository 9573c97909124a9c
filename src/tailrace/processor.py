"""Which library multiplies matrices fastest on this machine's processor: float32, one thread of a CPU.

Torch's is MKL, which uses half of the vectors' width where AMD made the processor. OpenBLAS, which comes with
numpy, uses all of it, if it is told to take the processor for one that it knows. Measured in docs/log.md.
"""

from llvmlite import binding

BY_NUMPY: bool = binding.get_host_cpu_name().startswith("znver") and bool(
    binding.get_host_cpu_features().get("avx512f")
)
"""Whether it is numpy's."""
ENVIRONMENT = {"OPENBLAS_CORETYPE": "SKYLAKEX"} if BY_NUMPY else {}
"""Of a process that is to multiply. OpenBLAS reads it once, as it is loaded."""
