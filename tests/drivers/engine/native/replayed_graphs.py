"""Graphs of a CPU."""

from torch import Tensor

from tailrace.drivers.engine.native.graphs import Graphs
from tailrace.drivers.engine.native.sampler import Drawn

GRAPHS = "graphs"
OF_KERNELS = ("test_native_steps", "test_native_attention")
"""Modules and tests that say by which kernels a step is computed, or compare to the last bit."""


class Replayed(Graphs):
    """A replay runs the work again, on what lies at the addresses of the capture."""

    num_captured = num_replayed = 0

    def __call__(self, *given):
        """A GPU copies the tokens to the host before the next replay, a CPU would not."""
        drawn = super().__call__(*given)
        return drawn and Drawn(*(each.clone() for each in drawn))

    def _capture(self, key):
        self.num_captured += 1
        result = self._work(key)

        class Replay:
            def replay(graph):
                self.num_replayed += 1
                again = self._work(key)
                for old, new in zip(_tensors(result), _tensors(again), strict=True):
                    old.copy_(new)

        return Replay(), result

    def clear(self):
        self._captured = {}


def _tensors(result):
    return [result] if isinstance(result, Tensor) else result
