import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from trainer_cases import Unit, first_moments, make_units

from tailrace.contracts.trainer import TrainerSettings
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.drivers.trainer.model import PolicyModel
from tailrace.drivers.trainer.packing import MicroBatch
from tailrace.drivers.trainer.trainer import TorchTrainer
from tailrace.errors import ScheduleError
from tailrace.types import SampleId

Make = Callable[..., TorchTrainer]
NO_MOMENTUM = {"betas": (0.0, 0.9), "max_grad_norm": 1e9}


def gradient(trainer: TorchTrainer, calls: list[list[Unit]], folder: Path) -> Tensor:
    """The normalised gradient of a step that these calls accumulated, in one vector."""
    for units in calls:
        trainer.accumulate(units)
    trainer.step()
    trainer.save(folder)()
    return first_moments(folder)


@pytest.mark.parametrize("normalize", ["sample_mean", "token_mean"])
def test_streamed_accumulation_equals_the_one_call_bit_for_bit(
    make_trainer: Make, tmp_path: Path, normalize: str
) -> None:
    units = make_units(5)
    one_call, streamed, uneven = (
        gradient(make_trainer(normalize=normalize, **NO_MOMENTUM), calls, tmp_path / str(i))
        for i, calls in enumerate(([units], [[u] for u in units], [units[:3], [], units[3:]]))
    )
    assert one_call.abs().max() > 1e-3
    assert torch.equal(one_call, streamed)
    assert torch.equal(one_call, uneven)


def test_small_units_are_computed_together_at_most_until_the_step(make_trainer: Make) -> None:
    ten = [[3] * 9, [-3.0] * 9]  # with a prompt of two: ten tokens fed
    units = [[TrainingSample(SampleId(0, 0, 0), [1, prompt], *ten, 1.0)] for prompt in range(7)]
    trainer = make_trainer(max_tokens_per_microbatch=1000, min_tokens_per_microbatch=30)
    trainer.accumulate(units[:2])
    assert not trainer_gradient(trainer).any()
    trainer.accumulate(units[2:3])
    assert trainer_gradient(trainer).any()
    trainer.accumulate(units[3:])
    assert trainer.step().num_micro_batches == 3


def test_what_waits_when_weights_are_published_has_the_old_policy_of_before(make_trainer: Make) -> None:
    unit = [TrainingSample(SampleId(0, 0, 0), [1, 2], [3] * 9, [-3.0] * 9, 1.0)]
    trainer = make_trainer(max_tokens_per_microbatch=1000, min_tokens_per_microbatch=1000)
    trainer.accumulate([unit])
    trainer.step()
    trainer.accumulate([unit])
    assert not trainer_gradient(trainer).any()
    trainer.export_weights()
    assert trainer_gradient(trainer).any()


def test_samples_without_advantage_are_counted_and_measured_as_if_they_had_one(
    make_trainer: Make, tmp_path: Path
) -> None:
    units = make_units(4)
    hardly, none = (
        [units[0], [msgspec.structs.replace(sample, advantage=advantage) for sample in units[1]], *units[2:]]
        for advantage in (1e-30, 0.0)
    )
    gradients, stats = [], []
    for index, of in enumerate((hardly, none)):
        trainer = make_trainer(normalize="token_mean", **NO_MOMENTUM)
        trainer.accumulate(of)
        stats.append(trainer.step())
        trainer.save(tmp_path / str(index))()
        gradients.append(first_moments(tmp_path / str(index)))
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)
    with_some, without = stats
    assert without.samples == with_some.samples
    assert without.num_tokens == with_some.num_tokens
    for name in ("loss", "entropy", "kl", "ess"):
        assert getattr(without, name) == pytest.approx(getattr(with_some, name), rel=1e-5, abs=1e-7), name


def test_samples_without_advantage_have_a_gradient_of_the_kl_in_the_loss(make_trainer: Make) -> None:
    sample = TrainingSample(SampleId(0, 0, 0), [1, 2], [3] * 9, [-3.0] * 9, 0.0, [-3.0] * 9)
    trainer = make_trainer(min_tokens_per_microbatch=1)
    trainer.accumulate([[sample]])
    assert not trainer_gradient(trainer).any()
    trainer = make_trainer(min_tokens_per_microbatch=1, kl_coef=0.1)
    trainer.accumulate([[sample]])
    assert trainer_gradient(trainer).any()


def trainer_gradient(trainer: TorchTrainer) -> Tensor:
    """The gradient of all parameters, as summed so far."""
    return torch.cat([gradient.flatten() for gradient in trainer._optimizer.gradients()])


@pytest.mark.parametrize("normalize", ["sample_mean", "token_mean"])
def test_another_order_or_packing_changes_only_the_rounding(
    make_trainer: Make, tmp_path: Path, normalize: str
) -> None:
    units = make_units(5)
    wanted = gradient(make_trainer(normalize=normalize, **NO_MOMENTUM), [units], tmp_path / "a")
    reverse = make_trainer(normalize=normalize, **NO_MOMENTUM)
    packed = make_trainer(normalize=normalize, max_tokens_per_microbatch=10_000, **NO_MOMENTUM)
    alone = make_trainer(normalize=normalize, max_tokens_per_microbatch=1, **NO_MOMENTUM)
    joined = [[sample for unit in units for sample in unit]]
    torch.testing.assert_close(gradient(reverse, [units[::-1]], tmp_path / "b"), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient(packed, [joined], tmp_path / "c"), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient(alone, [joined], tmp_path / "d"), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("normalize", ["sample_mean", "token_mean"])
def test_the_step_divides_by_what_it_trained_and_not_by_what_was_filtered(
    make_trainer: Make, tmp_path: Path, normalize: str
) -> None:
    units = make_units(6)
    whole = make_trainer(normalize=normalize, **NO_MOMENTUM)
    parts = [gradient(make_trainer(normalize=normalize, **NO_MOMENTUM), [[u]], tmp_path / "p") for u in units]
    kept = [0, 2, 5]
    count = {"sample_mean": len, "token_mean": lambda u: sum(len(s.completion_ids) for s in u)}[normalize]
    counts = [count(units[i]) for i in kept]
    mean = sum(n * parts[i] for n, i in zip(counts, kept, strict=True)) / sum(counts)
    got = gradient(whole, [[units[i]] for i in kept], tmp_path / "w")
    torch.testing.assert_close(got, mean, atol=1e-6, rtol=0)


def test_several_steps_streamed_end_at_the_same_weights(make_trainer: Make) -> None:
    one_call, streamed = make_trainer(), make_trainer()
    for seed in range(3):
        units = make_units(3, seed=seed)
        one_call.accumulate(units)
        for unit in units:
            streamed.accumulate([unit])
        assert one_call.step().loss == streamed.step().loss
    for name, tensor in dict(one_call.weights()).items():
        assert torch.equal(tensor, dict(streamed.weights())[name]), name


def test_a_step_with_nothing_accumulated_is_an_error(make_trainer: Make) -> None:
    trainer = make_trainer()
    with pytest.raises(ScheduleError, match="nothing was accumulated"):
        trainer.step()
    trainer.accumulate(make_units(1))
    trainer.step()
    with pytest.raises(ScheduleError, match="nothing was accumulated"):
        trainer.step()


@pytest.mark.parametrize("loss", ["grpo", "reinforce"])
@pytest.mark.parametrize("normalize", ["sample_mean", "token_mean"])
def test_empty_completions_count_as_samples_and_give_no_nan(
    make_trainer: Make, normalize: str, loss: str
) -> None:
    trainer = make_trainer(normalize=normalize, loss=loss)
    before = {name: tensor.clone() for name, tensor in dict(trainer.weights()).items()}
    empty = TrainingSample(SampleId(0, 0, 0), [1, 2], [], [], 1.0)
    trainer.accumulate([[empty, empty]])
    stats = trainer.step()
    assert (stats.num_tokens, stats.num_micro_batches, len(stats.samples)) == (0, 0, 2)
    assert (stats.loss, stats.grad_norm, stats.entropy, stats.kl) == (0.0, 0.0, 0.0, 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dict(trainer.weights()).items())


def test_stats_are_those_of_the_samples(make_trainer: Make) -> None:
    trainer = make_trainer(clip_low=0.1, clip_high=0.1)
    units = make_units(3)
    samples = [sample for unit in units for sample in unit]
    trainer.accumulate(units)
    stats = trainer.step()
    assert stats.samples == tuple(sample.id for sample in samples)
    assert stats.num_tokens == sum(len(sample.completion_ids) for sample in samples)
    assert 0 < stats.entropy <= math.log(24)
    assert 0 < stats.clip_ratio < 1
    assert stats.kl > 0
    assert stats.compute_s > 0
    assert stats.gpu == {}, "of a CPU"


def recorded_by(model_path: Path, sample: TrainingSample) -> TrainingSample:
    """The same sample with the log-probs that the model itself gives it."""
    policy = PolicyModel.load(model_path, TrainerSettings(), temperature=0.8)
    recorded = policy.logprobs(MicroBatch.of([sample], policy.device)).logprobs.tolist()
    return TrainingSample(sample.id, sample.prompt_ids, sample.completion_ids, recorded, sample.advantage)


def test_log_probs_recorded_by_the_policy_itself_have_ratio_one(make_trainer: Make, model_path: Path) -> None:
    """Then nothing is clipped, KL is zero, and the loss is minus the mean advantage."""
    trainer = make_trainer()
    samples = [recorded_by(model_path, sample) for sample in make_units(1)[0]]
    trainer.accumulate([samples])
    stats = trainer.step()
    assert stats.clip_ratio == 0
    assert stats.kl == pytest.approx(0, abs=1e-6)
    assert stats.loss == pytest.approx(-sum(s.advantage for s in samples) / len(samples), abs=1e-5)


def test_learning_rate_warms_up_linearly_and_the_norm_is_of_before_clipping(make_trainer: Make) -> None:
    trainer = make_trainer(loss="reinforce", warmup_steps=4, max_grad_norm=1e-3)
    seen = []
    for _ in range(5):
        trainer.accumulate(make_units(1))
        stats = trainer.step()
        seen.append((stats.num_steps, stats.learning_rate))
        assert stats.grad_norm > 1e-2
    assert seen == [(1, 0.25e-3), (2, 0.5e-3), (3, 0.75e-3), (4, 1e-3), (5, 1e-3)]


def test_clipping_scales_the_gradient_to_the_allowed_norm(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(betas=(0.0, 0.9), max_grad_norm=0.01)
    clipped = gradient(trainer, [make_units(2)], tmp_path / "c")
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-5)


def test_repeated_steps_raise_the_likelihood_of_what_was_rewarded(make_trainer: Make) -> None:
    trainer = make_trainer(loss="reinforce", learning_rate=1e-2)
    sample = TrainingSample(SampleId(0, 0, 0), [3, 4], [5, 6, 7, 8], [0.0] * 4, 1.0)
    losses = []
    for _ in range(20):
        trainer.accumulate([[sample]])
        losses.append(trainer.step().loss)
    assert losses[-1] < 0.1 < 1.0 < losses[0]


def test_weights_are_named_as_hugging_face_names_them(make_trainer: Make) -> None:
    names = set(dict(make_trainer().weights()))
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert "lm_head.weight" not in names, "tied to model.embed_tokens.weight: published once"


def test_bfloat16_steps_near_float32(make_trainer: Make, tmp_path: Path) -> None:
    exact, rough = (
        gradient(make_trainer(dtype=dtype, **NO_MOMENTUM), [make_units(4)], tmp_path / dtype)
        for dtype in ("float32", "bfloat16")
    )
    assert not torch.equal(exact, rough)
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0) > 0.99


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bfloat16_on_a_gpu_steps_near_float32_on_the_cpu(make_trainer: Make, tmp_path: Path) -> None:
    exact = gradient(make_trainer(**NO_MOMENTUM), [make_units(4)], tmp_path / "cpu")
    rough = gradient(
        make_trainer(device="cuda", dtype="bfloat16", **NO_MOMENTUM), [make_units(4)], tmp_path / "gpu"
    )
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0) > 0.99


def test_the_effective_sample_size_is_one_on_policy_and_counts_as_compute(
    make_trainer: Make, model_path: Path
) -> None:
    trainer = make_trainer()
    units = [make_units(1, seed=seed)[0] for seed in (0, 1)]
    own = [[recorded_by(model_path, sample) for sample in unit] for unit in units]
    assert trainer.ess(own) == pytest.approx(1.0, abs=1e-6)
    assert 0.0 < trainer.ess(units) < 0.99
    trainer.accumulate(own)
    assert trainer.step().samples == tuple(sample.id for unit in own for sample in unit)


def test_the_mismatch_with_the_engine_is_measured_on_samples_of_the_published_weights_only(
    make_trainer: Make, model_path: Path
) -> None:
    trainer = make_trainer()
    (unit,) = make_units(1)
    own = [recorded_by(model_path, sample) for sample in unit]
    shifted = [
        msgspec.structs.replace(sample, behavior_logprobs=[p - 0.1 for p in sample.behavior_logprobs])
        for sample in own
    ]
    older = [msgspec.structs.replace(sample, is_carried=True) for sample in unit]
    trainer.accumulate([shifted, older])
    first = trainer.step()
    # k3 at a log ratio of 0.1
    assert first.engine_mismatch_kl == pytest.approx(math.expm1(0.1) - 0.1, abs=1e-5)
    assert first.kl > first.engine_mismatch_kl
    trainer.accumulate([shifted])
    assert trainer.step().engine_mismatch_kl is None, "the weights are no longer the published ones"
    trainer.export_weights()
    trainer.accumulate([older])
    assert trainer.step().engine_mismatch_kl is None, "older weights generated some of the tokens"


def test_two_trainers_begin_with_the_same_random_state(make_trainer: Make) -> None:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        make_trainer()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
