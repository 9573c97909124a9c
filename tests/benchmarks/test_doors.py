"""The benchmark of hostile requests, with one of each kind that is quick."""

import pytest

import doors

SLOW = ("uncollected", "bomb", "half a body")


@pytest.mark.parametrize("name", ["serve", pytest.param("tinker", marks=pytest.mark.tinker)])
def test_hostile_requests_leave_a_server_that_serves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {key: kind for key, kind in doors.DOORS[name].kinds().items() if not key.startswith(SLOW)}
    monkeypatch.setitem(doors.DOORS, name, doors.DOORS[name]._replace(kinds=lambda: kinds))
    found = doors.attacked(name, len(kinds), seed=0)
    assert (found["outside"], found["honest"]) == ([], "served")
    assert [found[key] for key in ("errors", "unanswered", "health_failed")] == [0, 0, 0], found
    assert sum(found["answers"].values()) >= len(kinds)
    assert found["peak_mib"] < doors.MAX_PEAK_MIB


def test_strangers_and_pages_of_other_sites_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "FLOOD_S", 2.0)
    monkeypatch.setattr(doors, "STRANGERS", 300)
    monkeypatch.setattr(doors, "MAX_MEDIAN_S", 5.0)  # this machine may do other work, too
    serving, training = doors.flooded("serve", 4, limit=256), doors.crowded_run(256)
    assert serving["opened"] > 2 * doors.MAX_STRANGERS  # the others wait in the kernel
    assert training["opened"] >= 300
    for found in (serving, training):
        assert found["held"], found
        assert 0 < found["strangers"] <= doors.MAX_STRANGERS
