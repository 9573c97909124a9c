"""Simulated data: seeded prompts and response lengths."""

import math
import random

from tailrace.data.epochs import Epochs
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, DEFAULT_MEDIAN_TOKENS, SimLengthSettings
from tailrace.types import Prompt, Sample


class SimPrompts:
    """Prompts of one length without text."""

    def __init__(self, num_tokens: int, epochs: Epochs | None = None) -> None:
        self._ids = range(num_tokens)
        self._epochs = epochs

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index) if self._epochs else None
        return Prompt(index, self._ids, row_number=row_number)


class Lengths:
    """The length of each response, a function of its id and the seed.

    The part that a group shares is a function of the row of the data, and so the same in every epoch.
    """

    def __init__(self, settings: SimLengthSettings, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._median_tokens = settings.median_tokens or DEFAULT_MEDIAN_TOKENS
        self._max_tokens = settings.max_tokens or DEFAULT_MAX_TOKENS

    def __call__(self, sample: Sample) -> int:
        settings = self._settings
        prompt = sample.prompt
        row = prompt.index if prompt.row_number is None else prompt.row_number
        shared = random.Random(f"prompt {self._seed} {row}").gauss(0, 1)
        own = random.Random(f"sample {self._seed} {prompt.index}/{sample.id.number}").gauss(0, 1)
        z = math.sqrt(settings.correlation) * shared + math.sqrt(1 - settings.correlation) * own
        tokens = int(self._median_tokens * math.exp(settings.sigma * z))
        return max(1, min(self._max_tokens, tokens))
