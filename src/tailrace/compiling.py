"""Kernels compiled by numba for the CPU, once a machine.

The result is kept in a cache beside the kernel's file or, where that cannot be written, in the user's
cache folder. Processes may compile at the same time.
"""

from collections.abc import Callable
from typing import Any

import numba

SUMS = {"reassoc", "nsz", "contract", "arcp"}
"""Sums may be reordered, which vectorises them; infinities and NaN keep their meaning."""


def kernel(*signature: str, fastmath: bool | set[str] = SUMS) -> Callable[[Callable[..., Any]], Any]:
    """Compile at once for the types of the signature; without one, for a caller in the same file."""

    def compiled(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"fastmath": fastmath, "error_model": "numpy"}
        try:
            return numba.njit(*signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            # No folder can be written: each process compiles for itself.
            return numba.njit(*signature, **options)(function)

    return compiled
