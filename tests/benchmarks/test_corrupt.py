"""The benchmark of damaged files, on one file of each of two kinds."""

import pytest

import corrupt


def test_a_damaged_file_is_noticed_or_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrupt, "ROUNDS", 1)
    chosen = {"config.toml": ("inspect",), "ledger.sqlite": ("inspect",)}
    monkeypatch.setattr(corrupt, "READERS", chosen)
    cases = list(corrupt.corrupt(flips=2, truncations=2, seed=0, kinds=set()))
    assert [(case["kind"], case["how"]) for case in cases] == [
        ("config.toml", "flip"),
        ("ledger.sqlite", "flip"),
        ("config.toml", "truncation"),
        ("ledger.sqlite", "truncation"),
    ]
    assert {case["outcome"] for case in cases} <= {"detected", "harmless"}, cases
