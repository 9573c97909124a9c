"""The offline profile of the engines (RollPacker 4.1, 4.2): the time of a decode step and the preemptions for
each tensor-parallel size, batch and length. It gives the size of the first rounds.

`measure` runs on live engines and on simulated ones.
"""

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from tailrace.clock import now
from tailrace.contracts.data import Prompts
from tailrace.contracts.engine import Engine
from tailrace.errors import ConfigError
from tailrace.rollout.placement import resize
from tailrace.types import Group, Prompt, Sample, SampleId

KEY = "placement.profile"


class ProfileRow(msgspec.Struct, frozen=True):
    """Measured time of one engine of a tensor-parallel size for `batch` requests that began together.

    Args:
        length: tokens that each of them generated.
        step_s: seconds of the batch, prefills and preemptions included, by its length.
    """

    tensor_parallel_size: int
    batch: int
    length: int
    step_s: float
    preemptions: int


class EngineProfile:
    """The rows of a profile. `source` is what an error names."""

    def __init__(self, rows: Iterable[ProfileRow], source: str) -> None:
        self._steps: defaultdict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        for row in sorted(rows, key=lambda row: (row.length, row.batch)):
            self._steps[row.tensor_parallel_size, row.length][row.batch] = row.step_s
        self._source, self._lengths = source, list(dict.fromkeys(length for _, length in self._steps))

    @classmethod
    def read(cls, path: Path) -> "EngineProfile":
        """Read a file of `tailrace fit --profile`. Raises a ConfigError if it is missing or damaged."""
        try:
            return cls(msgspec.json.decode(path.read_bytes(), type=list[ProfileRow]), str(path))
        except (OSError, msgspec.DecodeError) as why:
            problem = f"it cannot be read ({why})"
            raise ConfigError(KEY, str(path), problem, "name a file of tailrace fit --profile") from None

    def check(self, sizes: Sequence[int]) -> None:
        """Raises a ConfigError if it lacks one of the sizes, or has not all lengths of one."""
        for size in sizes:
            if not self._lengths or any((size, length) not in self._steps for length in self._lengths):
                problem = f"it has no measurement of tensor-parallel size {size} at each of its lengths"
                remedy = "measure it with tailrace fit --profile, or lower placement.max_tensor_parallel_size"
                raise ConfigError(KEY, self._source, problem, remedy)

    def rollout_s(self, size: int, num_requests: float, num_devices: int) -> float:
        """Return the seconds of a rollout on engines of a size that use all devices. Its responses have the
        lengths of the profile in equal shares. When those of one length have ended, the others go on in a
        smaller batch. Batches above the largest measured one follow one another."""
        seconds = 0.0
        for number, (start, end) in enumerate(pairwise([0, *self._lengths])):
            batch = num_requests * (1 - number / len(self._lengths)) * size / num_devices
            batches, steps_s = zip(*self._steps[size, end].items(), strict=True)
            step_s = _interpolated(batch, batches, steps_s) * max(1.0, batch / batches[-1])
            seconds += (end - start) * step_s
        return seconds

    def fastest(self, sizes: Sequence[int], num_requests: float, num_devices: int) -> int:
        """Return the size of the shortest rollout; of equal ones the smallest."""
        return min(sizes, key=lambda size: self.rollout_s(size, num_requests, num_devices))


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The height at x of the line through points, and beyond them that of the first or the last."""
    at = bisect_right(xs, x)
    if at in (0, len(xs)):
        return ys[max(0, at - 1)]
    slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
    return slope * (x - xs[at - 1]) + ys[at - 1]


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
        batches: in ascending order; each has the first `prompts`.
        settle_s: after which an idle engine has reported its preemptions.
    """
    for size in sizes:
        await resize(engines, size // smallest)
        while engines[0].state != "open":  # noqa: ASYNC110 - servers start in their own time
            await asyncio.sleep(1.0)
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
