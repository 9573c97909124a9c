"""The parts of a simulated run: seeded prompts and lengths; engines, trainer and rewards made of time."""

import math
import random

from tailrace.run import Parts
from tailrace.sim.engine import SimEngine
from tailrace.sim.reward import SimRewards
from tailrace.sim.settings import SimLengthSettings, SimSettings
from tailrace.sim.trainer import SimTrainer
from tailrace.types import Prompt, Sample


class SimPrompts:
    """Endless prompts of one length and no text."""

    def __init__(self, num_tokens: int) -> None:
        self._ids = range(num_tokens)

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, self._ids)


class Lengths:
    """How long each response will be, fixed by its id and the seed."""

    def __init__(self, settings: SimLengthSettings, seed: int) -> None:
        self._settings, self._seed = settings, seed

    def __call__(self, sample: Sample) -> int:
        settings = self._settings
        shared = random.Random(f"prompt {self._seed} {sample.prompt.index}").gauss(0, 1)
        own = random.Random(f"sample {self._seed} {sample.id}").gauss(0, 1)
        z = math.sqrt(settings.correlation) * shared + math.sqrt(1 - settings.correlation) * own
        tokens = int(settings.median_tokens * math.exp(settings.sigma * z))
        return max(1, min(settings.max_tokens, tokens))


def simulated_parts(settings: SimSettings, seed: int) -> Parts:
    """Must be called on the virtual loop: engines and workers belong to it."""
    lengths = Lengths(settings.lengths, seed)
    prompts = SimPrompts(settings.lengths.prompt_tokens)
    return Parts(
        engines=[SimEngine(f"engine{i}", settings.engines, lengths) for i in range(settings.engines.count)],
        trainer=SimTrainer(settings.trainer),
        rewards=SimRewards(settings.rewards, seed),
        prompts=prompts,
        held_out=prompts,
    )
