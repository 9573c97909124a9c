import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tailrace.drivers.trainer import logits, model
from tailrace.drivers.trainer.logits import logit_rows
from tailrace.drivers.trainer.model import token_logprobs


def leaves(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((11, 6), (9, 6), (9,)))
    targets = torch.randint(9, (11,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def head(weight: Tensor, bias: Tensor | None = None) -> model.Head:
    return lambda hidden: linear(hidden, weight, bias)


def naive(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logp = ((hidden @ weight.T + bias) / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0]


@pytest.fixture(params=[9, 27, 1 << 20], ids=["a row at a time", "3 rows at a time", "one chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "LOGITS", (request.param, request.param))


@pytest.mark.usefixtures("chunks")
def test_chunked_log_probs_and_gradients_equal_those_of_all_logits_at_once() -> None:
    upstream = torch.linspace(-1, 1, 11)
    *ours, targets = leaves()
    got = token_logprobs(ours[0], head(*ours[1:]), targets, vocabulary=9, temperature=0.7).logprobs
    (got * upstream).sum().backward()
    *theirs, _ = leaves()
    wanted = naive(*theirs, targets, 0.7)
    (wanted * upstream).sum().backward()
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, atol=1e-6, rtol=1e-6)


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    hidden, weight, bias, targets = leaves()
    entropy = token_logprobs(hidden, head(weight, bias), targets, vocabulary=9, temperature=0.7).entropy
    wanted = torch.distributions.Categorical(logits=(hidden @ weight.T + bias) / 0.7).entropy()
    torch.testing.assert_close(entropy, wanted.detach())
    assert not entropy.requires_grad


def test_a_uniform_head_gives_each_token_the_log_of_one_in_v() -> None:
    hidden, weight = torch.randn(3, 4), torch.zeros(8, 4)
    got = token_logprobs(hidden, head(weight), torch.tensor([0, 3, 7]), vocabulary=8, temperature=1.0)
    torch.testing.assert_close(got.logprobs, torch.full((3,), -torch.tensor(8.0).log()))
    torch.testing.assert_close(got.entropy, torch.full((3,), torch.tensor(8.0).log()))


@pytest.mark.usefixtures("chunks")
def test_gradients_of_bfloat16_logits_are_those_of_autograd_on_the_same_logits() -> None:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(11, 9, generator=generator).bfloat16()
    targets, upstream = torch.arange(11) % 9, torch.linspace(-1, 1, 11)
    ours, theirs = (given.clone().requires_grad_() for _ in range(2))
    got = token_logprobs(ours, lambda each: each, targets, vocabulary=9, temperature=0.7)
    (got.logprobs * upstream).sum().backward()
    wanted = (theirs.float() / 0.7).log_softmax(-1)
    (wanted.gather(1, targets[:, None])[:, 0] * upstream).sum().backward()
    assert got.logprobs.dtype == torch.float32 and ours.grad.dtype == torch.bfloat16
    torch.testing.assert_close(got.logprobs, wanted.gather(1, targets[:, None])[:, 0], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=2**-7)


def test_a_chunk_of_logits_is_an_eighth_of_the_micro_batch_within_limits() -> None:
    assert logit_rows(1024, 49_152) == 1024
    assert logit_rows(4096, 151_936) == 512
    assert logit_rows(8192, 151_936) == 1024
    assert logit_rows(65_536, 151_936) == 2**28 // 151_936
    assert logit_rows(10, 2**30) == 1


def test_bfloat16_products_stay_near_float32() -> None:
    hidden, weight, bias, targets = leaves()
    got = token_logprobs(
        hidden, head(weight, bias), targets, vocabulary=9, temperature=1.0, dtype=torch.bfloat16
    ).logprobs
    got.sum().backward()
    wanted = naive(*(x.detach() for x in (hidden, weight, bias)), targets, 1.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.05)
    assert weight.grad is not None and weight.grad.dtype == torch.float32
