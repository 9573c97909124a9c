"""What a sample costs, by which processes share a pass."""

from pathlib import Path

import pytest
from trainer_cases import MAX_TOKENS
from transformers import AutoModelForCausalLM

from tailrace.algo.base import AlgorithmSettings
from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.passes import BOTH_WAYS, Passes
from tailrace.trainer.wire import TrainingSample
from tailrace.types import SampleId


def sample(num_tokens: int, advantage: float) -> TrainingSample:
    completion = [1] * num_tokens
    return TrainingSample(SampleId(0, 0, 0), [2, 3, 4], completion, [-1.0] * num_tokens, advantage)


@pytest.fixture
def passes(model_path: Path) -> Passes:
    settings = TrainerSettings(learning_rate=1e-3)
    return Passes.load(model_path, settings, AlgorithmSettings(), temperature=1.0, max_tokens=MAX_TOKENS)


def test_a_sample_costs_its_tokens_and_what_each_attends_to(passes: Passes, model_path: Path) -> None:
    num_parameters = AutoModelForCausalLM.from_pretrained(model_path).num_parameters()
    attention = 2 * 4 * 8 / num_parameters  # layers, heads, dimensions
    assert passes.cost(sample(38, 0.0)) == pytest.approx(40 + 40 * 40 * attention)
    assert passes.cost(sample(1, 0.0)) == pytest.approx(3 + 3 * 3 * attention)


def test_a_sample_without_an_advantage_costs_the_forward_pass_alone(passes: Passes) -> None:
    assert passes.cost(sample(38, -0.5)) == pytest.approx(BOTH_WAYS * passes.cost(sample(38, 0.0)))
