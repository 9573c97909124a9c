"""Engines that are joined to larger ones: the tensor-parallel sizes, and that of the first rounds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist

from typing_extensions import override

from tailrace import clock
from tailrace.drivers.kinds.hooks import JoinedEngines
from tailrace.errors import ConfigError
from tailrace.rollout.placement import DeviceSharing, PlacementSettings
from tailrace.rollout.profile import EngineProfile, ProfileRow, measure
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, DEFAULT_SLOTS, SimSettings
from tailrace.sim.world import SimPrompts, law_of

NUM_LENGTHS = 5
"""Lengths of a profile that is computed."""


class Joined(JoinedEngines):
    """Engines that the planner joins."""

    @override
    def sharing(
        self,
        sharing: DeviceSharing,
        placement: PlacementSettings,
        smallest: int,
        num_engines: int,
        sim: SimSettings | None,
    ) -> DeviceSharing:
        sizes = tensor_parallel_sizes(placement, smallest, num_engines, sim)
        start_width = _start_width(placement, sizes, num_engines, sim)
        return replace(sharing, max_width=sizes[-1] // smallest, start_width=start_width)


def tensor_parallel_sizes(
    placement: PlacementSettings, smallest: int, num_engines: int, sim: SimSettings | None = None
) -> list[int]:
    """Return the sizes that the planner may choose, in ascending order. Raises a ConfigError if the engines
    cannot be joined to the largest, or a group would not be on one node of [sim.cluster]."""
    key, largest = "placement.max_tensor_parallel_size", placement.max_tensor_parallel_size
    if largest is None:
        return [smallest]
    width, rest = divmod(largest, smallest)
    if rest or width & (width - 1) or not width:
        problem = f"the size is doubled from engine.tensor_parallel_size = {smallest} and never becomes that"
        raise ConfigError(key, largest, problem, "choose a power of two of it")
    if num_engines % width:
        problem = f"{num_engines} engines of {smallest} devices cannot be joined to groups of {largest}"
        raise ConfigError(key, largest, problem, "lower it, or add engines")
    if sim and sim.cluster and largest > sim.cluster.devices_per_node:
        problem = f"a node has {sim.cluster.devices_per_node} devices"
        raise ConfigError(key, largest, problem, "an engine must be on one node")
    return [smallest << doubled for doubled in range(width.bit_length())]


def _start_width(
    placement: PlacementSettings, sizes: Sequence[int], num_engines: int, sim: SimSettings | None
) -> Callable[[float], int]:
    """Return the engines that are joined in the first rounds, as a function of the requests of a round."""
    start, num_devices = placement.start_tensor_parallel_size or sizes[0], num_engines * sizes[0]
    if start not in sizes:
        problem, remedy = "the planner never chooses it", f"choose from {', '.join(map(str, sizes))}"
        raise ConfigError("placement.start_tensor_parallel_size", start, problem, remedy)
    profile = EngineProfile.read(placement.profile) if placement.profile else None
    if profile is None and sim and len(sizes) > 1:
        profile = EngineProfile(computed_profile(sim, sizes), "computed")
    if profile is None or placement.start_tensor_parallel_size:
        return lambda num_requests: start // sizes[0]
    profile.check(sizes)
    return lambda num_requests: profile.fastest(sizes, num_requests, num_devices) // sizes[0]


def computed_profile(sim: SimSettings, sizes: Sequence[int]) -> list[ProfileRow]:
    """Return the profile of simulated engines, at equally frequent lengths of [sim.lengths]. The rates
    are those of the first size."""
    cost, law, width = sim.engines, law_of(sim.lengths), sizes[-1] // sizes[0]
    quantiles = [NormalDist().inv_cdf((number + 0.5) / NUM_LENGTHS) for number in range(NUM_LENGTHS)]
    longest, most = sim.lengths.max_tokens or DEFAULT_MAX_TOKENS, width * (cost.slots or DEFAULT_SLOTS)
    lengths = sorted({max(1, min(longest, int(law(quantile)))) for quantile in quantiles})
    batches = sorted({*(4**power for power in range(8) if 4**power < most), most})

    async def run() -> list[ProfileRow]:
        engines = [SimEngine(f"{n}", cost, lambda sample: int(sample.turn_limit)) for n in range(width)]
        prompts = SimPrompts(sim.lengths.prompt_tokens)
        return [row async for row in measure(engines, sizes[0], sizes, batches, lengths, prompts)]

    return clock.run(run(), virtual=True)
