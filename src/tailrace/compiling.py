"""Kernels compiled by numba for the CPU when their module is first imported on a machine: some ten seconds.

Later imports load the result from a cache beside the kernel's file or, where that cannot be written, in the
user's cache folder. Processes may compile at the same time.
"""

from collections.abc import Callable
from typing import Any

import numba

SUMS = {"reassoc", "nsz", "contract", "arcp"}
"""Sums may be reordered, which vectorises them; infinities and NaN keep their meaning."""


def kernel(*signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile at once for the types of the signature; without one, for a compiled caller. While it runs, so
    may other Python threads."""

    def compiled(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"fastmath": SUMS, "error_model": "numpy", "nogil": True}
        try:
            return numba.njit(*signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            # No folder can be written: each process compiles for itself.
            return numba.njit(*signature, **options)(function)

    return compiled
