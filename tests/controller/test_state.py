"""Progress of a run, without a run."""

from tailrace.controller.state import KNOWN_VERSIONS, RunState
from tailrace.ledger.recovery import StartingPoint


def test_a_long_run_knows_the_lag_of_its_last_versions_only() -> None:
    state = RunState(StartingPoint())
    for version in range(1, 3 * KNOWN_VERSIONS):
        state.num_steps += 2
        state.published(version)
    assert len(state.steps_at) == KNOWN_VERSIONS
    newest = state.version
    assert [state.lag(newest - age) for age in (0, 3, KNOWN_VERSIONS - 1)] == [0, 6, 2 * (KNOWN_VERSIONS - 1)]
    assert state.lag(0) == 2 * (KNOWN_VERSIONS - 1), "an older one counts as the oldest that is known"
