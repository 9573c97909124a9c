"""The table of effective training time over how long the trainer lives, for one schedule."""

import pytest

import faults


@pytest.mark.slow
def test_a_trainer_that_restarts_alone_computes_for_more_of_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "SHOWN", {"serial": faults.SHOWN["serial"]})
    monkeypatch.setattr(faults, "LIVES_S", (60.0,))
    (found,) = faults.simulated(rounds=8).values()
    assert found["endless"] > found["1 min alone"] > found["1 min all"] > 0
    assert "1 min alone" in capsys.readouterr().out
