"""The same batch through TRL's GRPOTrainer and ours: the same loss and gradients to 1e-6."""

import json
from pathlib import Path

import pytest
import torch
from trainer_cases import first_moments
from trl_reference import (
    CLIP_HIGH,
    CLIP_LOW,
    FIXTURE,
    TEMPERATURE,
    reference_model,
    reference_samples,
    trl_loss_and_gradients,
)

from tailrace.trainer.base import TrainerSettings
from tailrace.trainer.torch_trainer import TorchTrainer
from tailrace.trainer.wire import TrainSample
from tailrace.types import SampleId


@pytest.mark.parametrize("normalize", ["sample_mean", "token_mean"])
@pytest.mark.parametrize("token_budget", [10, 1000])
def test_loss_and_gradients_equal_those_trl_gave(tmp_path: Path, normalize: str, token_budget: int) -> None:
    reference = json.loads(FIXTURE.read_text())[normalize]
    reference_model().save_pretrained(tmp_path / "model")
    settings = TrainerSettings.model_validate(
        {
            "normalize": normalize,
            "clip_low": CLIP_LOW,
            "clip_high": CLIP_HIGH,
            "betas": (0.0, 0.9),
            "max_grad_norm": 1e9,
            "token_budget": token_budget,
        }
    )
    trainer = TorchTrainer.from_pretrained(tmp_path / "model", settings, temperature=TEMPERATURE)
    samples = [TrainSample(SampleId(0, 0, i), **s) for i, s in enumerate(reference_samples())]
    trainer.accumulate([samples[:3], samples[3:]])
    stats = trainer.step()
    trainer.save(tmp_path / "trained")
    gradients = reference["gradients"]
    wanted = torch.tensor([value for name in sorted(gradients) for value in gradients[name]])
    assert stats.loss == pytest.approx(reference["loss"], abs=1e-6)
    assert 0 < stats.clip_ratio < 1, "the batch must exercise the clip"
    torch.testing.assert_close(first_moments(tmp_path / "trained"), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("normalize", ["sample_mean", "token_mean"])
def test_the_stored_reference_is_what_trl_gives(normalize: str) -> None:
    pytest.importorskip("trl", reason="TRL is installed by the benchmark's extra only")
    reference = json.loads(FIXTURE.read_text())[normalize]
    loss, gradients = trl_loss_and_gradients(normalize)
    assert loss == pytest.approx(reference["loss"], abs=1e-6)
    for name, values in gradients.items():
        assert values == pytest.approx(reference["gradients"][name], abs=1e-6), name
