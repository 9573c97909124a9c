"""What a lap's checkpoints can do, measured after the lap, so that looking disturbs nothing.

The length of a response is measured on prompts that the lap drew, each generated without interruption: those
drawn between two checkpoints, half of their samples with the weights of the one and half with the other's.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import BadRow
from tailrace.controller.base import Parts, RunSettings
from tailrace.record.events import Recorder, Saved
from tailrace.rollout.evaluation import evaluate, held_out_samples
from tailrace.rollout.router import Router
from tailrace.types import Group, Sample, SampleId, noise_seed
from tailrace.weights.base import Weights

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Probe:
    """One checkpoint."""

    round: int
    accuracy: float
    """Held-out, sampled."""
    lengths: dict[int, list[int]]
    """Of each prompt drawn until the next checkpoint: tokens of its responses, uninterrupted."""


async def probe(parts: Parts, checkpoints: Sequence[Saved], settings: RunSettings) -> list[Probe]:
    """Every checkpoint of a lap, in order."""
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


async def _measure(router: Router, responses: Sequence[Sample], lengths: dict[int, list[int]]) -> None:
    await asyncio.gather(*(router.serve(response) for response in responses))
    for response in responses:
        lengths.setdefault(response.id.prompt, []).append(response.num_tokens)


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
