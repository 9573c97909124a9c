"""Which engine gets a request."""

import asyncio
from collections import Counter

import msgspec

from tailrace import clock
from tailrace.contracts.engine import Capabilities, DecodeSums, Usage
from tailrace.contracts.weights import Weights
from tailrace.errors import Evicted
from tailrace.record.events import Decoded, Event, Recorder
from tailrace.rollout.router import Router
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import SimEngineSettings
from tailrace.types import Group, Prompt, Sample, SampleId, Span

SLOTS = 16


def samples_of(engine: str | None, n: int) -> list[Sample]:
    """As parked: each with a token that the engine produced."""
    group = Group(Prompt(0, [1]), n, [])
    group.samples = [Sample(SampleId(0, 0, number), group, engine=engine) for number in range(n)]
    for sample in group.samples:
        sample.grow(1, 0)
    return group.samples


def served(*lots: list[Sample], gone: str = "") -> Counter[str | None]:
    """How many samples each of two engines gets, all being asked for in this order."""

    async def main() -> None:
        settings = SimEngineSettings(slots=SLOTS)
        engines = [SimEngine(name, settings, lambda sample: 100) for name in ("a", "b")]
        for engine in engines:
            if engine.name == gone:
                engine.die()
        router = Router(engines, Recorder())
        async with asyncio.TaskGroup() as tasks:
            for lot in lots:
                for sample in lot:
                    tasks.create_task(router.serve(sample))

    clock.run(main(), virtual=True)
    return Counter(sample.engine for lot in lots for sample in lot)


def test_new_requests_go_to_the_least_loaded_engine() -> None:
    assert served(samples_of(None, 10)) == {"a": 5, "b": 5}


def test_what_was_parked_goes_back_to_the_engine_that_had_it() -> None:
    of_a, of_b = samples_of("a", 6), samples_of("b", 6)
    assert served([sample for pair in zip(of_b, of_a, strict=True) for sample in pair]) == {"a": 6, "b": 6}
    assert {sample.engine for sample in of_a} == {"a"} and {sample.engine for sample in of_b} == {"b"}


def test_but_not_if_that_is_an_eighth_of_its_slots_ahead() -> None:
    assert served(samples_of("b", 10)) == {"a": 4, "b": 6}


def test_nor_if_it_has_no_slot_left_or_is_away() -> None:
    assert served(samples_of(None, 2 * SLOTS - 1), samples_of("a", 1)) == {"a": SLOTS, "b": SLOTS}
    assert served(samples_of("a", 3), gone="a") == {"b": 3}


def test_drafts_of_an_engine_that_counts_no_steps_are_recorded() -> None:
    class Drafting(SimEngine):
        sums = DecodeSums()

        def usage(self) -> Usage:
            return msgspec.structs.replace(super().usage(), decoded=self.sums)

    class Kept:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def on(self, event: Event) -> None:
            self.events.append(event)

        def close(self) -> None:
            """Nothing is open."""

    async def main() -> list[Event]:
        engine, kept = Drafting("a", SimEngineSettings(slots=SLOTS), lambda sample: 100), Kept()
        engine.capabilities = Capabilities(drafts=True)
        router = Router([engine], Recorder(kept))
        engine.sums = DecodeSums(checked=7, accepted=3)
        for sample in samples_of(None, 1):
            await router.serve(sample)
        return kept.events

    (decoded,) = (each for each in clock.run(main(), virtual=True) if isinstance(each, Decoded))
    assert decoded.drafts and decoded.sums == DecodeSums(checked=7, accepted=3)


def test_an_engine_that_gave_a_request_back_holds_nothing_of_it() -> None:
    class Full(SimEngine):
        async def generate(self, sample: Sample) -> None:
            self.state = "dead"
            raise Evicted(self.name)

    async def main() -> Sample:
        (sample,) = samples_of("a", 1)
        router = Router([Full("a", SimEngineSettings(slots=SLOTS), lambda sample: 100)], Recorder())
        serving = asyncio.create_task(router.serve(sample))
        await asyncio.sleep(1)
        serving.cancel()
        return sample

    assert clock.run(main(), virtual=True).engine is None


def test_an_engine_that_refuses_a_version_is_not_asked_for_it_again() -> None:
    """The router believes that both have version 1."""

    async def main() -> tuple[Sample, Router]:
        settings = SimEngineSettings(slots=SLOTS, versions=2)
        engines = [SimEngine(name, settings, lambda sample: 100) for name in ("a", "b")]
        router = Router(engines, Recorder())
        router.versions.pinned = 2
        await engines[1].load(Weights(1), kv="keep")
        for number in range(2):
            router.loaded(number, 1)
        (sample,) = samples_of("a", 1)
        sample.spans = [Span(1, 1)]
        await router.serve(sample)
        return sample, router

    sample, router = clock.run(main(), virtual=True)
    assert (sample.engine, sample.spans) == ("b", [Span(1, 100)])
    assert router.versions.served == [(0,), (0, 1)]
