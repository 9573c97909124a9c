"""Laminar's inherent staleness is counted when a sample ends, not when it is trained."""

import pytest

from reproductions import laminar


def test_the_staleness_of_a_sample_is_that_of_the_version_published_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(laminar, "GROUPS", 16)
    monkeypatch.setattr(laminar, "ALIVE", 32)
    figures = {figure.what: figure.ours for figure in laminar.inherent(0).figures}
    assert 0 <= figures["mean"] < figures["mean at training, optimizer steps"]
    assert figures["mean"] <= figures["largest"] == int(figures["largest"])
    assert 0 < figures["samples below 3, mostly"] <= 100
