"""Events of a run made by hand, with figures that can be computed in the head.

`pipelined_round()`: K = 2, two groups, two steps, one engine of two slots; times in seconds.

    engine   slot 1   |-0.0/0-|--------1.0/0--------|
             slot 2   |------0.0/1------|---------1.0/1---------|
    trainer                             |acc|step|              |--acc--|--step--|  publish
             10      12                14  15   16  17          20      22       24  25
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tailrace.contracts.trainer import StepStats
from tailrace.record.bounds import RoundBound
from tailrace.record.events import (
    Accumulated,
    Event,
    GroupDrawn,
    GroupEnded,
    GroupReady,
    Published,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    Row,
    SampleScored,
    Sink,
    Stepped,
    time_of,
)
from tailrace.record.lags import Lags
from tailrace.record.steps import StepMeter
from tailrace.types import FinishReason, Group, Prompt, Sample, SampleId, Turn

GOOD: Row = {
    "step": 1.0,
    "round": 0.0,
    "loss": 0.1,
    "entropy": 1.0,
    "reward": 0.5,
    "reward_std": 0.4,
    "frac_reward_zero_std": 0.2,
    "completions/clipped_ratio": 0.1,
    "completions/max_length": 900.0,
    "samples/trained": 8.0,
    "groups/trained": 2.0,
}
"""A row of a step that shows nothing to look at."""


def make_group(prompt: int, lengths: list[int], rewards: list[float], *, version: int = 0) -> Group:
    """A complete group; responses of 20 tokens and more hit the length limit."""
    group = Group(
        Prompt(prompt, ids=[1, 2], text=f"question {prompt}"), num_required=len(lengths), samples=[]
    )
    for number, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        finish: FinishReason = "length" if length >= 20 else "stop"
        sample = Sample(SampleId(prompt, 0, number), group, finish_reason=finish, reward=reward)
        sample.text, sample.advantage = f"answer {number}", reward - 0.5
        sample.grow(length, version)
        group.samples.append(sample)
    group.kept = list(group.samples)
    return group


def make_episode(sample: Sample) -> None:
    """Make a sample of four tokens an episode of two turns, with one call and three tokens in between."""
    tool: dict[str, object] = {"role": "tool", "content": "7"}
    sample.turns = [
        Turn(2, "stop", results=["7"], observation_ids=[30, 31, 32], text="3 + 4", messages=[tool]),
        Turn(4, "stop", text="It is 7."),
    ]


@dataclass
class Story:
    """Collects events; `events` puts them in the order in which they happened."""

    told: list[Event] = field(default_factory=list)
    num_steps: int = 0

    @property
    def events(self) -> list[Event]:
        return sorted(self.told, key=time_of)

    def tell(self, *events: Event) -> None:
        self.told.extend(events)

    def request(
        self, sample: Sample, start_s: float, end_s: float, *, engine: str = "engine-0", outcome: str = "stop"
    ) -> None:
        self.tell(
            RequestStarted(start_s, sample.id, engine, 0),
            RequestEnded(end_s, sample.id, engine, sample.num_tokens, sample.num_tokens, outcome),
        )
        if outcome in ("stop", "length"):
            self.tell(SampleScored(end_s, sample.id, sample.reward, None, sample.num_tokens))

    def train(self, group: Group, start_s: float, mid_s: float, end_s: float, *, lag: int = 0) -> None:
        """Accumulate, then step; the trainer computes all the while. lag: in publications, of three optimizer
        steps each."""
        self.num_steps += 1
        lags = Lags()
        for sample in group.kept:
            lags.add(sample, sample.oldest_version + lag, lambda version: 3 * lag)
        ids = tuple(sample.id for sample in group.kept)
        stats = StepStats(
            num_steps=self.num_steps,
            samples=ids,
            num_tokens=group.num_tokens,
            compute_s=end_s - start_s,
            loss=0.25,
            grad_norm=0.5,
            learning_rate=1e-3,
            entropy=1.5,
            clip_ratio=0.125,
            kl=0.01,
            engine_mismatch_kl=0.005,
        )
        self.tell(
            GroupReady(start_s, group.prompt.index, group.num_tokens),
            Accumulated(start_s, mid_s, ids, group.num_tokens),
            GroupEnded(end_s, group.prompt.index, "trained", "trained"),
            Stepped(mid_s, end_s, stats, lags, tuple(group.kept)),
        )


def pipelined_round(story: Story | None = None, *, round: int = 0, start_s: float = 10.0) -> Story:
    """The round drawn above, or the same one later."""
    story = story or Story()
    first = make_group(2 * round, [4, 6], [1.0, 0.0])
    second = make_group(2 * round + 1, [10, 20], [1.0, 1.0])
    t = start_s - 10.0
    story.tell(RoundStarted(t + 10, round, version=round))
    story.tell(GroupDrawn(t + 10, first), GroupDrawn(t + 10, second))
    story.request(first.samples[0], t + 10, t + 12)
    story.request(first.samples[1], t + 10, t + 14)
    story.request(second.samples[0], t + 12, t + 17)
    story.request(second.samples[1], t + 14, t + 20, outcome="length")
    story.train(first, t + 14, t + 15, t + 16)
    story.train(second, t + 20, t + 22, t + 24)
    story.tell(Published(t + 24, t + 25, version=round + 1), RoundEnded(t + 25, round))
    return story


WALL_TIME = 1_700_000_000.0


def play(events: list[Event], *sinks: Sink, earlier: Sequence[Row] = (), close: bool = True) -> None:
    """Play events through a step meter to the sinks."""
    meter = StepMeter(*sinks, wall_clock=lambda: WALL_TIME, earlier=earlier)
    for event in events:
        meter.on(event)
    if close:
        meter.close()


class Collector:
    """Sink: keeps the rows, and the bounds of rounds."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.bounds: list[RoundBound] = []

    def on(self, event: Event) -> None:
        if isinstance(event, dict):
            self.rows.append(event)
        elif isinstance(event, RoundBound):
            self.bounds.append(event)

    def close(self) -> None: ...


def rows_of(events: list[Event]) -> list[Row]:
    play(events, collector := Collector())
    return collector.rows


PIPELINED_FIGURES = {
    "round/end_s": 25.0,
    "round/time_s": 15.0,
    "round/main_time_s": 14.0,
    "round/bound_s": pytest.approx(9.0),
    "round/rollout_time_s": 10.0,
    "round/first_dispatch_s": 4.0,
    "round/trainer_compute_s": 6.0,
    "round/wait_s": 8.0,
    "round/waiting_ratio": 8 / 14,
    "round/start_ratio": 4 / 14,
    "round/publish_s": 1.0,
    "round/num_steps": 2,
    "round/num_groups": 2,
    "round/num_samples": 4,
    "round/num_tokens": 40,
    "round/num_generated": 40,
    "round/generated_tokens_per_s": 4.0,
    "round/reward": 0.75,
    "round/completions/mean_length": 10.0,
    "round/completions/min_length": 4,
    "round/completions/p50_length": 6,
    "round/completions/p90_length": 20,
    "round/completions/p99_length": 20,
    "round/completions/max_length": 20,
    "round/completions/std_length": pytest.approx(math.sqrt((36 + 16 + 0 + 100) / 3)),
    "round/first_step_length": 5.0,
    "round/last_step_length": 15.0,
}
"""Those of the report of `pipelined_round`."""
