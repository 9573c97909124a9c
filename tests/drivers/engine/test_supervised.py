"""An engine over several lives, in virtual time, with lives that generate a token a second."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from helpers.engine_contract import fresh_samples
from tailrace.clock import now
from tailrace.contracts.engine import Arrival, Capabilities, TokenCounter, Usage
from tailrace.contracts.weights import Weights
from tailrace.drivers.engine.supervised import (
    FIRST_PAUSE_S,
    TRANSFER_PAUSE_S,
    WELL_S,
    SupervisedEngine,
    watch_engines,
)
from tailrace.errors import (
    EngineDied,
    EnginesLost,
    Evicted,
    NotArrived,
    TailraceError,
    TransferFailed,
    first_cause,
)
from tailrace.record.events import EngineStateChanged, Recorder
from tailrace.rollout.router import Router
from tailrace.types import KV, Sample, Span

pytestmark = pytest.mark.virtual
START_S, LOAD_S, LENGTH, GIVE_UP_S = 3.0, 5.0, 10, 100.0
CAUSE = "weights not loaded: it computes with version 7"


@dataclass
class Fate:
    """What is to happen to one life.

    Args:
        start_s: until it can serve, or cannot for the reason `unfit`.
        lives_s: from then to its death.
        failing: transfers that fail, the first ones.
        lost: loads after which the answer to the probe shows older weights, the first ones.
        unnoticed_s: until its death is noticed by other means than its requests.
    """

    start_s: float = START_S
    unfit: str = ""
    lives_s: float = 1e9
    failing: int = 0
    lost: int = 0
    unnoticed_s: float = 0.0


class Life:
    """An EngineProcess."""

    capabilities = Capabilities(sleep=True)

    def __init__(self, number: int, fate: Fate) -> None:
        self.number, self.fate = number, fate
        self.counter = TokenCounter()
        self.version, self.loaded, self.closed = 0, list[int](), False
        self.kvs: list[KV] = []
        self.arrival: Arrival | None = None
        self.asleep = False
        self.num_running = self.num_reported = 0
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self) -> None:
        if not self.end.done():
            self.end.set_result(f"life {self.number} ended")

    async def ready(self) -> None:
        await asyncio.sleep(self.fate.start_s)
        if self.fate.unfit:
            raise TailraceError(self.fate.unfit)
        asyncio.get_running_loop().call_later(self.fate.lives_s, self.die)

    async def generate(self, sample: Sample) -> None:
        self.num_running += 1
        try:
            while sample.num_tokens < LENGTH:
                await self._lives_on(1.0)
                self._gain(sample)
            sample.finish_reason = "stop"
        except asyncio.CancelledError:
            await self._lives_on(0.5)  # until the abort arrives, with a last token
            self._gain(sample)
            raise
        finally:
            self.num_running -= 1

    async def load(self, weights: Weights, *, kv: KV) -> None:
        await self._lives_on(LOAD_S)
        if self.fate.failing:
            self.fate.failing -= 1
            raise TransferFailed(f"life {self.number}: the link is broken")
        self.version = weights.version
        self.loaded.append(weights.version)
        self.kvs.append(kv)
        self.arrival = Arrival(
            *(weights.version, 0.5, 0.0, 0.1), seconds=0.0, cause=CAUSE if self.fate.lost else ""
        )
        self.fate.lost = max(0, self.fate.lost - 1)

    async def sleep(self) -> None:
        await self._lives_on(0.0)
        assert self.num_running == 0
        self.asleep = True

    async def wake(self) -> None:
        await self._lives_on(1.0)
        self.asleep, self.version = False, 0

    def usage(self) -> Usage:
        unreported = 7 if self.end.done() else 0
        return Usage(num_running=self.num_running, num_counted=self.num_reported + unreported)

    async def died(self) -> str:
        why = await asyncio.shield(self.end)
        await asyncio.sleep(self.fate.unnoticed_s)
        return why

    async def close(self) -> None:
        self.die()
        self.closed = True

    def _gain(self, sample: Sample) -> None:
        self.counter.add(1)
        self.num_reported += 1
        sample.grow(1, self.version)

    async def _lives_on(self, seconds: float) -> None:
        await asyncio.wait([self.end], timeout=seconds)
        if self.end.done():
            raise EngineDied(self.end.result())


@dataclass
class World:
    """One supervised engine and what became of it."""

    fates: list[Fate] = field(default_factory=list)
    """Of the first lives; the others have nothing special."""
    lives: list[Life] = field(default_factory=list)
    states: list[tuple[float, str, str]] = field(default_factory=list)
    engine: SupervisedEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = SupervisedEngine("one", 8, self.begin, TokenCounter())
        self.engine.on_state = lambda why: self.states.append((now(), self.engine.state, why))

    async def begin(self) -> Life:
        number = len(self.lives)
        fate = self.fates[number] if number < len(self.fates) else Fate()
        self.lives.append(Life(number, replace(fate)))
        return self.lives[-1]

    @property
    def opened_s(self) -> list[float]:
        return [at_s for at_s, state, _ in self.states if state == "open"]


@asynccontextmanager
async def watched(*worlds: World) -> AsyncIterator[None]:
    """The engines are open, under watch."""
    engines = [each.engine for each in worlds]
    for engine in engines:
        await engine.open()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch_engines(engines, GIVE_UP_S))
        yield
        watching.cancel()
    for engine in engines:
        await engine.close()
    assert all(life.closed for each in worlds for life in each.lives)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.125)


async def test_what_an_engine_can_do_is_known_of_its_present_life(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([Fate(lives_s=1.0)])
    async with watched(world):
        assert world.engine.capabilities.sleep
        monkeypatch.setattr(Life, "capabilities", Capabilities(scores=True))
        await until(lambda: len(world.opened_s) == 2)
        assert world.engine.capabilities == Capabilities(scores=True)


async def test_pauses_before_restarts_double_up_to_the_longest_and_begin_anew_after_a_long_life() -> None:
    world = World([Fate(lives_s=0.5)] * 8 + [Fate(lives_s=WELL_S)])
    async with watched(world):
        await until(lambda: len(world.lives) == 10 and world.engine.state == "open")
    gaps = [later - earlier for earlier, later in zip(world.opened_s, world.opened_s[1:], strict=False)]
    lives_s = [0.5] * 8 + [WELL_S]
    pauses = [gap - START_S - life_s for gap, life_s in zip(gaps, lives_s, strict=True)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, FIRST_PAUSE_S]
    assert world.states[1][1:] == ("dead", "life 0 ended")


async def test_a_restarted_engine_has_the_newest_weights_before_it_opens_also_those_of_the_meantime() -> None:
    world = World()
    async with watched(world):
        await world.engine.load(Weights(1), kv="keep")
        world.lives[0].die()
        await until(lambda: world.engine.state == "dead")
        before_s = now()
        await world.engine.load(Weights(2), kv="keep")
        assert now() == before_s  # no publication waits for a dead engine
        await until(lambda: len(world.lives) == 2)
        await asyncio.sleep(START_S + LOAD_S / 2)
        await world.engine.load(Weights(3), kv="keep")
        assert (world.engine.state, world.lives[1].loaded) == ("dead", [])
        await until(lambda: world.engine.state == "open")
        assert world.lives[1].loaded == [2, 3]
        died_s = next(at_s for at_s, state, _ in world.states if state == "dead")
        assert world.opened_s[1] - died_s == FIRST_PAUSE_S + START_S + 2 * LOAD_S


async def test_weights_that_arrive_while_the_engine_dies_are_loaded_by_the_next_life() -> None:
    world = World()
    async with watched(world):
        loading = asyncio.create_task(world.engine.load(Weights(1), kv="keep"))
        await asyncio.sleep(LOAD_S / 2)
        world.lives[0].die()
        await loading
        assert (world.engine.state, world.lives[0].closed) == ("dead", True)
        await until(lambda: world.engine.state == "open")
        assert world.lives[1].loaded == [1]


async def test_before_the_first_publication_a_restarted_engine_loads_nothing() -> None:
    world = World([Fate(lives_s=1.0)])
    async with watched(world):
        await until(lambda: len(world.opened_s) == 2)
        assert world.lives[1].loaded == []


@pytest.mark.parametrize("unnoticed_s", [0.0, 30.0])
async def test_a_death_evicts_every_request_with_its_tokens_and_no_request_goes_there_again(
    unnoticed_s: float,
) -> None:
    world = World([Fate(lives_s=4.5, unnoticed_s=unnoticed_s)])
    async with watched(world):
        samples = fresh_samples(3)
        ended = await asyncio.gather(
            *(world.engine.generate(sample) for sample in samples), return_exceptions=True
        )
        assert [type(error) for error in ended] == [EngineDied] * 3
        assert [sample.spans for sample in samples] == [[Span(0, 4)]] * 3
        assert (world.engine.state, world.engine.why_dead) == ("dead", "life 0 ended")
        with pytest.raises(Evicted):
            await world.engine.generate(samples[0])
        await until(lambda: world.engine.state == "open")
        await asyncio.gather(*(world.engine.generate(sample) for sample in samples))
        assert [sample.spans for sample in samples] == [[Span(0, LENGTH)]] * 3
        assert world.opened_s[1] - world.states[1][0] == pytest.approx(FIRST_PAUSE_S + START_S)


async def test_counters_go_on_over_lives_and_tokens_that_were_never_reported_are_in_none() -> None:
    world = World([Fate(lives_s=4.5), Fate(lives_s=3.5)])
    async with watched(world):
        (sample,) = fresh_samples(1)
        generated = []
        while sample.finish_reason is None:
            await until(lambda: world.engine.state == "open")
            try:
                await world.engine.generate(sample)
            except EngineDied:
                await until(lambda: world.engine._process is None)
            generated.append(world.engine.usage())
        assert [usage.num_generated for usage in generated] == [4, 7, LENGTH]
        assert [usage.num_counted for usage in generated] == [4, 7, LENGTH]
        assert [usage.num_running for usage in generated] == [0, 0, 0]


@pytest.mark.parametrize("cancelled_s", [2.25, 2.5, 2.75])
@pytest.mark.parametrize("first", ["death", "cancellation"])
async def test_a_request_cancelled_while_its_engine_dies_ends_as_cancelled(
    first: str, cancelled_s: float
) -> None:
    """Before the death, so that the abort is under way, in the same instant, and afterwards."""
    world, other = World(), World()
    async with watched(world, other):
        (sample,) = fresh_samples(1)
        router = Router([world.engine, other.engine], Recorder())
        serving = asyncio.create_task(router.serve(sample))
        timers = [(2.5, world.lives[0].die), (cancelled_s, serving.cancel)]
        for delay_s, act in timers if first == "death" else reversed(timers):
            asyncio.get_running_loop().call_later(delay_s, act)
        await asyncio.wait([serving])
        num_tokens = sample.num_tokens
        assert serving.cancelled() and sample.finish_reason is None
        await asyncio.sleep(LENGTH)
        assert sample.num_tokens == num_tokens in (2, 3)
        assert num_tokens == router.num_generated


async def test_a_request_is_cancelled_only_when_all_its_tokens_are_there_however_often_it_is_cancelled() -> (
    None
):
    world = World()
    async with watched(world):
        (sample,) = fresh_samples(1)
        generation = asyncio.create_task(world.engine.generate(sample))
        await asyncio.sleep(2.5)
        for _ in range(3):
            generation.cancel()
            await asyncio.sleep(0.125)
        assert not generation.done()
        await asyncio.wait([generation])
        assert generation.cancelled() and sample.num_tokens == 3


async def test_a_transfer_that_fails_is_repeated_and_no_request_notices() -> None:
    world = World([Fate(failing=2)])
    async with watched(world):
        (sample,) = fresh_samples(1)
        generation = asyncio.create_task(world.engine.generate(sample))
        began_s = now()
        await world.engine.load(Weights(1), kv="keep")
        assert now() - began_s == 3 * LOAD_S + 2 * TRANSFER_PAUSE_S
        await generation
        assert world.lives[0].loaded == [1] and len(world.states) == 1


@pytest.mark.parametrize("fate", [Fate(), Fate(failing=2), Fate(lost=1)], ids=["at once", "failing", "lost"])
async def test_a_request_that_follows_a_load_is_for_its_weights_also_if_a_transfer_fails(fate: Fate) -> None:
    world = World([fate])
    async with watched(world):
        before, after = fresh_samples(2)
        under_way = asyncio.create_task(world.engine.generate(before))
        await asyncio.sleep(1.5)
        loading = asyncio.create_task(world.engine.load(Weights(1), kv="keep"))
        await asyncio.sleep(0)
        await world.engine.generate(after)
        assert after.spans == [Span(1, LENGTH)]
        await asyncio.gather(loading, under_way)
        assert before.spans[0].version == 0  # it went on with the old weights meanwhile


async def test_a_request_waits_for_the_weights_that_were_there_before_it_and_for_no_newer_ones() -> None:
    world = World()
    async with watched(world):
        first = asyncio.create_task(world.engine.load(Weights(1), kv="keep"))
        await asyncio.sleep(0)
        (sample,) = fresh_samples(1)
        generation = asyncio.create_task(world.engine.generate(sample))
        await asyncio.sleep(LOAD_S - 1)
        second = asyncio.create_task(world.engine.load(Weights(2), kv="keep"))
        await first
        await asyncio.gather(second, generation)
        assert sample.spans[0].version == 1


async def test_an_engine_that_cannot_be_given_the_newest_weights_is_ended_before_the_load_returns() -> None:
    world = World([Fate(failing=3)])
    async with watched(world):
        samples = fresh_samples(2)
        for sample in samples:
            sample.grow(1, 0)
        loading = asyncio.create_task(world.engine.load(Weights(1), kv="keep"))
        await asyncio.sleep(3 * LOAD_S)  # two seconds before the last failure
        generations = [asyncio.create_task(world.engine.generate(sample)) for sample in samples]
        await loading
        assert (world.engine.state, world.engine.why_dead) == ("dead", "life 0: the link is broken")
        assert world.lives[0].closed and world.engine._calls == {}
        ended = await asyncio.gather(*generations, return_exceptions=True)
        assert all(isinstance(error, Evicted) for error in ended)
        had = [sample.num_tokens for sample in samples]
        await until(lambda: world.engine.state == "open")
        await asyncio.gather(*(world.engine.generate(sample) for sample in samples))
        for num_tokens, sample in zip(had, samples, strict=True):
            assert sample.spans == [Span(0, num_tokens), Span(1, LENGTH - num_tokens)]


async def test_a_publication_that_has_not_arrived_is_sent_again_without_the_old_cache() -> None:
    world = World([Fate(lost=2)])
    causes: list[str] = []
    world.engine.on_arrival = lambda arrival: causes.append(arrival.cause)
    async with watched(world):
        await world.engine.load(Weights(1), kv="keep")
        assert (world.lives[0].loaded, world.lives[0].kvs) == ([1, 1, 1], ["keep", "recompute", "recompute"])
        assert causes == [CAUSE, CAUSE, ""]
        await world.engine.load(Weights(2), kv="keep")
        assert (world.lives[0].loaded[3:], world.lives[0].kvs[3:]) == ([2], ["keep"])
        assert len(world.lives) == 1 and world.engine.state == "open"


async def test_an_engine_at_which_nothing_arrives_is_restarted_with_the_cause_and_goes_on() -> None:
    world = World([Fate(lost=3), Fate(lost=2)])
    async with watched(world):
        (sample,) = fresh_samples(1)
        await world.engine.load(Weights(1), kv="keep")
        assert world.states[-1][1:] == ("dead", f"one: version 1 has not arrived: {CAUSE}")
        await until(lambda: world.engine.state == "open")
        assert [life.loaded for life in world.lives] == [[1, 1, 1], [1, 1, 1]]
        await world.engine.generate(sample)
        assert sample.spans == [Span(1, LENGTH)]


async def test_a_publication_that_does_not_arrive_after_a_restart_either_ends_the_run_with_its_cause() -> (
    None
):
    world, other = World([Fate(lost=3), Fate(lost=3)]), World()

    with pytest.raises(ExceptionGroup) as lost:
        async with watched(world, other):
            await world.engine.load(Weights(1), kv="keep")
            await asyncio.sleep(1e6)
    error = first_cause(lost.value)
    assert isinstance(error, NotArrived)
    what = f"one: version 1 has not arrived: {CAUSE}"
    assert str(error) == f"{what}; neither did 3 attempts nor a restart help"
    assert len(world.lives) == 2 and all(life.closed for life in world.lives)


async def test_a_restart_that_fails_in_any_way_is_tried_again_with_the_cause_on_record() -> None:
    world = World(
        [
            Fate(lives_s=START_S + LOAD_S + 1),
            Fate(unfit="no memory"),
            Fate(failing=3),
            Fate(start_s=1e9),
            Fate(lives_s=1.0),
            Fate(),
        ]
    )
    other = World()
    causes: list[str] = []
    async with watched(world, other):
        await world.engine.load(Weights(1), kv="keep")
        await until(lambda: world.engine.state == "dead")
        while world.engine.state != "open" or len(world.lives) < 6:
            await asyncio.sleep(0.125)
            if world.engine.why_dead not in causes:
                causes.append(world.engine.why_dead)
    assert causes == [
        "life 0 ended",
        "no memory",
        "life 2: the link is broken",
        f"it did not start within {GIVE_UP_S:g} s",
        "life 4 ended",
    ]
    assert [life.loaded for life in world.lives] == [[1], [], [], [], [], [1]]


async def test_the_run_ends_with_every_cause_once_no_engine_has_come_back_in_time() -> None:
    worlds = [
        World([Fate(lives_s=20.0), *[Fate(unfit="no memory")] * 99]),
        World([Fate(lives_s=40.0), *[Fate(unfit="no device")] * 99]),
    ]

    with pytest.raises(ExceptionGroup) as lost:
        async with watched(*worlds):
            await asyncio.sleep(1e6)
    (error,) = lost.value.exceptions
    assert isinstance(error, ExceptionGroup)  # of the watch's own tasks
    assert isinstance(error.exceptions[0], EnginesLost)
    assert str(error.exceptions[0]) == (
        "all engines are dead for 100 s (engine.recovery_timeout_s). one: no memory; one: no device"
    )
    died_s = [next(at_s for at_s, state, _ in world.states if state == "dead") for world in worlds]
    assert died_s == [START_S + 20.0, 2 * START_S + 40.0]
    assert all(life.closed for world in worlds for life in world.lives[:-1])


async def test_an_engine_that_comes_back_in_time_saves_the_run() -> None:
    world = World([Fate(lives_s=1.0), *[Fate(unfit="no memory")] * 4])
    async with watched(world):
        await until(lambda: len(world.opened_s) == 2)
        await asyncio.sleep(3 * GIVE_UP_S)
    assert len(world.lives) == 6


async def test_an_engine_asleep_keeps_no_request_and_wakes_with_the_newest_weights() -> None:
    world = World()
    async with watched(world):
        await world.engine.load(Weights(1), kv="keep")
        (sample,) = fresh_samples(1)
        generation = asyncio.create_task(world.engine.generate(sample))
        await asyncio.sleep(2.5)
        await world.engine.sleep()
        with pytest.raises(Evicted, match="one is asleep"):
            await generation
        assert (sample.spans, world.lives[0].asleep) == ([Span(1, 3)], True)
        await world.engine.load(Weights(2), kv="keep")
        await asyncio.sleep(2 * GIVE_UP_S)  # a lent engine is not lost
        await world.engine.wake()
        assert (world.engine.state, world.lives[0].loaded) == ("open", [1, 2])
        await world.engine.generate(sample)
        assert sample.spans == [Span(1, 3), Span(2, LENGTH - 3)]
    assert [state for _, state, _ in world.states] == ["open", "asleep", "open"]


@pytest.mark.parametrize("when", ["before it sleeps", "asleep", "while it wakes"])
async def test_an_engine_whose_device_is_lent_is_not_restarted_before_it_is_back(when: str) -> None:
    world = World()
    async with watched(world):
        if when == "before it sleeps":
            world.lives[0].die()
            await until(lambda: len(world.lives) == 2)  # the next one is starting
        await world.engine.sleep()
        if when == "asleep":
            world.lives[0].die()
        await asyncio.sleep(2 * GIVE_UP_S)
        assert world.engine.state == "asleep"
        assert all(life.closed or life.asleep for life in world.lives)
        num_lives = len(world.lives)
        waking = asyncio.create_task(world.engine.wake())
        if when == "while it wakes":
            await asyncio.sleep(0.5)
            world.lives[0].die()
        await waking
        await until(lambda: world.engine.state == "open")
        assert len(world.lives) == num_lives + 1
        (sample,) = fresh_samples(1)
        await world.engine.generate(sample)
        assert sample.num_tokens == LENGTH
    assert [state for _, state, _ in world.states][-3:] == ["asleep", "dead", "open"]


async def test_states_are_recorded_with_their_reason() -> None:
    world = World([Fate(lives_s=2.0)])

    class Sink:
        def __init__(self) -> None:
            self.events: list[EngineStateChanged] = []

        def on(self, event: object) -> None:
            if isinstance(event, EngineStateChanged):
                self.events.append(event)

        def close(self) -> None: ...

    sink = Sink()
    async with watched(world):
        Router([world.engine], Recorder(sink))
        await until(lambda: len(sink.events) == 2)
    assert [(event.engine, event.state, event.why) for event in sink.events] == [
        ("one", "dead", "life 0 ended"),
        ("one", "open", "it was restarted"),
    ]


async def test_a_change_of_the_tensor_parallel_size_ends_the_life_and_a_new_one_has_the_newest_weights() -> (
    None
):
    world = World()
    engine = world.engine
    async with watched(world):
        await engine.load(Weights(1), kv="keep")
        (sample,) = fresh_samples(1)
        request = asyncio.create_task(engine.generate(sample))
        await asyncio.sleep(3.25)
        await engine.resize(0)  # its device goes to another engine
        with pytest.raises(Evicted):
            await request
        assert (sample.num_tokens, engine.state, world.lives[0].closed) == (4, "asleep", True)
        await engine.sleep()
        await engine.wake()
        await asyncio.sleep(100.0)
        assert (engine.state, len(world.lives)) == ("asleep", 1)
        await engine.load(Weights(2), kv="keep")
        began_s = now()
        await engine.resize(2)
        await until(lambda: engine.state == "open")
        assert now() - began_s == FIRST_PAUSE_S + START_S + LOAD_S
        assert (engine.width, engine.slots, world.lives[1].loaded) == (2, 16, [2])
        await engine.generate(sample)
        assert sample.spans == [Span(1, 4), Span(2, 6)]


async def test_a_start_with_an_earlier_tensor_parallel_size_does_not_become_the_life() -> None:
    world = World()
    engine = world.engine
    async with watched(world):
        world.lives[0].die()
        await until(lambda: len(world.lives) == 2)  # the next one is starting
        await engine.resize(0)
        await engine.resize(2)
        await until(lambda: engine.state == "open")
        assert [life.closed for life in world.lives] == [True, True, False]


async def test_an_engine_whose_devices_another_one_has_does_not_keep_a_lost_run_alive() -> None:
    world, joined = World([Fate(), *[Fate(unfit="no memory")] * 99]), World()

    with pytest.raises(ExceptionGroup) as lost:
        async with watched(world, joined):
            await joined.engine.resize(0)
            world.lives[0].die()
            await asyncio.sleep(1e4)
    assert lost.group_contains(EnginesLost, match="one: no memory", depth=2)
