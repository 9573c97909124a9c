"""PipelineRL's Appendix A: throughput at the same maximum lag, in tokens a flash. Equations 9 to 18.

A flash is the time of one token's forward pass at the full FLOP/s of a device (eq. 9). `utilization` is
U(h), the share of the FLOP/s that a device reaches at batch size h. Throughputs are of all N devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

Utilization = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What both systems run on.

    Args:
        devices: N.
        batch: sequences of an optimizer step (B).
        train_flashes: amortised training time of a token on one device (tau).
        utilization: U(h).
    """

    devices: int
    batch: int
    train_flashes: float
    utilization: Utilization


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths from 1 to L, all equally likely (A.4).

    Args:
        longest: L.
    """

    longest: int

    @property
    def mean(self) -> float:
        return (self.longest + 1) / 2

    def in_progress(self, sequences: int) -> Sequence[float]:
        """h(l): the sequences that are still in progress at decode steps 1 to L."""
        return [sequences * (self.longest - step) / self.longest for step in range(self.longest)]


@dataclass(frozen=True, slots=True)
class Conventional:
    """Throughput of Conventional RL, in tokens a flash: eq. 13, 14 and 15."""

    r_gen: float
    r_train: float

    @property
    def r(self) -> float:
        """Eq. 13."""
        return 1 / (1 / self.r_gen + 1 / self.r_train)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Throughput of PipelineRL, in tokens a flash: eq. 16, 17 and 18.

    Args:
        H: sequences in flight on a device that generates.
        I: devices that generate.
    """

    H: int
    I: int  # noqa: E741 (the paper's letter)
    r_gen: float
    r_train: float

    @property
    def r(self) -> float:
        """Eq. 16."""
        return min(self.r_gen, self.r_train)


def conventional(cluster: Cluster, lengths: Lengths, steps: int) -> Conventional:
    """Eq. 14 and 15.

    Args:
        steps: optimizer steps of an RL step (G), of S = B G sequences.
    """
    S, N = cluster.batch * steps, cluster.devices
    batches = [h / N for h in lengths.in_progress(S)]
    generating = sum(h / cluster.utilization(h) for h in batches)
    return Conventional(S * lengths.mean / generating, N / cluster.train_flashes)


def pipeline(cluster: Cluster, H: int, I: int) -> Pipeline:  # noqa: E741
    """Eq. 17 and 18."""
    r_gen = cluster.utilization(H) * I
    return Pipeline(H, I, r_gen, (cluster.devices - I) / cluster.train_flashes)


def max_lag(cluster: Cluster, lengths: Lengths, H: int, I: int) -> int:  # noqa: E741
    """g_max of PipelineRL in optimizer steps: ceil(H I L / (mean length * B)) (A.3)."""
    return ceil(H * I * lengths.longest / (lengths.mean * cluster.batch))


def fastest_pipeline(cluster: Cluster, lengths: Lengths, lag: int) -> Pipeline:
    """The fastest (H, I) whose maximum lag is at most `lag` (A.3); of equals, the one with the smallest H.

    U does not fall, so for each I only the largest H that the lag allows is tried.

    Raises:
        ValueError: no H and I keep the lag.
    """
    in_flight = lag * cluster.batch * lengths.mean / lengths.longest
    counts = ((int(in_flight / num), num) for num in range(1, cluster.devices))
    found = [pipeline(cluster, H, num) for H, num in counts if H]
    if not found:
        raise ValueError(f"one sequence in flight has a lag above {lag}")
    return max(found, key=lambda each: (each.r, -each.H))


def speedup(cluster: Cluster, lengths: Lengths, lag: int) -> float:
    """Throughput of PipelineRL over that of Conventional RL at the same maximum lag (Fig. 9).

    The maximum lag of Conventional RL is G - 1 optimizer steps (section 2.2).
    """
    return fastest_pipeline(cluster, lengths, lag).r / conventional(cluster, lengths, lag + 1).r


def best_lag(cluster: Cluster, lengths: Lengths, lags: Sequence[int]) -> int:
    """The maximum lag at which the speed-up is largest."""
    return max(lags, key=lambda lag: speedup(cluster, lengths, lag))


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """U(h) = u h^p up to a batch size, and constant beyond it.

    Args:
        u: utilization at batch size 1.
        saturation: the batch size from which U is constant.
    """

    u: float
    p: float
    saturation: float

    def __call__(self, h: float) -> float:
        return self.u * float(min(h, self.saturation) ** self.p)
