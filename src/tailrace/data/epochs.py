"""An endless order over a finite number of rows, shuffled anew in each epoch.

Each epoch has its own permutation, a function of (seed, epoch). The row at any index is found without
visiting the earlier ones.
"""

import numpy as np


class Epochs:
    """Maps an index of the endless order to a row number."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def row_at(self, index: int) -> int:
        """Return the row number at `index`."""
        epoch, place = divmod(index, self._num_rows)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
            self._epoch = epoch
        return int(self._order[place])
