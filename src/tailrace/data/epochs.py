"""Epochs: a finite number of rows as an endless order, each epoch shuffled anew.

Epoch e is its own permutation, a function of (seed, e): the row at any index is found without walking there.
"""

import numpy as np


class Epochs:
    """Which row comes at an index."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def row_at(self, index: int) -> int:
        epoch, place = divmod(index, self._num_rows)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
            self._epoch = epoch
        return int(self._order[place])
