"""How old tokens are."""

import pytest

from tailrace.record.events import Row
from tailrace.record.figures import of_batch
from tailrace.record.lags import Lags
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
    figures = lags.figures(num_samples=2)
    assert (figures["lag/mean"], figures["lag/max"], figures["staleness/max"]) == (4.4, 7, 2)
    assert (figures["carried/tokens"], figures["carried/samples"]) == (0.7, 1.0)


def test_the_profile_is_the_mean_lag_of_each_tenth_of_the_response() -> None:
    lags = Lags()
    lags.add(sample_of((0, 5), (1, 15)), 1, lambda version: 1 - version)
    assert lags.profile == pytest.approx([1, 1, 0.5, 0, 0, 0, 0, 0, 0, 0])
    assert sum(lags.tokens_by_tenth) == pytest.approx(20)
    lags.add(sample_of((0, 20)), 1, lambda version: 1 - version)
    assert lags.profile == pytest.approx([1, 1, 0.75] + [0.5] * 7)


def test_masked_tokens_have_no_lag_and_are_counted_by_their_place_in_the_response() -> None:
    """20 tokens, of which the first 5 are masked; and 10, of which none is."""
    lags, whole = Lags(), sample_of((1, 10))
    masked = sample_of((0, 5), (1, 15))
    masked.num_masked = 5
    for sample in (masked, whole):
        lags.add(sample, 1, lambda version: 7 if version == 0 else 1)
    figures = lags.figures(num_samples=2)
    assert (figures["lag/max"], figures["staleness/max"], figures["carried/samples"]) == (1, 0, 0.0)
    assert figures["tokens/masked"] == 5 and lags.publications.total() == 25
    # of 3 tokens in each of the first two tenths 2 are masked, and in the third one
    assert lags.masked_profile == pytest.approx([2 / 3, 2 / 3, 1 / 3] + [0.0] * 7)
    assert [figures[f"masked/tenth/{tenth}"] for tenth in range(10)] == lags.masked_profile
    rows: list[Row] = [{"tokens/trained": 25.0, **figures}, {"tokens/trained": 20.0}]
    assert of_batch(rows, "tokens/masked") == 5 / 50


def test_a_step_that_masks_nothing_says_nothing_of_it() -> None:
    lags = Lags()
    lags.add(sample_of((1, 10)), 1, lambda version: 0)
    assert not [name for name in lags.figures(1) if "masked" in name]
    assert of_batch([{"tokens/trained": 20.0}], "tokens/masked") == 0.0


def test_a_response_of_one_token_covers_every_tenth() -> None:
    lags = Lags()
    lags.add(sample_of((0, 1)), 3, lambda version: 3)
    assert lags.profile == pytest.approx([3.0] * 10)


def test_no_tokens_have_no_lag() -> None:
    lags = Lags()
    lags.add(sample_of(), 3, lambda version: 3)
    assert lags.profile == [0.0] * 10 and lags.figures(1)["lag/mean"] == 0.0
