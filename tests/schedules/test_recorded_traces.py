"""The simulated trace of each schedule is the recorded one.

A change of the code that should not change behaviour leaves the traces as they are. After a change that
should, run this file as a program to record them anew, and say why.

    PYTHONPATH=src:tests python tests/schedules/test_recorded_traces.py
"""

import hashlib
import json
from pathlib import Path

import pytest

from helpers.virtual import SCHEDULES_BY_NAME, SETTINGS, SIM, simulate
from tailrace.record.events import (
    Accumulated,
    GroupEnded,
    GroupReady,
    Published,
    RequestEnded,
    RequestStarted,
    SampleScored,
    Stepped,
    TokensWasted,
)

FILE = Path(__file__).with_name("recorded_traces.json")
KINDS = Accumulated | GroupEnded | GroupReady | RequestEnded | RequestStarted | SampleScored | TokensWasted


def digest(name: str) -> str:
    """A number for what happened when in a run of two engines."""
    lines = []
    for event in simulate(SCHEDULES_BY_NAME[name], SETTINGS, SIM).events:
        if isinstance(event, KINDS):
            lines.append(repr(event))
        elif isinstance(event, Published):
            lines.append(f"Published(start_s={event.start_s}, end_s={event.end_s}, version={event.version})")
        elif isinstance(event, Stepped):
            lines.append(f"{event.start_s} {event.end_s} {[str(sample.id) for sample in event.samples]}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", SCHEDULES_BY_NAME)
def test_the_simulated_trace_is_the_recorded_one(name: str) -> None:
    assert digest(name) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: digest(name) for name in SCHEDULES_BY_NAME}, indent=1) + "\n")
