"""The versions that engines serve, and on which of them pinned samples begin and go on."""

from math import inf

import pytest

from tailrace.contracts.weights import Weights
from tailrace.errors import VersionGone
from tailrace.rollout.loads import EngineLoads
from tailrace.rollout.versions import PinnedVersions
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import SimEngineSettings
from tailrace.types import Group, Prompt, Sample, SampleId, Span

pytestmark = pytest.mark.virtual
FREE = (0, 0, 0)
NEWEST_FULL = (2, 0, 2)
"""Requests of each engine."""


def versions_of(*served: tuple[int, ...], requests: tuple[int, ...] = ()) -> PinnedVersions:
    """Engines of two slots, of which each serves up to two versions; the newest is 2."""
    engines = [SimEngine(f"{n}", SimEngineSettings(slots=2), lambda sample: 1) for n in range(len(served))]
    loads = EngineLoads(engines)
    for number, num in enumerate(requests):
        loads.add(number, num)
    versions = PinnedVersions(engines, loads, version=2)
    versions.pinned, versions.served = 2, [*served]
    return versions


def sample_of(prompt: int, version: int | None = None) -> Sample:
    sample = Sample(SampleId(prompt, 0, 0), Group(Prompt(prompt, [1]), 1, []))
    sample.spans = [] if version is None else [Span(version, 5)]
    return sample


@pytest.mark.parametrize(
    ("sample", "requests", "oldest", "batch", "pin", "engines"),
    [
        (sample_of(0, 1), FREE, inf, inf, 1, [0, 1]),  # it goes on with its own
        (sample_of(0), FREE, 1, inf, 2, [0, 2]),
        (sample_of(0), NEWEST_FULL, 1, inf, 1, [1]),
        (sample_of(0), NEWEST_FULL, inf, inf, 2, [0, 2]),  # it waits on an engine
        (sample_of(0), NEWEST_FULL, 1, 3, 2, [0, 2]),  # three have begun on the older one
        (sample_of(-1), FREE, 1, inf, 2, [0, 2]),
        (sample_of(-1), NEWEST_FULL, 1, inf, None, []),  # a held-out one waits for the newest
    ],
)
async def test_a_sample_begins_on_the_newest_version_or_on_one_that_is_not_too_old(
    sample: Sample,
    requests: tuple[int, ...],
    oldest: float,
    batch: float,
    pin: int | None,
    engines: list[int],
) -> None:
    versions = versions_of((1, 2), (1,), (2,), requests=requests)
    versions.oldest_to_begin, versions.batch, versions.num_begun = lambda group: oldest, batch, [0, 3, 0]
    assert (versions.pin(sample), sample.pin) == (engines, pin)


async def test_a_sample_whose_version_no_engine_serves_is_refused() -> None:
    with pytest.raises(VersionGone, match="no engine serves version 0 any more"):
        versions_of((1, 2), (2,)).pin(sample_of(0, 0))


async def test_no_sample_begins_on_an_older_version_while_an_engine_loads() -> None:
    versions = versions_of((2,), (1,), (), requests=(2, 0, 0))
    versions.oldest_to_begin = lambda group: 1
    assert versions.pin(sample_of(0)) == [0]


@pytest.mark.parametrize(
    ("num_requests", "older", "has_room"), [(1, False, True), (2, False, False), (2, True, True)]
)
async def test_requests_on_their_way_to_an_engine_take_its_room(
    num_requests: int, older: bool, has_room: bool
) -> None:
    versions = versions_of((2,), (1,), requests=(1, 0))  # one slot of the newest is free, two of the other
    versions.oldest_to_begin = lambda group: 1 if older else inf
    assert versions.has_room(sample_of(0), num_requests) == has_room
    assert versions.has_room(sample_of(0, 1), 99)  # it has tokens


async def test_an_engine_that_was_away_serves_what_it_was_given_last_alone() -> None:
    engine = SimEngine("a", SimEngineSettings(slots=2, versions=3), lambda sample: 100)
    versions, served = PinnedVersions([engine], EngineLoads([engine]), version=0), []
    versions.pinned, engine.on_state = 3, lambda why: versions.restarted(0)
    for version, change in ((1, engine.die), (2, engine.revive), (3, lambda: None)):
        versions.make_room(0, version)
        await engine.load(Weights(version), kv="keep")
        versions.loaded(0, version)
        change()
        served.append(versions.served[0])
    assert served == [(1,), (2,), (2, 3)]
