"""The bubbles of a life that grows are those of the whole life."""

import random
from pathlib import Path

import pytest
from record_story import make_group

from tailrace.page.bubbles import bubbles
from tailrace.page.grown import GrownBubbles
from tailrace.page.life import Life
from tailrace.record.events import (
    Accumulated,
    EngineStateChanged,
    Event,
    Published,
    RequestEnded,
    RequestStarted,
    RoundEnded,
    RoundStarted,
    SampleScored,
)
from tailrace.record.intervals import union
from tailrace.record.trace import TraceWriter


def random_events(seed: int) -> list[Event]:
    """Rounds of requests on two engines, some over many rounds, with rewards, training and deaths."""
    chance, now, found = random.Random(seed), 0.0, []
    running: dict[int, str] = {}
    samples = [make_group(prompt, [9], [1.0]).samples[0].id for prompt in range(400)]
    fresh = iter(range(400))
    for round in range(12):
        found.append(RoundStarted(now, round, round))
        for _ in range(chance.randint(5, 30)):
            now += chance.choice((0.0, 0.25, 1.0))
            kind = chance.random()
            if kind < 0.45:
                prompt = next(fresh)
                running[prompt] = chance.choice(("engine-0", "engine-1"))
                found.append(RequestStarted(now, samples[prompt], running[prompt], 0))
            elif kind < 0.85 and running:
                prompt = chance.choice(list(running))
                found.append(RequestEnded(now, samples[prompt], running.pop(prompt), 9, 9, "stop"))
                if chance.random() < 0.7:
                    found.append(SampleScored(now + 0.5, samples[prompt], 1.0, None, 9))
                    now += 0.5
            elif kind < 0.95:
                found.append(Accumulated(max(0.0, now - chance.choice((0.5, 3.0))), now, (), 9))
            else:
                state = chance.choice(("dead", "open", "asleep"))
                found.append(EngineStateChanged(now, chance.choice(("engine-0", "engine-2")), state, ""))
        found += [Published(now, now + 1.0, round + 1), RoundEnded(now + 1.0, round)]
        now += 1.0
    return found


@pytest.mark.parametrize("seed", range(6))
def test_bubbles_that_grow_with_the_file_are_those_of_the_whole_file(tmp_path: Path, seed: int) -> None:
    path, chance = tmp_path / "trace.json", random.Random(seed)
    writer, life = TraceWriter(path), Life(tmp_path / "trace.json", 5.0)
    grown = GrownBubbles(life)
    for event in random_events(seed):
        writer.on(event)
        if chance.random() < 0.1 and life.update():
            grown.update()
    writer.close()
    life.update()
    grown.update()
    whole = Life(path, 5.0)
    whole.update()
    found = [bubble for bubble in grown if bubble.end_s > bubble.start_s]
    assert found == bubbles(whole.activity())
    waits = [(wait.start_s, wait.end_s) for wait in grown.scoring]
    assert waits == [tuple(pair) for pair in union(whole.activity().scoring).tolist()]
    assert grown.recorded_s == whole.end_s - 5.0
    assert (life.slots, life.stragglers) == (whole.slots, whole.stragglers)
