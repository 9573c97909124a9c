"""Products of matrices in float32 on a CPU, by the library that is fastest there (processor.py).

Matrices are dense along either axis, so that none is copied.
"""

import numpy as np
import torch
from torch import Tensor

from tailrace.processor import BY_NUMPY


def multiply(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a @ b, [M, N], into `out` where there is one; without a gradient."""
    if not _by_numpy():
        return torch.mm(a, b, out=out)
    out = torch.empty(len(a), b.shape[1]) if out is None else out
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    return out


def add_product(a: Tensor, b: Tensor, onto: Tensor, *, room: Tensor | None = None) -> Tensor:
    """onto + a @ b, in the place of `onto`. room: of the same shape, to work in."""
    return onto.add_(multiply(a, b, out=room)) if _by_numpy() else onto.addmm_(a, b)


def _by_numpy() -> bool:
    # Threads of OpenBLAS and of torch wait by spinning: side by side they take each other's CPUs.
    return BY_NUMPY and torch.get_num_threads() == 1
