"""Histories that Qwen3's own chat template, or an agent, rewrites: each time a branch begins."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import agents_of_tests
import openai
import pytest
from characters import tokenizer

from tailrace.contracts.environments import EpisodeOver, Outcome
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.data.encoding import text_of
from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.environments.history import Chat, RequestEncoder
from tailrace.drivers.environments.open import environment_kind
from tailrace.errors import EnvironmentFailed
from tailrace.extras.agents.settings import AgentSettings
from tailrace.rollout.episode import Episode
from tailrace.types import Group, Prompt, Sample, SampleId

QWEN3 = (Path(__file__).parents[2] / "helpers" / "qwen3_chat_template.jinja").read_text()
CHARACTERS = tokenizer(QWEN3)
START, END = CHARACTERS.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
ENCODER = RequestEncoder(RowsSettings(path=Path("unused.jsonl")), CHARACTERS, 4096)
OBSERVE = Chat(CHARACTERS, "agent", {}).observe
LIMITS: Any = {
    "sampling": SamplingSettings(max_completion_tokens=999),
    "max_context_tokens": 4096,
    "parking_timeout_s": 0.0,
}
USER = {"role": "user", "content": "1+1?"}
SURE = {"role": "user", "content": "sure?"}
TURNS = ("<think>\nhm\n</think>\n\n2", "<think>\nno\n</think>\n\n3", "<think>\noh\n</think>\n\n4")
STRIPPED = (
    "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
)
KEPT = STRIPPED.replace("\n2<", f"\n{TURNS[0]}<")
Conversation = Callable[[openai.AsyncOpenAI], Awaitable[float | None]]


class Engine:
    """Writes TURNS, one character a token.

    Args:
        stop_at: completion tokens at which it hangs, once.
    """

    def __init__(self, stop_at: int = -1) -> None:
        self.stop_at, self.hangs = stop_at, asyncio.Event()
        self.contexts: list[str] = []

    async def serve(self, sample: Sample) -> None:
        if not sample.turn_ids:
            self.contexts.append(CHARACTERS.decode(sample.turn_context_ids))
        number = sum(1 for turn in sample.turns if turn.num_tokens)
        ids = [*CHARACTERS.encode(TURNS[number], add_special_tokens=False), END]
        for id in ids[len(sample.turn_ids) :]:
            if sample.num_tokens == self.stop_at:
                self.stop_at = -1
                self.hangs.set()
                await asyncio.Event().wait()
            sample.extend([id], [-0.5], 0)
        sample.finish_reason = "stop"


def new_sample() -> Sample:
    return Sample(SampleId(0, 0, 0), Group(Prompt(0, [START]), 1, []))


def play(
    monkeypatch: pytest.MonkeyPatch,
    conversation: Conversation,
    sample: Sample,
    engine: Engine,
    **settings: Any,
) -> Outcome:
    """Play an episode; one that hangs is cancelled and begins again."""

    async def agent(base_url: str, api_key: str) -> float | None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            return await conversation(client)

    monkeypatch.setattr(agents_of_tests, "agent", agent, raising=False)
    agents = AgentSettings(kind="agent", function="agents_of_tests:agent", **settings)

    async def run() -> Outcome:
        async with environment_kind(agents).open(agents, CHARACTERS, ENCODER) as environment:
            assert environment is not None
            while True:
                policy = Episode(sample, engine.serve, OBSERVE, text_of(CHARACTERS), **LIMITS)
                playing = asyncio.ensure_future(environment.run(sample.prompt, policy))
                hanging = asyncio.ensure_future(engine.hangs.wait())
                await asyncio.wait([playing, hanging], return_when=asyncio.FIRST_COMPLETED)
                if not engine.hangs.is_set():
                    hanging.cancel()
                    return playing.result()
                engine.hangs.clear()
                playing.cancel()
                await asyncio.wait([playing])
                assert playing.cancelled()

    return asyncio.run(asyncio.wait_for(run(), 60))


async def ask(client: openai.AsyncOpenAI, *messages: Any) -> Any:
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message


async def three_turns(client: openai.AsyncOpenAI) -> float:
    """A question, doubt, and the answer of a tool, after which the template leaves out no thinking."""
    first = await ask(client, USER)
    second = await ask(client, USER, first, SURE)
    tool = {"role": "tool", "tool_call_id": "call00000", "content": "4"}
    return float((await ask(client, USER, first, SURE, second, tool)).content == TURNS[2])


def texts(sample: Sample) -> list[tuple[str, str]]:
    """Context and response of each branch."""
    ids = sample.completion_ids
    return [
        (CHARACTERS.decode(each.context_ids), CHARACTERS.decode(each.response_ids(ids)))
        for each in sample.branches
    ]


TOOL = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
BRANCHES = [
    ("<|im_start|>", f"user\n1+1?<|im_end|>\n<|im_start|>assistant\n{TURNS[0]}<|im_end|>"),
    (STRIPPED, f"{TURNS[1]}<|im_end|>{TOOL}{TURNS[2]}<|im_end|>"),
]


def test_a_template_that_leaves_out_thinking_begins_a_branch_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample, engine = new_sample(), Engine()
    outcome = play(monkeypatch, three_turns, sample, engine, history="template")
    assert outcome == Outcome(1.0, {"rewritten_history": 1})
    assert texts(sample) == BRANCHES
    assert engine.contexts[1] == STRIPPED and engine.contexts[2] == f"{STRIPPED}{TURNS[1]}<|im_end|>{TOOL}"
    assert CHARACTERS.decode(sample.scored_ids) == BRANCHES[1][1]
    assert [message["content"] for message in sample.messages] == [TURNS[1], "4", TURNS[2]]


def test_without_it_the_model_keeps_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, engine = new_sample(), Engine()
    outcome = play(monkeypatch, three_turns, sample, engine)
    assert outcome == Outcome(1.0, {"rewritten_history": 0})
    assert len(sample.branches) == 1 and engine.contexts[1] == KEPT


@pytest.mark.parametrize("stop_at", [3, 25, 30, 50])
def test_an_episode_that_is_stopped_in_any_branch_goes_on(
    monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """The turns before are not generated again, and the history is the same."""
    sample, engine = new_sample(), Engine(stop_at)
    outcome = play(monkeypatch, three_turns, sample, engine, history="template")
    assert outcome.reward == 1.0 and texts(sample) == BRANCHES and len(engine.contexts) == 3


def play_messages(sample: Sample, engine: Engine, max_branches: int = 16) -> list[str]:
    """An environment that sends new messages only, twice: what is recorded is not generated again."""
    history = ENCODER.history(sample.prompt, max_branches)

    async def run() -> list[str]:
        policy = Episode(sample, engine.serve, OBSERVE, text_of(CHARACTERS), **LIMITS, rewritten=history)
        turns = [await policy.complete(), await policy.complete([SURE])]
        return [turn.text for turn in (*turns, await policy.complete([{"role": "tool", "content": "4"}]))]

    assert asyncio.run(run()) == asyncio.run(run())
    return engine.contexts


def asked(given: object, text: str) -> Sample:
    ids = CHARACTERS.encode(text, add_special_tokens=False)
    return Sample(SampleId(0, 0, 0), Group(Prompt(0, ids, given=given), 1, []))


QUESTION = STRIPPED[: STRIPPED.index("2<")]


@pytest.mark.parametrize("given", ["1+1?", [USER]])
def test_the_template_also_rewrites_where_an_environment_sends_new_messages_only(given: object) -> None:
    sample, engine = asked(given, QUESTION), Engine()
    assert play_messages(sample, engine) == [QUESTION, STRIPPED, f"{STRIPPED}{TURNS[1]}<|im_end|>{TOOL}"]
    assert texts(sample) == [(QUESTION, f"{TURNS[0]}<|im_end|>"), BRANCHES[1]]


def test_such_an_episode_is_over_when_it_may_have_no_other_branch() -> None:
    sample, engine = asked("1+1?", QUESTION), Engine()
    with pytest.raises(EpisodeOver):
        play_messages(sample, engine, max_branches=1)
    assert len(sample.branches) == 1 and engine.contexts == [QUESTION]


def test_a_prompt_that_the_template_does_not_write_from_its_messages_fails_the_episode() -> None:
    with pytest.raises(EnvironmentFailed, match=r"template: .* needs prompts that the template writes"):
        play_messages(asked("1+1?", f"<|im_start|>system\ntools<|im_end|>\n{QUESTION}"), Engine())


def test_an_agent_that_forgets_begins_branches_until_it_may_have_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def forget(client: openai.AsyncOpenAI) -> float:
        for question in (USER, SURE):
            await ask(client, question)
        with pytest.raises(openai.BadRequestError) as error:
            await ask(client, USER)
        assert error.value.code == "rewritten_history"
        return 0.5

    sample = new_sample()
    outcome = play(monkeypatch, forget, sample, Engine(), max_branches=2)
    assert outcome == Outcome(0.5, {"rewritten_history": 2})
    context = "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(sample)[1] == (context, f"{TURNS[1]}<|im_end|>")
    assert sample.turns[1].messages == [{"role": "user", "content": "sure?"}]
    assert sample.turns[1].begins_branch and not sample.turns[0].begins_branch
