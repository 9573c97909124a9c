"""Episodes of tasksets over an engine that says what the test tells it to."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from helpers.chatty_model import CALLS, END, chatty_tokenizer
from tailrace.contracts.environments import Environment, Outcome
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.environments.history import Chat, RequestEncoder
from tailrace.drivers.environments.open import environment_kind
from tailrace.errors import EnvironmentFailed
from tailrace.extras.verifiers.taskset import Taskset, TasksetSettings, VerifiersSettings
from tailrace.rollout.episode import Episode
from tailrace.types import Group, Prompt, Sample, SampleId

pytestmark = [
    pytest.mark.verifiers,
    # verifiers' client of tool servers calls tenacity by an old name.
    pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning"),
]

TOKENIZER = chatty_tokenizer()
CHAT = Chat(TOKENIZER, "verifiers", {})
WRITE, _, READ, FIRST, _ = CALLS


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


class Script:
    """An engine that writes given turns token by token.

    Args:
        turns: the text of each turn.
        stop_at: completion tokens at which it hangs, once each.
    """

    def __init__(self, turns: Sequence[str], stop_at: Sequence[int] = ()) -> None:
        self._ids = [TOKENIZER.encode(turn + END, add_special_tokens=False) for turn in turns]
        self._stop_at = list(stop_at)
        self.num_generated = 0
        self.hangs = asyncio.Event()

    async def serve(self, sample: Sample) -> None:
        turn = sum(1 for each in sample.turns if each.num_tokens)
        for id in self._ids[turn][sample.num_tokens - sample.turn_start :]:
            if self._stop_at and sample.num_tokens == self._stop_at[0]:
                self._stop_at.pop(0)
                self.hangs.set()
                await asyncio.Event().wait()
            sample.extend([id], [-1.0], 0)
            self.num_generated += 1
        sample.finish_reason = "stop"

    def episode(self, sample: Sample) -> Episode:
        sampling = SamplingSettings(max_completion_tokens=500)
        return Episode(
            sample,
            self.serve,
            CHAT.observe,
            decode,
            sampling=sampling,
            max_context_tokens=4000,
            parking_timeout_s=5.0,
        )


def sample_of(taskset: str, place: int = 0, num_tasks: int | None = None) -> Sample:
    """A sample as in a run: its prompt is the token with which every first request begins."""
    settings = TasksetSettings(taskset=taskset, num_tasks=num_tasks)
    task = Taskset(settings).load()[place]
    start = RequestEncoder(settings, TOKENIZER, 4000).start()
    prompt = Prompt(place, start, row={"task": task.data.model_dump(mode="json")})
    group = Group(prompt, 1, [])
    group.samples.append(Sample(SampleId(place, 0, 0), group))
    return group.samples[0]


def opened(taskset: str, **settings: Any) -> AbstractAsyncContextManager[Environment | None]:
    encoder = RequestEncoder(TasksetSettings(taskset=taskset), TOKENIZER, 4000)
    named = VerifiersSettings(kind="verifiers", taskset=taskset, **settings)
    return environment_kind(named).open(named, TOKENIZER, encoder)


def answers(sample: Sample) -> list[list[str]]:
    """What tools answered to each turn of the policy."""
    said = [decode(turn.observation_ids) for turn in sample.turns if turn.num_tokens]
    return [[part.split("\n")[0] for part in text.split("tool\n")[1:]] for text in said]


async def played(environment: Environment | None, sample: Sample, script: Script) -> Outcome:
    assert environment
    return await environment.run(sample.prompt, script.episode(sample))


def play(taskset: str, sample: Sample, turns: Sequence[str], **settings: Any) -> Outcome:
    async def main() -> Outcome:
        async with opened(taskset, **settings) as environment:
            return await played(environment, sample, Script(turns))

    return asyncio.run(main())


@pytest.mark.parametrize("history", ["keep", "template"])
def test_the_turns_of_a_scripted_user_follow_one_another_token_by_token(history: str) -> None:
    """A template that writes what was written begins no branch."""
    sample = sample_of("alphabet_sort", num_tasks=2)
    first, second = sample.prompt.row["task"]["user_turns"]  # type: ignore[index]
    truths = sample.prompt.row["task"]["truths"]  # type: ignore[index]
    outcome = play("alphabet_sort", sample, truths, history=history)
    assert outcome == Outcome(1.0, {"similarity": 1.0, "rewritten_history": 0.0})
    assert TOKENIZER.decode([*sample.prompt.ids, *sample.response_ids]) == (
        f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n{truths[0]}<|im_end|>\n"
        f"<|im_start|>user\n{second}<|im_end|>\n<|im_start|>assistant\n{truths[1]}<|im_end|>"
    )


def test_an_episode_that_is_parked_in_each_turn_repeats_no_token(called: Callable[[], list[str]]) -> None:
    """Its tools are called again. The state that they have written is there again, too."""
    sample = sample_of("scratchpad")

    async def main() -> tuple[Outcome, int]:
        script = Script([WRITE, READ, "alpha"], stop_at=[1, 3, 5])
        async with opened("scratchpad") as environment:
            for _ in range(3):
                script.hangs.clear()
                playing = asyncio.create_task(played(environment, sample, script))
                hanging = asyncio.create_task(script.hangs.wait())
                await asyncio.wait([playing, hanging], return_when=asyncio.FIRST_COMPLETED)
                playing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await playing
            return await played(environment, sample, script), script.num_generated

    outcome, num_generated = asyncio.run(main())
    assert outcome == Outcome(1.0, {"written": 1.0, "rewritten_history": 0.0})
    assert num_generated == sample.num_tokens == 10
    assert called() == ["write alpha"] + 2 * ["write alpha", "read"]
    assert answers(sample) == [["written"], ["alpha"], []]


def test_a_task_has_tools_of_its_own_beside_the_shared_ones() -> None:
    sample = sample_of("scratchpad")
    play("scratchpad", sample, [READ + FIRST, "."], args={"task": {"clues": True}})
    assert answers(sample) == [["", "a"], []]


def test_rollouts_that_share_a_tool_have_states_of_their_own() -> None:
    async def main() -> list[Outcome]:
        samples = [sample_of("scratchpad", place) for place in (0, 1)]
        async with opened("scratchpad") as environment:
            scripts = [Script([call, READ, "."]) for call in CALLS[:2]]
            return await asyncio.gather(*map(played, [environment] * 2, samples, scripts))

    assert [outcome.reward for outcome in asyncio.run(main())] == [1.0, 1.0]


def test_an_unknown_tool_is_answered_and_a_malformed_call_is_text() -> None:
    sample = sample_of("scratchpad")
    play("scratchpad", sample, [CALLS[4], "<tool_call>{</tool_call>"])
    assert answers(sample) == [["error: unknown tool 'nothing'"], []]


def test_a_harness_that_rewrites_history_begins_a_branch_token_by_token() -> None:
    sample = sample_of("rewriting")
    outcome = play("rewriting", sample, ["one", "two"])
    assert outcome == Outcome(2.0, {"turns": 2.0, "rewritten_history": 1.0})
    responses = [branch.response_ids(sample.completion_ids) for branch in sample.branches]
    assert [
        decode([*branch.context_ids, *response])
        for branch, response in zip(sample.branches, responses, strict=True)
    ] == ["user\nSay 0.\nassistant\none", "user\nForget it.\nassistant\ntwo"]


def test_a_harness_that_rewrites_history_too_often_ends_the_episode() -> None:
    sample = sample_of("rewriting")
    outcome = play("rewriting", sample, ["one", "two"], max_branches=1)
    assert outcome == Outcome(1.0, {"turns": 1.0, "rewritten_history": 1.0})
    assert decode(sample.completion_ids) == "one"


def test_a_reward_that_raises_is_the_failure_of_the_episode() -> None:
    with pytest.raises(EnvironmentFailed) as failed:
        play("faulty", sample_of("faulty"), ["one"])
    assert failed.value.reason == "TaskError" and "ZeroDivisionError: no" in failed.value.detail
