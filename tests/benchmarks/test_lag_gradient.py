"""The study of the gradients of old tokens: its parts add up, and its lags are those of the weights."""

import pytest
import torch

import lag_gradient
from lag_gradient import DECAYS, TENTHS, K, Study


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(lag_gradient, "SLOTS", 64)
    return Study(seed=0, lr=2e-4)


def test_the_gradients_of_the_tenths_add_up_to_that_of_all_tokens(study: Study) -> None:
    before = dict(study.policy.weights())
    in_turn = [{name: weight.clone() for name, weight in before.items()}, study.step()]
    assert any(not torch.equal(in_turn[0][name], in_turn[1][name]) for name in before)
    groups = study.generate(8, in_turn, every=16)
    assert {span.version for group in groups for sample in group.samples for span in sample.spans} == {-1, 0}
    assert all(len(group.samples) == K and group.samples[0].ended for group in groups)
    found = study.gradients(groups)
    (whole,) = study.gradients(groups, whole=True)
    assert whole.norm() > 0
    assert torch.allclose(found[:TENTHS].sum(0), whole, atol=1e-4)
    assert torch.allclose(found[TENTHS], whole, atol=1e-4), "without decay"
    newest, half = found[TENTHS + DECAYS.index(0.0)], found[TENTHS + DECAYS.index(0.5)]
    assert torch.allclose(half, (newest + whole) / 2, atol=1e-4), "lags are 0 and 1"
