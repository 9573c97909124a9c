"""The time of decode steps: a closed form, whatever their number.

A step of n running requests takes

    overhead_s + max(base_s, compute_s * n) + slope_s * n + context_s * P

seconds, where P positions are in the KV cache when it begins. A step adds n positions. So k steps that begin
with P positions take k * first_s + growth_s * k * (k - 1) / 2 seconds, where first_s is the time of the
first and growth_s = context_s * n.

Engines that were joined to one tensor-parallel group divide all but overhead_s, and communicate: see
`SimEngineSettings.communication_s`.
"""

from math import log2, sqrt
from typing import NamedTuple

from tailrace.sim.settings import SimEngineSettings


class Steps(NamedTuple):
    """Decode steps in sequence by the same requests.

    Args:
        first_s: seconds of the first step.
        growth_s: how much longer each step is than the one before.
    """

    first_s: float
    growth_s: float = 0.0

    @classmethod
    def of(cls, cost: SimEngineSettings, num_running: int, kv_positions: int, width: int = 1) -> "Steps":
        """Return the steps of a batch.

        Args:
            kv_positions: in the cache of the requests when the first step begins.
            width: engines that are joined to one tensor-parallel group.
        """
        alone_s = max(cost.base_s, cost.compute_s * num_running) + cost.slope_s * num_running
        growth_s = cost.context_s * num_running
        if cost.context_s:
            alone_s += cost.context_s * kv_positions
        if width > 1:
            return cls(
                alone_s / width + cost.communication_s * log2(width) + cost.overhead_s, growth_s / width
            )
        return cls(alone_s + cost.overhead_s, growth_s)

    def slower(self, factor: float) -> "Steps":
        """Return steps that take longer by a factor."""
        return Steps(self.first_s * factor, self.growth_s * factor)

    def seconds(self, start: float, end: float) -> float:
        """Return the time from one number of steps to another.

        Args:
            start: of the first step only a part is left if 0 < start < 1.
            end: whole steps.
        """
        alike_s = max(0.0, end - start) * self.first_s
        return alike_s + self.growth_s * end * (end - 1) / 2 if end > 1 else alike_s

    def after(self, start: float, seconds: float) -> float:
        """Return the number of steps, whole ones and a part of one, that are done after some seconds.

        Args:
            start: the part of the first step that was done before.
        """
        if not self.growth_s:
            return start + seconds / self.first_s
        seconds += start * self.first_s
        slope = self.first_s - self.growth_s / 2
        whole = int(2 * seconds / (slope + sqrt(slope**2 + 2 * self.growth_s * seconds)) + 1e-9)
        rest_s = seconds - self.seconds(0, whole)
        return whole + max(0.0, rest_s / (self.first_s + self.growth_s * whole))
