"""Simulated data: seeded prompts and response lengths."""

import math
from functools import lru_cache

from tailrace.data.epochs import Epochs
from tailrace.sim.chance import Chance
from tailrace.sim.lengths import law_of, read_recorded
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, RecordedSettings, SimLengthSettings
from tailrace.types import Prompt, Sample

PROMPT, SAMPLE = 1, 2
"""What a stream of chance is for, besides those of reward.py."""
MANY_PROMPTS = 2**16
"""Prompts whose chance is remembered, because their samples come one after another."""


def row_of(prompt: Prompt) -> int:
    """Return the row of the data, which is the same in every epoch."""
    return prompt.index if prompt.row_number is None else prompt.row_number


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

    The part that a group shares is a function of the row of the data: the prompt's difficulty. It is the same
    in every epoch and for every attempt, so a prompt that is deferred stays long.
    """

    def __init__(self, settings: SimLengthSettings, seed: int) -> None:
        recorded = settings.distribution
        self._recorded = read_recorded(recorded.path) if isinstance(recorded, RecordedSettings) else {}
        self._seed, self._law = seed, law_of(settings, self._recorded)
        self._shared, self._own = math.sqrt(settings.correlation), math.sqrt(1 - settings.correlation)
        self._drift = math.log(settings.drift) / 100
        self._difficulty = lru_cache(MANY_PROMPTS)(self._difficulty_of)
        self._max_tokens = settings.max_tokens or DEFAULT_MAX_TOKENS

    def __call__(self, sample: Sample, version: int = 0) -> int:
        """Return the length that a sample will have, in tokens.

        Args:
            version: of the weights that a sample without tokens begins with.
        """
        prompt = sample.prompt
        if recorded := self._recorded.get((prompt.index, sample.id.number)):
            return min(self._max_tokens, recorded)
        shared = self._difficulty(row_of(prompt))
        own = Chance(SAMPLE, self._seed, prompt.index, sample.id.number).normal()
        tokens = self._law(self._shared * shared + self._own * own)
        if self._drift:
            begun = sample.spans[0].version if sample.spans else version
            tokens *= math.exp(self._drift * begun)
        return max(1, min(self._max_tokens, int(tokens)))

    def _difficulty_of(self, row: int) -> float:
        return Chance(PROMPT, self._seed, row).normal()

    @property
    def median_tokens(self) -> float:
        """The median of version 0, without the limit."""
        return self._law(0.0)
