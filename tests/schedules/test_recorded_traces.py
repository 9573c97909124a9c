"""Four schedules do in a small world what their recorded traces say, line by line.

The engine has room for six requests and decodes a token of each in a second; the trainer computes four
positions in a second; responses differ in length. After a change that should change behaviour, run this file
as a program to record the traces anew, and read what has changed in them.

    PYTHONPATH=src:tests python tests/schedules/test_recorded_traces.py
"""

from functools import partial
from pathlib import Path

import pytest

from helpers.virtual import EXACT, simulate
from tailrace.controller.base import RunSettings
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
from tailrace.schedules import SCHEDULES

FOLDER = Path(__file__).with_name("traces")
TRACED = {
    "serial": partial(SCHEDULES["serial"], groups_per_round=4, groups_per_step=2),
    "rolloutpipe": partial(SCHEDULES["rolloutpipe"], groups_per_round=4, groups_per_step=2),
    "april": partial(SCHEDULES["april"], groups_per_round=2, groups_launched=4),
    "pipelinerl": partial(SCHEDULES["pipelinerl"], groups_per_step=2, in_flight_per_engine=6, ring_groups=4),
}
ROUNDS = RunSettings(rounds=2, group_size=2)
WORLD = EXACT.model_copy(
    update={
        "engines": EXACT.engines.model_copy(update={"slots": 6}),
        "trainer": EXACT.trainer.model_copy(update={"tokens_per_s": 4.0}),
        "lengths": EXACT.lengths.model_copy(update={"sigma": 0.8}),
    }
)


def line_of(event: object) -> str | None:
    """What happened, or None for events that follow from the others."""
    match event:
        case RequestStarted():
            return f"{event.sample} starts on {event.engine} with {event.num_tokens} tokens"
        case RequestEnded():
            return f"{event.sample} leaves {event.engine} with {event.num_tokens} tokens: {event.outcome}"
        case SampleScored():
            return f"{event.sample} is scored: {event.failure or event.reward}"
        case GroupReady():
            return f"group {event.prompt} is ready with {event.num_tokens} tokens"
        case GroupEnded():
            return f"group {event.prompt} ends: {event.reason}"
        case TokensWasted():
            return f"{event.num_tokens} tokens of {event.sample} are wasted: {event.reason}"
        case Accumulated():
            return f"the trainer has computed since {event.start_s:g}: {' '.join(map(str, event.samples))}"
        case Stepped():
            samples = " ".join(str(sample.id) for sample in event.samples)
            lags = ", ".join(f"{num} of lag {lag}" for lag, num in sorted(event.lags.steps.items()))
            return f"the trainer steps on tokens: {lags}; samples: {samples}"
        case Published():
            return f"version {event.version} is published since {event.start_s:g}"
    return None


def trace(name: str) -> str:
    lines = []
    for event in simulate(TRACED[name], ROUNDS, WORLD).events:
        if (line := line_of(event)) is not None:
            at_s = event.end_s if hasattr(event, "end_s") else event.time_s
            lines.append(f"{at_s:6g}  {line}\n")
    return "".join(lines)


@pytest.mark.parametrize("name", TRACED)
def test_the_trace_is_the_recorded_one(name: str) -> None:
    assert trace(name) == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    for name in TRACED:
        (FOLDER / f"{name}.txt").write_text(trace(name))
