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
