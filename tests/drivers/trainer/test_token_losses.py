"""Losses that are sums over tokens: their gradients and steps beside those of transformers and torch."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from trainer_cases import VOCABULARY
from transformers import AutoModelForCausalLM

from tailrace.algo.base import TokenLossName
from tailrace.drivers.trainer import losses
from tailrace.drivers.trainer.batch import AdamStep, LossDatum, TokenLoss
from tailrace.drivers.trainer.trainer import TorchTrainer

ADAM = AdamStep(1e-3, (0.9, 0.95), 1e-12, 0.01, 0.0)
GSPO, STABLE = TokenLoss("gspo", clip_low=0.99, clip_high=1.01), TokenLoss("stable_reinforce", clip_high=5.0)
Expected = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def gspo_token(logp: Tensor, old: Tensor, a: Tensor, marks: Tensor) -> Tensor:
    """As Tinker documents it: each token has the ratio of the sequence and its own gradient."""
    ratio = ((logp.detach() - old)[marks != 0].mean() + logp - logp.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(0.99, 1.01) * a).sum()


def stable(logp: Tensor, old: Tensor, a: Tensor, marks: Tensor) -> Tensor:
    weights = (logp.detach() - old).exp().clamp(max=5.0)
    return (0.05 * (logp - old) ** 2 / 2 * marks - weights * a * logp).sum()


LOSSES: dict[TokenLossName, Expected] = {
    "cross_entropy": lambda logp, old, a, marks: -(a * logp).sum(),
    "importance_sampling": lambda logp, old, a, marks: -((logp - old).exp() * a).sum(),
    "ppo": lambda logp, old, a, marks: (
        -torch.minimum((logp - old).exp() * a, (logp - old).exp().clamp(0.8, 1.2) * a).sum()
    ),
    "cispo": lambda logp, old, a, marks: -((logp - old).exp().clamp(0.8, 1.2).detach() * logp * a).sum(),
    "dro": lambda logp, old, a, marks: -(logp * a - 0.05 / 2 * (logp - old) ** 2).sum(),
    "gspo": gspo_token,
    "stable_reinforce": stable,
}


def make_data(num: int = 6, seed: int = 0) -> list[LossDatum]:
    """Sequences of unequal lengths, one of a single target. Four begin with one prompt of six tokens whose
    targets have no advantage; one of those has no advantage at all."""
    chance = random.Random(seed)

    def datum(length: int, prompt: list[int], weight: float = 1.0) -> LossDatum:
        start = max(0, len(prompt) - 1)
        return LossDatum(
            [*prompt, *(chance.randrange(VOCABULARY) for _ in range(length + 1 - len(prompt)))],
            [0.0] * start + [weight * chance.gauss(0, 1) for _ in range(length - start)],
            [chance.uniform(-4, -2) for _ in range(length)],
        )

    prompt = [chance.randrange(VOCABULARY) for _ in range(6)]
    alone = [datum(1, []), *(datum(chance.randrange(2, 30), []) for _ in range(num - 1))]
    return [*alone, *(datum(length, prompt) for length in (6, 9, 20)), datum(12, prompt, 0.0)]


def marked(datum: LossDatum) -> LossDatum:
    """With marks at each target but the prompt's, and but each third; the old log-probs are near enough that
    some sequences are not clipped."""
    start, last = datum.num_leading, len(datum.advantages) - 1
    marks = [float(number >= start and (number % 3 > 0 or number == last)) for number in range(last + 1)]
    return replace(datum, sampled=marks, old_logprobs=[each / 40 - 3.1 for each in datum.old_logprobs])


def target_logprobs(model: torch.nn.Module, datum: LossDatum) -> Tensor:
    """[num_tokens] by the plain forward pass of transformers."""
    ids = torch.tensor(datum.ids)
    logits = model(ids[None, :-1]).logits[0].float()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_each_loss_is_that_of_transformers(
    model_path: Path, make_trainer: Callable[..., TorchTrainer], name: TokenLossName
) -> None:
    trainer, data = make_trainer(temperature=1.0), [marked(each) for each in make_data()]
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    found = [target_logprobs(plain, datum) for datum in data]
    terms = [
        LOSSES[name](logp, *map(torch.tensor, (datum.old_logprobs, datum.advantages, datum.sampled)))
        for logp, datum in zip(found, data, strict=True)
    ]
    sum(terms).backward()  # type: ignore[union-attr]
    loss = {"gspo": GSPO, "stable_reinforce": STABLE}.get(name, TokenLoss(name))
    outputs = trainer.run_tokens(data, loss, with_gradient=True)
    for output in outputs:
        torch.testing.assert_close(
            torch.tensor(output.logprobs), found[output.number].detach(), atol=1e-5, rtol=1e-5
        )
        assert sum(output.losses) == pytest.approx(terms[output.number].item(), rel=1e-4, abs=1e-4)
    assert sorted(output.number for output in outputs) == list(range(len(data)))
    gradients = {key: p.grad for key, p in trainer._policy.parameters().items()}
    for key, parameter in plain.named_parameters():
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(gradients[key] / scale, parameter.grad / scale, atol=1e-5, rtol=0)


def test_a_forward_pass_leaves_no_gradient(make_trainer: Callable[..., TorchTrainer]) -> None:
    trainer = make_trainer(temperature=1.0)
    trainer.run_tokens(make_data(), TokenLoss("cross_entropy"), with_gradient=False)
    assert all(not p.grad.any() for p in trainer._policy.parameters().values())


def test_two_calls_add_up_and_the_step_is_that_of_adamw_on_the_sum(
    model_path: Path, make_trainer: Callable[..., TorchTrainer]
) -> None:
    trainer, data = make_trainer(temperature=1.0), make_data()
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    others = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=ADAM.betas, eps=ADAM.eps)
    loss = TokenLoss("importance_sampling")
    for _ in range(2):
        total = torch.zeros(())
        for datum in data:
            expected = LOSSES["importance_sampling"]
            logp = target_logprobs(plain, datum)
            old, advantages = map(torch.tensor, (datum.old_logprobs, datum.advantages))
            total = total + expected(logp, old, advantages, old)
        adamw.zero_grad()
        total.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        adamw.step()
        trainer.run_tokens(data[:2], loss, with_gradient=True)
        trainer.run_tokens(data[2:], loss, with_gradient=True)
        assert trainer.step_sum(ADAM) == pytest.approx(norm.item(), rel=1e-4)
    weights = dict(trainer.weights())
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[key], parameter.detach(), atol=2e-5, rtol=1e-4)


def test_a_checkpoint_is_restored_without_its_moments(
    make_trainer: Callable[..., TorchTrainer], tmp_path: Path
) -> None:
    trainer, data, loss = make_trainer(temperature=1.0), make_data(), TokenLoss("cross_entropy")

    def step() -> dict[str, Tensor]:
        trainer.run_tokens(data, loss, with_gradient=True)
        trainer.step_sum(ADAM)
        return {name: weight.clone() for name, weight in trainer.weights()}

    step()
    trainer.save(tmp_path / "checkpoint")()
    whole = step()
    trainer.restore(tmp_path / "checkpoint")
    again = step()
    trainer.restore(tmp_path / "checkpoint", optimizer=False)
    anew = step()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not all(torch.equal(whole[name], anew[name]) for name in whole)


def test_with_one_advantage_the_gradient_of_gspo_is_that_of_the_sequences_ratio() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], requires_grad=True)
    old = torch.tensor([-1.1, -1.9, -0.6, -2.9, -1.6])
    num_tokens = torch.tensor([3, 2])
    advantages = losses.spread(torch.tensor([0.7, -0.4]), num_tokens)
    by_token = losses.token_loss(
        "gspo",
        logprobs,
        old,
        advantages,
        torch.ones(5, dtype=torch.bool),
        num_tokens,
        clip_low=0.8,
        clip_high=1.2,
        beta=0.0,
    )
    by_sequence = losses.gspo(logprobs, old, advantages, num_tokens, clip_low=0.2, clip_high=0.2).per_token
    torch.testing.assert_close(by_token, by_sequence)
    found, expected = (torch.autograd.grad(each.sum(), logprobs)[0] for each in (by_token, by_sequence))
    torch.testing.assert_close(found, expected)
