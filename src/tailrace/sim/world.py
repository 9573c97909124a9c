"""The parts of a simulated run: seeded prompts and lengths; engines, trainer and rewards made of time."""

import math
import random

from tailrace.data.epochs import Epochs
from tailrace.controller.base import Parts
from tailrace.sim.engine import SimEngine
from tailrace.sim.reference import SimReference
from tailrace.sim.reward import SimRewards
from tailrace.sim.settings import SimLengthSettings, SimSettings
from tailrace.sim.trainer import SimTrainer
from tailrace.types import Prompt, Sample


class SimPrompts:
    """Prompts of one length and no text."""

    def __init__(self, num_tokens: int, epochs: Epochs | None = None) -> None:
        self._ids = range(num_tokens)
        self._epochs = epochs

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index) if self._epochs else None
        return Prompt(index, self._ids, row_number=row_number)


class Lengths:
    """How long each response will be, fixed by its id and the seed; what it shares with its group is the
    row's own, in every epoch."""

    def __init__(self, settings: SimLengthSettings, seed: int) -> None:
        self._settings, self._seed = settings, seed

    def __call__(self, sample: Sample) -> int:
        settings = self._settings
        prompt = sample.prompt
        row = prompt.index if prompt.row_number is None else prompt.row_number
        shared = random.Random(f"prompt {self._seed} {row}").gauss(0, 1)
        own = random.Random(f"sample {self._seed} {prompt.index}/{sample.id.number}").gauss(0, 1)
        z = math.sqrt(settings.correlation) * shared + math.sqrt(1 - settings.correlation) * own
        tokens = int(settings.median_tokens * math.exp(settings.sigma * z))
        return max(1, min(settings.max_tokens, tokens))


def simulated_parts(settings: SimSettings, seed: int, *, reference: bool = False) -> Parts:
    """Must be called on the virtual loop: engines and workers belong to it. reference: whether there is
    one."""
    lengths = Lengths(settings.lengths, seed)
    epochs = Epochs(settings.lengths.rows, seed) if settings.lengths.rows else None
    prompts = SimPrompts(settings.lengths.prompt_tokens, epochs)
    return Parts(
        engines=[SimEngine(f"engine{i}", settings.engines, lengths) for i in range(settings.engines.count)],
        trainer=SimTrainer(settings.trainer),
        rewards=SimRewards(settings.rewards, seed),
        prompts=prompts,
        held_out=prompts,
        reference=SimReference(settings.reference) if reference else None,
    )
