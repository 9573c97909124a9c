"""Every schedule does in a small world what its recorded trace says, line by line.

An engine has room for six requests and decodes a token of each in a second; the trainer computes four
positions in a second; responses differ in length. After a change that should change behaviour, run this file
as a program to record the traces anew, and read what has changed in them.

    PYTHONPATH=src:tests python tests/schedules/test_recorded_traces.py
"""

from functools import partial
from pathlib import Path

import pytest

from helpers.virtual import EXACT, PINNED, change, simulate
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
VERIFIED = {"staleness": 0, "stale": "verify", "verify_max_cuts": 2}
SMALL: dict[str, dict[str, object]] = {
    "serial": {"groups_per_round": 4, "groups_per_step": 2},
    "rolloutpipe": {"groups_per_round": 4, "groups_per_step": 2},
    "rolloutpipe_eager": {"groups_per_round": 4, "groups_per_step": 2},
    "april": {"groups_per_round": 2, "groups_launched": 4},
    "april_dapo": {"groups_per_round": 2, "groups_per_draw": 3},
    "tailbatch": {"groups_per_round": 2},
    "tailbatch_dapo": {"groups_per_round": 2, "requests_per_engine": 6},
    "tailbatch_async": {"groups_per_round": 2},
    "rollpacker": {"groups_per_round": 2},
    "conventional": {"groups_per_step": 2, "steps_per_round": 2},
    "pipelinerl": {"groups_per_step": 2, "in_flight_per_engine": 6, "ring_groups": 4},
    "pipelinerl masked": {"groups_per_step": 2, "in_flight_per_engine": 6, "ring_groups": 4, "staleness": 1},
    "one_step_off": {"groups_per_round": 2, "groups_per_step": 2},
    "periodic_asynchrony": {"groups_per_round": 2},
    "streamrl": {"groups_per_round": 2},
    "streamrl_async": {"groups_per_round": 2},
    "seer": {"groups_per_round": 4, "groups_per_step": 2},
    "sortedrl": {"groups_per_round": 4, "groups_per_step": 2},
    "sortedrl_on_policy": {"groups_per_round": 4, "groups_per_step": 2},
    "bubblespec": {"groups_per_round": 2, "groups_per_step": 2},
    "windowed_fifo": {"groups_per_step": 2, "groups_in_flight": 5, "window": 3},
    "dora": {"groups_per_step": 2, "groups_in_flight": 4, "staleness": 2},
    "laminar": {"groups_per_step": 2, "groups_in_flight": 4, "staleness": 2},
    "trl_async": {"groups_per_step": 2, "groups_in_flight": 4, "staleness": 2},
    "tinker_async": {"groups_per_step": 2, "steps_off_policy": 1},
    "tailrace": {"groups_per_step": 2, "groups_in_flight": 4, "staleness": 2},
    "tailrace masked": {"groups_per_step": 2, "groups_in_flight": 6, "staleness": 1, "stale": "mask"},
    "tailrace_on_policy": {"groups_per_round": 2, "rounds_sorted": 2},
    "april verified": {"groups_per_round": 2, "groups_launched": 5, **VERIFIED},
    "pipelinerl verified": {
        "groups_per_step": 2,
        "in_flight_per_engine": 6,
        "ring_groups": 4,
        "scoring_groups": 1,
        **VERIFIED,
    },
    "tailrace verified": {"groups_per_step": 2, "groups_in_flight": 6, **VERIFIED},
}
"""Parameters of each schedule, and of its variants."""
ON_TWO_ENGINES = {*PINNED, "pipelinerl masked", "tailrace masked", "tailrace", "tinker_async", "bubblespec"}
ON_TWO_ENGINES |= {name for name in SMALL if name.endswith("verified")}
ROUNDS = RunSettings(rounds=2, group_size=2)
MORE_ROUNDS = RunSettings(rounds=4, group_size=2)
WORLD = change(
    EXACT,
    engines=change(EXACT.engines, slots=6, survival=0.8),
    trainer=change(EXACT.trainer, tokens_per_s=4.0),
    lengths=change(EXACT.lengths, sigma=0.8),
)
TWO_ENGINES = change(WORLD, engines=change(WORLD.engines, count=2, slots=3))


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
            lags = [f"{num} of lag {lag}" for lag, num in sorted(event.lags.steps.items())]
            masked = sum(sample.num_masked for sample in event.samples)
            tokens = ", ".join(lags + [f"{masked} masked"] * bool(masked))
            return f"the trainer steps on tokens: {tokens}; samples: {samples}"
        case Published():
            return f"version {event.version} is published since {event.start_s:g}"
    return None


def trace(name: str) -> str:
    schedule, lines = partial(SCHEDULES[name.split()[0]], **SMALL[name]), []
    in_world = (MORE_ROUNDS, TWO_ENGINES) if name in ON_TWO_ENGINES else (ROUNDS, WORLD)
    for event in simulate(schedule, *in_world).events:
        if (line := line_of(event)) is not None:
            at_s = event.end_s if hasattr(event, "end_s") else event.time_s
            lines.append(f"{at_s:6g}  {line}\n")
    return "".join(lines)


def test_no_schedule_is_without_a_trace() -> None:
    assert {name.split()[0] for name in SMALL} == SCHEDULES.keys()


@pytest.mark.parametrize("name", SMALL)
def test_the_trace_is_the_recorded_one(name: str) -> None:
    assert trace(name) == (FOLDER / f"{name.replace(' ', '_')}.txt").read_text()


if __name__ == "__main__":
    for name in SMALL:
        (FOLDER / f"{name.replace(' ', '_')}.txt").write_text(trace(name))
