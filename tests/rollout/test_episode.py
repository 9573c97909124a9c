"""One episode over its record: what was recorded is returned, and only the rest is done."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tailrace.contracts.environments import Completion, EpisodeOver, Message
from tailrace.contracts.sampling import SamplingSettings
from tailrace.errors import EnvironmentFailed
from tailrace.rollout.episode import Episode
from tailrace.types import Group, Prompt, Sample, SampleId, Turn

END = 9


def new_sample() -> Sample:
    return Sample(SampleId(0, 0, 0), Group(Prompt(0, [1, 2]), 1, []), in_episode=True)


class Engine:
    """Ends each turn after two tokens of its own and an end token."""

    def __init__(self) -> None:
        self.served = 0

    async def serve(self, sample: Sample) -> None:
        self.served += 1
        if sample.finish_reason is None:
            sample.extend([5, 6, END], [-1.0] * 3, 0)
            sample.finish_reason = "stop"


def episode(sample: Sample, engine: Engine, **limits: Any) -> Episode:
    def observe(messages: Sequence[Message], last_id: int | None) -> list[int]:
        assert last_id == END
        return [7] * len(messages)

    bounds = {"sampling": SamplingSettings(), "max_context_tokens": 100, "parking_timeout_s": 5, **limits}
    return Episode(sample, engine.serve, observe, lambda ids: " ".join(map(str, ids)), **bounds)  # type: ignore[arg-type]


def turn(num_context_tokens: int) -> Completion:
    return Completion("5 6 9", "stop", 3, [5, 6, END], [-1.0] * 3, num_context_tokens)


async def play(policy: Episode, made: list[str]) -> list[Completion | str]:
    async def action() -> str:
        made.append("call")
        return "answer"

    first = await policy.complete()
    answer = await policy.call(action)
    return [first, answer, await policy.complete([{"role": "tool", "content": answer}])]


def test_an_episode_that_begins_again_returns_what_was_recorded_and_does_nothing_twice() -> None:
    sample, engine, made = new_sample(), Engine(), list[str]()
    for _ in range(2):
        assert asyncio.run(play(episode(sample, engine), made)) == [turn(2), "answer", turn(6)]
    assert (engine.served, made) == (2, ["call"])
    assert sample.response_ids == [5, 6, END, 7, 5, 6, END]


def test_an_episode_that_does_not_repeat_itself_fails() -> None:
    sample, engine = new_sample(), Engine()
    asyncio.run(play(episode(sample, engine), []))

    async def play_otherwise(policy: Episode) -> None:
        await policy.complete()
        await policy.complete([{"role": "tool", "content": "one"}, {"role": "tool", "content": "more"}])

    with pytest.raises(EnvironmentFailed, match="not repeatable"):
        asyncio.run(play_otherwise(episode(sample, engine)))


def test_what_is_opened_stands_between_the_prompt_and_the_first_turn() -> None:
    sample, engine = new_sample(), Engine()
    for _ in range(2):
        opened = episode(sample, engine)
        opened.open([1, 2, 3, 4])
        assert asyncio.run(play(opened, [])) == [turn(4), "answer", turn(8)]
    assert engine.served == 2
    assert (sample.opening_ids, sample.turn_start) == ([3, 4], 3)
    assert sample.response_ids == [3, 4, 5, 6, END, 7, 5, 6, END]
    assert [message["content"] for message in sample.messages] == ["5 6 9", "answer", "5 6 9"]


@pytest.mark.parametrize("ids", [[1], [1, 3, 4]])
def test_what_is_opened_begins_with_the_prompt(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="does not begin with the prompt"):
        episode(new_sample(), Engine()).open(ids)


def test_what_is_opened_otherwise_after_an_interruption_fails() -> None:
    sample, engine = new_sample(), Engine()
    episode(sample, engine).open([1, 2, 3])
    for other in ([1, 2], [1, 2, 4]):
        with pytest.raises(EnvironmentFailed, match="not repeatable"):
            episode(sample, engine).open(other)


def test_a_rewritten_history_begins_a_branch_each_time_the_episode_is_played() -> None:
    sample, engine = new_sample(), Engine()

    async def play_rewriting(policy: Episode) -> list[Completion]:
        turns = [await policy.complete(), await policy.complete([{"role": "user", "content": ""}])]
        assert policy.context_ids == [1, 2, 5, 6, END, 7, 5, 6, END]
        turns.append(await policy.complete(context_ids=[1, 8]))
        assert policy.context_ids == [1, 8, 5, 6, END]
        return [*turns, await policy.complete([{"role": "user", "content": ""}])]

    for _ in range(2):
        assert asyncio.run(play_rewriting(episode(sample, engine))) == [turn(2), turn(6), turn(2), turn(6)]
    assert engine.served == 4
    assert sample.context_ids == [1, 8, 5, 6, END, 7, 5, 6, END] and len(sample.branches) == 2


def test_another_history_than_before_the_interruption_fails() -> None:
    sample, engine = new_sample(), Engine()

    async def play_rewriting(policy: Episode, context_ids: list[int] | None) -> None:
        await policy.complete()
        await policy.complete([{"role": "user", "content": ""}], context_ids=context_ids)

    asyncio.run(play_rewriting(episode(sample, engine), [7]))
    for other in (None, [7, 7]):
        with pytest.raises(EnvironmentFailed, match="not repeatable"):
            asyncio.run(play_rewriting(episode(sample, engine), other))


def test_the_context_of_a_branch_counts_from_its_start() -> None:
    async def play_rewriting(policy: Episode, context_ids: list[int]) -> None:
        await policy.complete()
        await policy.complete(context_ids=context_ids)

    asyncio.run(play_rewriting(episode(new_sample(), Engine(), max_context_tokens=6), [1] * 5))
    with pytest.raises(EpisodeOver):
        asyncio.run(play_rewriting(episode(new_sample(), Engine(), max_context_tokens=6), [1] * 6))


def test_the_limit_of_a_turn_counts_from_its_start() -> None:
    sample, engine, limits = new_sample(), Engine(), list[float]()

    async def serve(sample: Sample) -> None:
        limits.append(sample.turn_limit)
        await Engine.serve(engine, sample)

    engine.serve = serve  # type: ignore[method-assign]

    async def play_limited(policy: Episode) -> None:
        await policy.complete(max_tokens=5)
        await policy.complete([{"role": "user", "content": ""}], max_tokens=5)
        await policy.complete([{"role": "user", "content": ""}])

    asyncio.run(play_limited(episode(sample, engine)))
    assert limits == [5, 8, float("inf")]


def test_a_turn_that_ended_just_before_the_interruption_is_not_generated_again() -> None:
    """The tokens and the finish reason were written down; the turn was not."""
    sample, engine = new_sample(), Engine()
    asyncio.run(engine.serve(sample))
    assert asyncio.run(episode(sample, engine).complete()) == turn(2)
    assert [(turn.num_tokens, turn.finish_reason) for turn in sample.turns] == [(3, "stop")]


def test_a_call_without_a_recorded_result_is_made_again() -> None:
    sample, engine, made = new_sample(), Engine(), list[str]()
    asyncio.run(engine.serve(sample))
    sample.turns.append(Turn(3, "stop", results=[None]))
    asyncio.run(play(episode(sample, engine), made))
    assert made == ["call"] and sample.turns[0].results == ["answer"]


@pytest.mark.parametrize(
    "limits",
    [{"sampling": SamplingSettings(max_completion_tokens=3)}, {"max_context_tokens": 6}],
    ids=lambda limits: next(iter(limits)),
)
def test_an_episode_without_room_is_over_each_time_it_is_played(limits: dict[str, Any]) -> None:
    sample, engine = new_sample(), Engine()
    for _ in range(2):
        with pytest.raises(EpisodeOver):
            asyncio.run(play(episode(sample, engine, **limits), []))
    assert (sample.finish_reason, engine.served, sample.response_ids) == ("length", 1, [5, 6, END])


def test_a_call_before_the_first_turn_is_an_error() -> None:
    async def action() -> str:
        return ""

    with pytest.raises(RuntimeError, match=r"before the first Policy\.complete"):
        asyncio.run(episode(new_sample(), Engine()).call(action))


async def test_halves_of_surrogate_pairs_in_messages_are_replaced() -> None:
    """A policy can spell them in a tool call; neither tokenizers nor ledgers can encode them."""
    sample = new_sample()
    policy = episode(sample, Engine())
    await policy.complete()
    await policy.complete([{"role": "tool", "name": "\ud800", "content": "a\udc00"}])
    assert sample.turns[0].messages == [{"role": "tool", "name": "?", "content": "a?"}]


def test_an_environment_that_asks_for_two_turns_at_the_same_time_fails() -> None:
    """The engine would generate one turn twice."""
    sample = new_sample()

    async def play() -> None:
        engine = Engine()

        async def serve(sample: Sample) -> None:
            await asyncio.sleep(0)
            await engine.serve(sample)

        policy = episode(sample, engine)
        policy._serve = serve
        await asyncio.gather(policy.complete(), policy.complete())

    with pytest.raises(RuntimeError, match="while another turn was generated"):
        asyncio.run(play())
