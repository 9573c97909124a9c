"""Every algorithm on a real model: streaming, publication, several steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from trainer_cases import MAX_TOKENS, Unit, first_moments, make_units

from tailrace.contracts.trainer import StepStats
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.packing import MicroBatch
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.types import SampleId

Make = Callable[..., TorchTrainer]
NO_MOMENTUM = {"betas": (0.0, 0.9), "max_grad_norm": 1e9}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"name": "dr_grpo"},
    "gspo": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"name": "cispo"},
    "reinforce": {"name": "reinforce"},
    "rloo": {"name": "rloo", "correction": "sequence"},
    "ppo": {"name": "ppo", "gamma": 0.9, "gae_lambda": 0.8},
    "recomputed": {"old_policy": "recomputed", "correction": "mask"},
    "kl": {"kl_coef": 0.1, "kl_bias_correction": True},
    "token_mean": {"normalize": "token_mean"},
}


def with_reference(units: list[Unit]) -> list[Unit]:
    """The units with log-probs under a reference; the first half of every other sample is masked."""

    def of(sample: TrainingSample) -> TrainingSample:
        reference_logprobs = [logprob - 0.3 for logprob in sample.behavior_logprobs]
        masked = len(sample.completion_ids) // 2 if sample.id.number % 2 else 0
        return replace(sample, reference_logprobs=reference_logprobs, num_masked=masked)

    return [[of(sample) for sample in unit] for unit in units]


def gradients(trainer: TorchTrainer, calls: list[list[Unit]], folder: Path) -> Tensor:
    """The gradients of policy and critic in one vector."""
    for units in calls:
        trainer.accumulate(units)
    trainer.step()
    trainer.save(folder)()
    owners = ["policy", "critic"] if trainer._algorithm.advantage == "gae" else ["policy"]
    return torch.cat([first_moments(folder, owner) for owner in owners])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_streamed_accumulation_equals_the_one_call_bit_for_bit(
    make_trainer: Make, tmp_path: Path, name: str
) -> None:
    units = with_reference(make_units(5))
    one_call, streamed, uneven = (
        gradients(make_trainer(**ALGORITHMS[name], **NO_MOMENTUM), calls, tmp_path / str(i))
        for i, calls in enumerate(([units], [[u] for u in units], [units[:3], [], units[3:]]))
    )
    assert one_call.abs().max() > 1e-3
    assert torch.equal(one_call, streamed)
    assert torch.equal(one_call, uneven)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_another_order_and_packing_change_only_the_rounding(
    make_trainer: Make, tmp_path: Path, name: str
) -> None:
    units = with_reference(make_units(5))
    algorithm = ALGORITHMS[name]
    wanted = gradients(make_trainer(**algorithm, **NO_MOMENTUM), [units], tmp_path / "a")
    packed = make_trainer(max_tokens_per_microbatch=10_000, **algorithm, **NO_MOMENTUM)
    joined = [sample for unit in units[::-1] for sample in unit]
    found = gradients(packed, [[joined]], tmp_path / "b")
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_empty_completions_give_no_nan(make_trainer: Make, name: str) -> None:
    trainer = make_trainer(**ALGORITHMS[name])
    empty = TrainingSample(SampleId(0, 0, 0), [1, 2], [], [], 1.0)
    trainer.accumulate([[empty, empty]])
    stats = trainer.step()
    assert (stats.loss, stats.grad_norm, stats.ess, stats.value_loss) == (0.0, 0.0, 1.0, 0.0)
    assert not stats.skipped


# -- PPO -----------------------------------------------------------------------------------------------


def ppo_steps(trainer: TorchTrainer, num: int) -> list[StepStats]:
    stats = []
    for _ in range(num):
        trainer.accumulate(make_units(2))
        stats.append(trainer.step())
    return stats


def test_a_critic_starts_at_zero_and_learns_the_rewards(make_trainer: Make) -> None:
    trainer = make_trainer(name="ppo", critic_learning_rate=1e-2, learning_rate=1e-9)
    units = make_units(2)
    first, *_, last = ppo_steps(trainer, 30)
    squares = [sample.advantage**2 / 2 for unit in units for sample in unit for _ in sample.completion_ids]
    assert first.value_loss == pytest.approx(sum(squares) / len(squares), rel=1e-5)
    assert last.value_loss < first.value_loss / 4


def test_with_a_critic_at_zero_the_advantage_is_the_reward(make_trainer: Make, tmp_path: Path) -> None:
    """With gamma = lambda = 1: then PPO's first step is the clipped surrogate's."""
    units = make_units(3)
    ppo, grpo = make_trainer(name="ppo", **NO_MOMENTUM), make_trainer(normalize="token_mean", **NO_MOMENTUM)
    for trainer in (ppo, grpo):
        trainer.accumulate(units)
    assert ppo.step().loss == pytest.approx(grpo.step().loss, abs=1e-6)
    ppo.save(tmp_path / "ppo")()
    grpo.save(tmp_path / "grpo")()
    torch.testing.assert_close(first_moments(tmp_path / "ppo"), first_moments(tmp_path / "grpo"))


def test_a_restored_critic_goes_on_bit_for_bit_and_is_never_published(
    make_trainer: Make, tmp_path: Path
) -> None:
    original = make_trainer(name="ppo", critic_learning_rate=1e-2)
    ppo_steps(original, 2)
    original.save(tmp_path / "checkpoint")()
    wanted = ppo_steps(original, 3)
    restored = make_trainer(name="ppo", critic_learning_rate=1e-2)
    restored.restore(tmp_path / "checkpoint")
    got = ppo_steps(restored, 3)
    assert [stats.value_loss for stats in got] == [stats.value_loss for stats in wanted]
    assert [stats.loss for stats in got] == [stats.loss for stats in wanted]
    assert not [
        name for name in original.export_weights() if "head." in name and not name.startswith("lm_head")
    ]


# -- the old policy ------------------------------------------------------------------------------------


def test_with_a_recomputed_old_policy_the_ratio_is_one_until_the_weights_change(
    make_trainer: Make,
) -> None:
    units = make_units(3)
    trainer = make_trainer(old_policy="recomputed", learning_rate=3e-2)
    losses = []
    for _ in range(2):
        trainer.accumulate(units)
        losses.append(trainer.step())
    advantages = [s.advantage if s.completion_ids else 0.0 for unit in units for s in unit]
    assert losses[0].loss == pytest.approx(-sum(advantages) / len(advantages), abs=1e-5)
    assert losses[0].clip_ratio == 0 and losses[1].clip_ratio > 0
    trainer.export_weights()
    trainer.accumulate(units)
    assert trainer.step().clip_ratio == 0


def test_a_recomputed_old_policy_equals_log_probs_recorded_by_the_published_weights(
    make_trainer: Make,
) -> None:
    """Also in the second step of a round, after the weights have changed."""
    units = make_units(2)
    recomputed, recorded = make_trainer(old_policy="recomputed"), make_trainer()
    published = recorded_by(make_trainer(), units)
    for _ in range(2):
        for trainer, batch in ((recomputed, units), (recorded, published)):
            trainer.accumulate(batch)
        found, wanted = recomputed.step(), recorded.step()
        assert found.loss == pytest.approx(wanted.loss, abs=1e-6)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


def test_the_device_is_waited_for_before_published_and_current_weights_are_exchanged(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of offloaded weights to the device may still read them."""
    trainer = make_trainer(old_policy="recomputed", learning_rate=3e-2)
    trainer.accumulate(make_units(1))
    trainer.step()
    held: list[Tensor] = []

    def synchronize(policy: PolicyModel) -> None:
        held.append(next(iter(policy.parameters().values())).detach().clone())

    monkeypatch.setattr(PolicyModel, "synchronize", synchronize)
    assert trainer._published
    trainer._published.logprobs(MicroBatch.of(make_units(1)[0], torch.device("cpu")))
    current, published = held
    assert not torch.equal(current, published)


def recorded_by(trainer: TorchTrainer, units: list[Unit]) -> list[Unit]:
    """The samples with log-probs of a trainer's policy."""
    return [
        [replace(sample, behavior_logprobs=logprobs) for sample, logprobs in zip(unit, found, strict=True)]
        for unit, found in ((unit, trainer._policy.logprobs_of(unit)) for unit in units)
    ]


# -- masked tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"normalize": normalize} for normalize in ("sample_mean", "token_mean", "fixed_length")),
        {"name": "rloo", "correction": "sequence"},
        {"kl_coef": 0.1},
    ],
    ids=str,
)
def test_masked_tokens_are_as_if_they_were_prompt(
    make_trainer: Make, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    """They are context, and in no loss, count or statistic. One sample of each group has no other tokens: it
    is as one with an empty completion."""
    masked_units = [
        [replace(sample, num_masked=len(sample.completion_ids) // (1 + place)) for place, sample in each]
        for each in map(enumerate, with_reference(make_units(3)))
    ]
    prompted = [[as_prompt(sample, sample.num_masked) for sample in unit] for unit in masked_units]
    masked, plain = (make_trainer(**algorithm, **NO_MOMENTUM) for _ in range(2))
    assert masked.ess(masked_units) == pytest.approx(plain.ess(prompted), abs=1e-6)
    stats = []
    for name, trainer, units in (("masked", masked, masked_units), ("plain", plain, prompted)):
        trainer.accumulate(units)
        stats.append(trainer.step())
        trainer.save(tmp_path / name)()
    found, wanted = (first_moments(tmp_path / name) for name in ("masked", "plain"))
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert stats[0].num_tokens == stats[1].num_tokens
    for figure in ("loss", "entropy", "clip_ratio", "kl", "ess", "reference_kl"):
        assert getattr(stats[0], figure) == pytest.approx(getattr(stats[1], figure), rel=1e-4), figure


def test_a_critic_learns_nothing_of_masked_tokens(make_trainer: Make) -> None:
    (unit,) = make_units(1)
    losses = []
    for units in ([unit], [[replace(sample, num_masked=len(sample.completion_ids)) for sample in unit]]):
        trainer = make_trainer(name="ppo", **NO_MOMENTUM)
        trainer.accumulate(units)
        losses.append(trainer.step().value_loss)
    assert losses[0] > 0 == losses[1]


@pytest.mark.parametrize(
    ("normalize", "loss"),
    [
        ("sample_mean", -(1 + 0 + 3) / 3),  # a sample keeps its weight, which its other tokens share
        ("token_mean", -(2 * 1 + 3 * 3) / 5),
        ("sample_sum", -(2 * 1 + 3 * 3) / 3),
        ("fixed_length", -(2 * 1 + 3 * 3) / 3 / MAX_TOKENS),
    ],
)
def test_the_loss_of_a_step_with_masked_tokens_by_hand(
    make_trainer: Make, normalize: str, loss: float
) -> None:
    """The ratio of a token is 1, and its loss its advantage: 1 for a sample of 4 tokens of which 2 are
    masked, -2 for one of 2 that are both masked, 3 for one of 3 tokens."""
    cases = ((4, 2, 1.0), (2, 2, -2.0), (3, 0, 3.0))
    unit = [
        TrainingSample(SampleId(0, 0, i), [1, 2], [3] * n, [0.0] * n, advantage)
        for i, (n, _, advantage) in enumerate(cases)
    ]
    trainer = make_trainer(normalize=normalize)
    (unit,) = recorded_by(trainer, [unit])
    trainer.accumulate([[replace(each, num_masked=case[1]) for each, case in zip(unit, cases, strict=True)]])
    stats = trainer.step()
    assert stats.loss == pytest.approx(loss, abs=1e-5)
    assert (len(stats.samples), stats.num_tokens) == (3, 5)


def test_a_step_of_masked_tokens_only_is_data(make_trainer: Make) -> None:
    (unit,) = make_units(1)
    trainer = make_trainer()
    trainer.accumulate([[replace(sample, num_masked=len(sample.completion_ids)) for sample in unit]])
    stats = trainer.step()
    assert (stats.loss, stats.grad_norm, stats.ess, stats.num_tokens) == (0.0, 0.0, 1.0, 0)
    assert len(stats.samples) == 4 and not stats.skipped


def as_prompt(sample: TrainingSample, n: int) -> TrainingSample:
    """The first n tokens of the completion given to the prompt."""
    ids = sample.completion_ids
    return replace(
        sample,
        prompt_ids=sample.prompt_ids + ids[:n],
        completion_ids=ids[n:],
        behavior_logprobs=sample.behavior_logprobs[n:],
        reference_logprobs=sample.reference_logprobs[n:],
        num_masked=0,
    )


def in_loss(units: list[Unit]) -> list[float]:
    """The recorded log-probs of the tokens in the loss."""
    return [p for unit in units for sample in unit for p in sample.behavior_logprobs[sample.num_masked :]]


# -- what a step says ----------------------------------------------------------------------------------


def test_a_step_reports_its_effective_sample_size_and_its_kl_to_the_reference(make_trainer: Make) -> None:
    units = with_reference(make_units(3))
    trainer = make_trainer(kl_coef=0.1, kl_estimator="k1")
    guard = trainer.ess(units)
    trainer.accumulate(units)
    stats = trainer.step()
    assert stats.ess == pytest.approx(guard, rel=1e-6) and 0 < stats.ess < 0.99
    tokens = in_loss(units)
    current = in_loss(recorded_by(make_trainer(), units))
    away = [p - (mu - 0.3) for p, mu in zip(current, tokens, strict=True)]
    assert stats.reference_kl == pytest.approx(sum(away) / len(away), abs=1e-5)


def test_a_gradient_that_is_not_finite_moves_nothing(make_trainer: Make, tmp_path: Path) -> None:
    trainer, untroubled = make_trainer(), make_trainer()
    units = make_units(2)
    poisoned = [[replace(sample, advantage=float("inf")) for sample in units[0]]]
    for each in (trainer, untroubled):
        each.accumulate(units)
        assert not each.step().skipped
    before = {name: tensor.clone() for name, tensor in dict(trainer.weights()).items()}
    trainer.accumulate(poisoned)
    stats = trainer.step()
    assert stats.skipped and stats.num_steps == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in dict(trainer.weights()).items())
    trainer.save(tmp_path / "checkpoint")()
    restored = make_trainer()
    restored.restore(tmp_path / "checkpoint")
    for each in (trainer, untroubled, restored):
        each.accumulate(units)
        each.step()
    for name, tensor in dict(untroubled.weights()).items():
        assert torch.equal(tensor, dict(trainer.weights())[name]), "AdamW's own count was not kept"
        assert torch.equal(tensor, dict(restored.weights())[name]), "the checkpoint's count was not AdamW's"


def test_a_sample_as_long_as_the_limit_weighs_one_under_dr_grpo(make_trainer: Make) -> None:
    (unit,) = make_units(1)
    losses = []
    for settings in ({"name": "dr_grpo"}, {"normalize": "sample_sum", "advantage": "none"}):
        trainer = make_trainer(**settings)
        trainer.accumulate([unit])
        losses.append(trainer.step().loss)
    assert losses[0] == pytest.approx(losses[1] / MAX_TOKENS, rel=1e-5)
