"""What the checkpoints of a lap can do. It is measured after the lap, so that it does not disturb the lap.

The lengths of uninterrupted responses are measured on the prompts that the lap drew. For the prompts drawn
between two checkpoints, half of the samples are generated with the weights of the one, half with those of the
other.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

from tailrace.controller.base import Parts, RunSettings
from tailrace.errors import BadRow
from tailrace.record.events import Event, Recorder, RoundEnded, RoundStarted, Saved, Stepped
from tailrace.rollout.evaluation import evaluate, held_out_samples
from tailrace.rollout.router import Router
from tailrace.types import Group, Sample, SampleId, noise_seed
from tailrace.weights.base import Weights

WEIGHTS_FILE = "model.safetensors"
SETTLED = 0.75
"""Share of a lap's prompts, in the order of drawing, whose fate is known at the end of the lap."""


class LapLog:
    """Sink: the checkpoints of a lap, its trained lengths and the times of its rounds."""

    def __init__(self) -> None:
        self.checkpoints: list[Saved] = []
        self.trained: defaultdict[int, list[int]] = defaultdict(list)
        """Tokens of the trained responses to each prompt."""
        self.ends_s: dict[int, float] = {}
        """Ends of the rounds, since the start of the first."""
        self._start_s: float | None = None

    def on(self, event: Event) -> None:
        match event:
            case RoundStarted() if self._start_s is None:
                self._start_s = event.time_s
            case RoundEnded():
                self.ends_s[event.round] = event.time_s - (self._start_s or 0.0)
            case Saved():
                self.checkpoints.append(event)
            case Stepped():
                for sample in event.samples:
                    self.trained[sample.id.prompt].append(sample.num_tokens)

    def close(self) -> None:
        """Nothing is pending."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One checkpoint, at the top of a round."""

    round: int
    accuracy: float
    """Held-out accuracy."""
    lengths: dict[int, list[int]]
    """Tokens of uninterrupted responses to each prompt that was drawn until the next checkpoint."""


async def probe(parts: Parts, checkpoints: Sequence[Saved], settings: RunSettings) -> list[Probe]:
    """Measure every checkpoint of a lap, in order."""
    router, half = Router(parts.engines, Recorder()), settings.group_size // 2
    probes: list[Probe] = []
    for before, checkpoint, after in zip(
        [None, *checkpoints], checkpoints, [*checkpoints[1:], None], strict=False
    ):
        weights = Weights(checkpoint.version, str(Path(checkpoint.path) / WEIGHTS_FILE))
        await asyncio.gather(*(engine.load(weights, kv="recompute") for engine in parts.engines))
        held_out = held_out_samples(parts.held_out, settings.eval_prompts, settings.seed, 0)
        accuracy = (await evaluate(held_out, router, parts.rewards)).accuracy
        probes.append(Probe(checkpoint.round, accuracy, {}))
        if before:
            drawn = range(before.num_drawn, checkpoint.num_drawn)
            responses = _samples(parts, settings, drawn, range(half, settings.group_size))
            await _measure(router, responses, probes[-2].lengths)
        if after:
            drawn = range(checkpoint.num_drawn, after.num_drawn)
            await _measure(router, _samples(parts, settings, drawn, range(half)), probes[-1].lengths)
    return probes


def length_bias(
    trained: Mapping[int, Sequence[int]], probes: Sequence[Probe], warm_up_rounds: int
) -> float | None:
    """Mean trained length over the mean uninterrupted length of the same prompts, minus 1.

    Prompts drawn at the end of the lap are left out, because they may still be in flight. A prompt that was
    drawn before and never trained counts in the uninterrupted lengths only: leaving it out is a bias, too.
    """
    probed = [probe for probe in probes if probe.round >= warm_up_rounds and probe.lengths]
    if not probed:
        return None
    settled = SETTLED * max(max(probe.lengths) for probe in probed)
    alone = {index: n for probe in probed for index, n in probe.lengths.items() if index <= settled}
    lengths = [n for index in alone for n in trained.get(index, [])]
    if not lengths:
        return None
    return fmean(lengths) / fmean(chain.from_iterable(alone.values())) - 1.0


def time_to(target: float, probes: Sequence[Probe], ends_s: Mapping[int, float]) -> float | None:
    """Seconds until the accuracy reaches a target, interpolated linearly between the checkpoints."""
    before: tuple[float, float] | None = None
    for probe in probes:
        time_s = ends_s[probe.round - 1] if probe.round else 0.0
        if probe.accuracy >= target:
            if before is None:
                return time_s
            share = (target - before[1]) / (probe.accuracy - before[1])
            return before[0] + share * (time_s - before[0])
        before = time_s, probe.accuracy
    return None


async def _measure(router: Router, responses: Sequence[Sample], lengths: dict[int, list[int]]) -> None:
    await asyncio.gather(*(router.serve(response) for response in responses))
    for response in responses:
        lengths.setdefault(response.id.prompt, []).append(response.num_tokens)


def _samples(
    parts: Parts, settings: RunSettings, drawn: Sequence[int], numbers: Sequence[int]
) -> list[Sample]:
    """Samples with these numbers of the drawn groups, with the noise that they had in the lap."""
    samples = []
    for index in drawn:
        try:
            group = Group(parts.prompts[index], settings.group_size, [])
        except BadRow:
            continue
        ids = [SampleId(index, 0, number) for number in numbers]
        group.samples = [Sample(id, group, seed=noise_seed(settings.seed, id)) for id in ids]
        samples += group.samples
    return samples
