"""The placement benchmark: an elastic run on real processes moves requests in mid-round and loses nothing."""

from pathlib import Path

import pytest

import placement


def test_requests_move_to_another_engine_in_mid_round_and_regenerate_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "WARM_UP_ROUNDS", 0)
    monkeypatch.setattr(placement, "GROUPS", 24)
    figures = placement.one_run("elastic", rounds=1, seed=0, folder=tmp_path / "run")
    assert figures.pop("migrated") > 0
    audited = ("regenerated", "tokens_unaccounted", "trained_twice", "lost")
    assert [figures[key] for key in audited] == [0, 0, 0, 0]
