"""What a lap's checkpoints can do, measured after the lap, so that looking disturbs nothing.

The length of a response is measured on prompts that the lap drew, each generated without interruption: those
drawn between two checkpoints, half of their samples with the weights of the one and half with the other's.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import BadRow
from tailrace.ledger.state import RunState
from tailrace.record.events import Recorder
from tailrace.rollout.evaluation import evaluate, held_out_samples
from tailrace.rollout.fleet import Fleet
from tailrace.run import Parts, RunSettings
from tailrace.types import Group, Sample, SampleId, noise_seed
from tailrace.weights.base import Weights

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Probe:
    """One checkpoint."""

    round: int
    accuracy: float
    """Held-out, sampled."""
    lengths: list[int]
    """Uninterrupted responses to the prompts drawn until the next checkpoint; of the last one, none."""


async def probe(parts: Parts, folder: Path, settings: RunSettings) -> list[Probe]:
    """Every checkpoint in a lap's folder, in order."""
    checkpoints = sorted(folder.glob("round_??????"))
    states = [RunState.load(checkpoint, "") for checkpoint in checkpoints]
    fleet = Fleet(parts.engines, Recorder())
    accuracies, lengths = [], [[] for _ in checkpoints]  # type: list[float], list[list[int]]
    for place, checkpoint in enumerate(checkpoints):
        weights = Weights(states[place].version, str(checkpoint / WEIGHTS_FILE))
        await asyncio.gather(*(engine.load(weights, kv="recompute") for engine in parts.engines))
        held_out = held_out_samples(parts.held_out, settings.eval_prompts, settings.seed, 0)
        accuracies.append((await evaluate(held_out, fleet, parts.rewards)).accuracy)
        half = settings.group_size // 2
        for interval, numbers in ((place, range(half)), (place - 1, range(half, settings.group_size))):
            if 0 <= interval < len(checkpoints) - 1:
                drawn = range(states[interval].cursor, states[interval + 1].cursor)
                samples = _samples(parts, settings, drawn, numbers)
                await asyncio.gather(*(fleet.serve(sample) for sample in samples))
                lengths[interval] += [sample.num_tokens for sample in samples]
    return [
        Probe(state.round, accuracy, each)
        for state, accuracy, each in zip(states, accuracies, lengths, strict=True)
    ]


def _samples(
    parts: Parts, settings: RunSettings, drawn: Sequence[int], numbers: Sequence[int]
) -> list[Sample]:
    """The samples of these numbers of groups, with the noise that they had in the lap."""
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
