"""The offline profile of the engines (RollPacker 4.1, 4.2): the time of a decode step and the preemptions for
each tensor-parallel size, batch and length. It gives the size of the first rounds.

`measure` runs on live engines and on simulated ones.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from tailrace.clock import now
from tailrace.data.base import Prompts
from tailrace.engine.base import Engine
from tailrace.errors import ConfigError
from tailrace.rollout.placement import regroup
from tailrace.types import Group, Prompt, Sample, SampleId

KEY = "placement.profile"


class ProfileRow(msgspec.Struct, frozen=True):
    """What one engine took for a batch.

    Args:
        tensor_parallel_size: devices of the engine.
        batch: requests that began together.
        length: tokens that each of them generated.
        step_s: seconds of the batch, prefills and preemptions included, by its length.
        preemptions: requests that were preempted.
    """

    tensor_parallel_size: int
    batch: int
    length: int
    step_s: float
    preemptions: int


class EngineProfile:
    """The rows of a profile.

    Args:
        source: that an error names.
    """

    def __init__(self, rows: Iterable[ProfileRow], source: str) -> None:
        self._steps: dict[tuple[int, int], dict[int, float]] = {}
        for row in sorted(rows, key=lambda row: (row.length, row.batch)):
            steps = self._steps.setdefault((row.tensor_parallel_size, row.length), {})
            steps[row.batch] = row.step_s
        self._source = source

    @classmethod
    def read(cls, path: Path) -> "EngineProfile":
        """Read a file of `tailrace fit --profile`.

        Raises:
            ConfigError: it is missing or damaged.
        """
        try:
            rows = msgspec.json.decode(path.read_bytes(), type=list[ProfileRow])
        except (OSError, msgspec.DecodeError) as why:
            problem = f"it cannot be read ({why})"
            raise ConfigError(KEY, str(path), problem, "name a file of tailrace fit --profile") from None
        return cls(rows, str(path))

    def check(self, sizes: Sequence[int]) -> None:
        """Raises a ConfigError if it lacks one of the sizes, or has not all lengths of one."""
        lengths = {length for _, length in self._steps}
        for size in sizes:
            if not lengths or any((size, length) not in self._steps for length in lengths):
                problem = f"it has no measurement of tensor-parallel size {size} at each of its lengths"
                remedy = "measure it with tailrace fit --profile, or lower placement.max_tensor_parallel_size"
                raise ConfigError(KEY, self._source, problem, remedy)

    def rollout_s(self, size: int, num_requests: float, num_devices: int) -> float:
        """Return the seconds of a rollout on engines of a size that use all devices.

        The responses have the lengths of the profile in equal shares. When the responses of one length have
        ended, the others go on in a smaller batch.
        """
        lengths = sorted(length for each, length in self._steps if each == size)
        seconds = 0.0
        for number, (start, end) in enumerate(pairwise([0, *lengths])):
            batch = num_requests * (1 - number / len(lengths)) * size / num_devices
            seconds += (end - start) * _at(self._steps[size, end], batch)
        return seconds

    def fastest(self, sizes: Sequence[int], num_requests: float, num_devices: int) -> int:
        """Return the size of the shortest rollout; of equal ones the smallest."""
        return min(sizes, key=lambda size: self.rollout_s(size, num_requests, num_devices))


def _at(steps: dict[int, float], batch: float) -> float:
    """The step time of a batch between two that were measured. Those of a larger one follow one another."""
    batches = [*steps]
    if batch <= batches[0]:
        return steps[batches[0]]
    for low, high in pairwise(batches):
        if batch <= high:
            return steps[low] + (steps[high] - steps[low]) * (batch - low) / (high - low)
    return steps[batches[-1]] * batch / batches[-1]


async def measure(
    engines: Sequence[Engine],
    smallest: int,
    sizes: Sequence[int],
    batches: Sequence[int],
    lengths: Sequence[int],
    prompts: Prompts | Sequence[Prompt],
    settle_s: float = 0.0,
) -> AsyncIterator[ProfileRow]:
    """Measure the first engine at each size, and yield the rows. A batch with as many preemptions as requests
    is the largest of its length: larger ones would follow one another.

    Args:
        smallest: tensor-parallel size of one engine alone.
        batches: in ascending order.
        prompts: one for each request of a batch, in their order.
        settle_s: after which an idle engine has reported its preemptions.
    """
    for size in sizes:
        await regroup(engines, size // smallest)
        for length in lengths:
            for batch in batches:
                row = await _measured(engines[0], size, length, [prompts[n] for n in range(batch)], settle_s)
                yield row
                if row.preemptions >= batch:
                    break


async def _measured(
    engine: Engine, size: int, length: int, prompts: Sequence[Prompt], settle_s: float
) -> ProfileRow:
    samples = [Sample(SampleId(n, 0, 0), Group(prompt, 1, [])) for n, prompt in enumerate(prompts)]
    num_before, start_s = engine.usage().num_preempted, now()
    await asyncio.gather(*(_generate(engine, sample, length) for sample in samples))
    seconds = now() - start_s
    await asyncio.sleep(settle_s)
    preempted = engine.usage().num_preempted - num_before
    return ProfileRow(size, len(prompts), length, seconds / length, preempted)


async def _generate(engine: Engine, sample: Sample, length: int) -> None:
    """Generate so many tokens. A response that ends before goes on."""
    sample.turn_limit = length
    while sample.num_tokens < length:
        sample.finish_reason = None
        await engine.generate(sample)
