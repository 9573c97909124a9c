"""Samples to train on, and how to read the gradient that a step used."""

import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tailrace.algo.base import AlgorithmSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.distributed import Ranks
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.types import SampleId

VOCABULARY = 24
MAX_TOKENS = 50
"""The limit of a completion."""
Unit = list[TrainingSample]


def make_units(num_units: int, num_samples: int = 4, seed: int = 0) -> list[Unit]:
    """Groups of samples of unequal lengths with one prompt, one with an empty completion in each second
    group."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(3 + prompt % 3)] for prompt in range(num_units)]

    def sample(prompt: int, index: int) -> TrainingSample:
        length = min(40, int(chance.lognormvariate(1.8, 0.9)) + 1)
        if index == 1 and prompt % 2:
            length = 0
        return TrainingSample(
            id=SampleId(prompt, 0, index),
            prompt_ids=prompts[prompt],
            completion_ids=[chance.randrange(VOCABULARY) for _ in range(length)],
            behavior_logprobs=[chance.uniform(-4, -2) for _ in range(length)],
            advantage=chance.gauss(0, 1),
        )

    return [[sample(prompt, index) for index in range(num_samples)] for prompt in range(num_units)]


def make_torch_trainer(
    model: Path, *, temperature: float = 1.0, place: Ranks | None = None, **settings: object
) -> TorchTrainer:
    """A trainer of a model folder; each setting goes to the section that has it."""
    own = {key: value for key, value in settings.items() if key in AlgorithmSettings.model_fields}
    rest = {key: value for key, value in settings.items() if key not in own}
    return TorchTrainer(
        model,
        TrainerSettings.model_validate(rest),
        AlgorithmSettings.model_validate(own),
        SamplingSettings(temperature=temperature, max_completion_tokens=MAX_TOKENS),
        ranks=place,
    )


def first_moments(folder: Path, owner: str = "policy") -> Tensor:
    """All of AdamW's first moments in one vector: with betas=(0, b) the gradient of the last step. Of a
    checkpoint of one rank."""
    tensors = {key: each for file in (folder / "trainer").iterdir() for key, each in load_file(file).items()}
    return torch.cat([tensors[key].flatten() for key in sorted(tensors) if key.startswith(f"{owner}.first.")])
