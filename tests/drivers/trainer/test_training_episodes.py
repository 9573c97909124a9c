"""Episodes of several turns: the environment's tokens are read by the model and add nothing to the loss."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from trainer_cases import VOCABULARY, Unit, first_moments, make_units
from transformers import AutoModelForCausalLM

from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.trainer import TorchTrainer

Make = Callable[..., TorchTrainer]
TEMPERATURE = 0.8
NO_MOMENTUM = {"betas": (0.0, 0.9), "max_grad_norm": 1e9}


def with_observations(units: list[Unit]) -> list[Unit]:
    """Two observations in each completion of more than three tokens, of unequal lengths; a branch between
    them in each of more than six."""

    def of(sample: TrainingSample) -> TrainingSample:
        length = len(sample.completion_ids)
        if length <= 3:
            return sample
        ids = [(7 * t + length) % VOCABULARY for t in range(2 + length % 5)]
        branches = [(length // 2, [3, *ids])] if length > 6 else []
        return replace(sample, observations=[(1, ids), (length - 2, ids[:2])], branches=branches)

    return [[of(sample) for sample in unit] for unit in units]


def masked_forward(model: torch.nn.Module, sample: TrainingSample) -> Tensor:
    """Log-probs of the policy's tokens, from a forward pass over each whole branch and a mask."""
    starts = [0, *(start for start, _ in sample.branches), len(sample.completion_ids)]
    contexts = [sample.prompt_ids, *(ids for _, ids in sample.branches)]
    parts = [
        masked_branch(model, sample, context, range(start, end))
        for context, start, end in zip(contexts, starts[:-1], starts[1:], strict=True)
    ]
    return torch.cat(parts)


def masked_branch(
    model: torch.nn.Module, sample: TrainingSample, context: list[int], places: range
) -> Tensor:
    ids, is_trained = list(context), [False] * len(context)
    observations = dict(sample.observations)
    for place in places:
        id = sample.completion_ids[place]
        observed = observations.get(place, [])
        ids += [*observed, id]
        is_trained += [*[False] * len(observed), True]
    logits = model(torch.tensor([ids])).logits[0, :-1].float() / TEMPERATURE
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logprobs[torch.tensor(is_trained[1:])]


def test_the_gradient_is_that_of_a_masked_loss_by_hand(
    make_trainer: Make, model_path: Path, tmp_path: Path
) -> None:
    """REINFORCE, a mean over tokens: - sum_t advantage log pi_t / number of the policy's tokens."""
    units = with_observations(make_units(3))
    samples = [sample for unit in units for sample in unit if sample.completion_ids]
    assert sum(bool(sample.observations) for sample in samples) >= 5
    assert sum(bool(sample.branches) for sample in samples) >= 3
    trainer = make_trainer(
        temperature=TEMPERATURE,
        name="reinforce",
        normalize="token_mean",
        correction="none",
        **NO_MOMENTUM,
    )
    trainer.accumulate(units)
    stats = trainer.step()
    trainer.save(tmp_path / "trained")()

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    losses = [-sample.advantage * masked_forward(model, sample).sum() for sample in samples]
    num_tokens = sum(len(sample.completion_ids) for sample in samples)
    loss = torch.stack(losses).sum() / num_tokens
    loss.backward()
    parameters = dict(model.named_parameters())
    gradients = [parameters[name].grad for name in sorted(parameters)]
    wanted = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])

    assert stats.num_tokens == num_tokens
    assert stats.loss == pytest.approx(loss.item(), abs=1e-6)
    found = first_moments(tmp_path / "trained")
    assert found.abs().max() > 1e-3
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)


def test_log_probs_are_those_of_each_whole_branch(make_trainer: Make, model_path: Path) -> None:
    trainer = make_trainer(temperature=TEMPERATURE)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    for sample in with_observations(make_units(2))[1]:
        with torch.no_grad():
            wanted = masked_forward(model, sample).tolist() if sample.completion_ids else []
        assert trainer.logprobs(sample) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    "algorithm", [{}, {"name": "gspo"}, {"name": "ppo", "gamma": 0.9, "gae_lambda": 0.8}]
)
def test_streamed_episodes_give_the_gradient_of_one_call_bit_for_bit(
    make_trainer: Make, tmp_path: Path, algorithm: dict[str, object]
) -> None:
    units = with_observations(make_units(4))
    found = []
    for number, calls in enumerate(([units], [[unit] for unit in units])):
        trainer = make_trainer(**algorithm, **NO_MOMENTUM)
        for call in calls:
            trainer.accumulate(call)
        trainer.step()
        trainer.save(tmp_path / str(number))()
        found.append(first_moments(tmp_path / str(number)))
    assert found[0].abs().max() > 1e-4
    assert torch.equal(*found)
