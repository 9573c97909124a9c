"""How old tokens are, from the versions that made them."""

import pytest

from tailrace.record.lags import Lags, mean_of
from tailrace.types import Group, Prompt, Sample, SampleId


def sample_of(*spans: tuple[int, int]) -> Sample:
    """A sample of (version, tokens) spans."""
    sample = Sample(SampleId(0, 0, 0), Group(Prompt(0, [1]), 1, []))
    for version, num_tokens in spans:
        sample.grow(num_tokens, version)
    return sample


def test_tokens_are_counted_by_publications_and_by_optimizer_steps() -> None:
    """Versions 0, 1, 2 were published after 0, 4 and 6 steps; now there are 7."""
    lags = Lags()
    for sample in (sample_of((0, 5), (2, 3)), sample_of((1, 2))):
        lags.add(sample, 2, lambda version: 7 - [0, 4, 6][version])
    assert lags.publications == {2: 5, 0: 3, 1: 2}
    assert lags.steps == {7: 5, 1: 3, 3: 2}
    assert mean_of(lags.steps) == 4.4


def test_the_profile_is_the_mean_lag_of_each_tenth_of_the_response() -> None:
    lags = Lags()
    lags.add(sample_of((0, 5), (1, 15)), 1, lambda version: 1 - version)
    assert lags.profile == pytest.approx([1, 1, 0.5, 0, 0, 0, 0, 0, 0, 0])
    assert lags.tokens_by_tenth.sum() == pytest.approx(20)
    lags.add(sample_of((0, 20)), 1, lambda version: 1 - version)
    assert lags.profile == pytest.approx([1, 1, 0.75] + [0.5] * 7)


def test_a_response_of_one_token_covers_every_tenth() -> None:
    lags = Lags()
    lags.add(sample_of((0, 1)), 3, lambda version: 3)
    assert lags.profile == pytest.approx([3.0] * 10)


def test_no_tokens_have_no_lag() -> None:
    lags = Lags()
    lags.add(sample_of(), 3, lambda version: 3)
    assert lags.profile == [0.0] * 10 and mean_of(lags.steps) == 0.0
