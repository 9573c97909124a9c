"""Agents that know OpenAI's API only, through real sockets; the policy's turns are scripted."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import agents_of_tests
import openai
import pytest
from agent_cases import CALL, END, QUESTION, TOKENIZER, Script, encode, episode, new_sample, opened, render
from agents_of_tests import TOOL

from helpers.scripted import ScriptedPolicy
from tailrace import clock
from tailrace.contracts.environments import Completion, EpisodeOver, Message, Outcome
from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.environments.history import RequestEncoder
from tailrace.drivers.environments.open import environment_kind
from tailrace.drivers.environments.settings import ParserName
from tailrace.drivers.environments.tools import PARSERS
from tailrace.errors import ConfigError, EnvironmentFailed
from tailrace.extras.agents.session import Session, SessionRequest
from tailrace.extras.agents.settings import AgentSettings
from tailrace.types import Prompt, Sample, Turn

USER = {"role": "user", "content": QUESTION}
AFTER_TOOL = "\n<|im_start|>user\n<tool_response>\n408\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
Client = openai.AsyncOpenAI
Steps = Callable[[Client], Awaitable[Any]]


def play(sample: Sample, script: Script, *, max_context_tokens: int = 512, **settings: Any) -> Outcome:
    """Play one episode to its end."""

    async def run() -> Outcome:
        async with opened(**settings) as environment:
            played = episode(sample, script, max_context_tokens=max_context_tokens)
            return await environment.run(sample.prompt, played)

    return clock.run(asyncio.wait_for(run(), 60), virtual=False)


def steps(monkeypatch: pytest.MonkeyPatch, take: Steps) -> str:
    """The name of an agent that takes these steps with the official client."""

    async def agent(base_url: str, api_key: str) -> Any:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            return await take(client)

    monkeypatch.setattr(agents_of_tests, "agent", agent, raising=False)
    return "agents_of_tests:agent"


async def ask(client: Client, *messages: Any, **options: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **options)


def test_a_loop_with_tools_is_one_token_exact_episode() -> None:
    sample, script = new_sample(render([USER])[:1]), Script(CALL, "408")
    outcome = play(sample, script, function="agents_of_tests:calculating")
    assert outcome == Outcome(1.0, {"rewritten_history": 0})
    first, second = [*encode(CALL), *END], [*encode("408"), *END]
    assert sample.completion_ids == first + second
    assert [span.num_tokens for span in sample.spans] == [len(first), len(second)]
    assert [*sample.prompt.ids, *sample.response_ids] == [
        *render([USER], [TOOL]),
        *first,
        *encode(AFTER_TOOL),
        *second,
    ]
    assert sample.opening_ids == render([USER], [TOOL])[1:]


@pytest.mark.parametrize(
    ("parser", "turn", "content", "num_calls"),
    [
        ("hermes", f"<think>{CALL}</think>408", f"<think>{CALL}</think>408", 0),
        ("hermes", f"<think>{CALL}</think> So {CALL}", f"<think>{CALL}</think> So", 1),
        ("qwen3_coder", "So <tool_call>\n<function=f>\n</function>\n</tool_call>", "So", 1),
        ("mistral", "So [TOOL_CALLS]f{}[TOOL_CALLS]f{}", "So", 2),
    ],
)
async def test_a_call_in_thinking_is_text_and_what_follows_is_read(
    parser: ParserName, turn: str, content: str, num_calls: int
) -> None:
    class Policy(ScriptedPolicy):
        def open(self, ids: Sequence[int]) -> None:
            assert list(ids) == render([USER], [TOOL])

        async def complete(self, messages: Sequence[Message] = (), **options: object) -> Completion:
            return await super().complete(messages)

    encoder = RequestEncoder(RowsSettings(path=Path("unused.jsonl")), TOKENIZER, 512)
    session = Session("1", "key", encoder.contexts(Prompt(0, [1]), "keep", 1), PARSERS[parser])
    body = SessionRequest(model="policy", messages=[USER], tools=[TOOL])
    message = (await session.serve(session.ask(body), Policy(turn))).result().message()
    assert message["content"] == content
    assert len(message.get("tool_calls", ())) == num_calls


def test_with_the_prompt_of_the_data_nothing_stands_before_the_first_turn() -> None:
    sample = new_sample(render([USER], [TOOL]))
    play(sample, Script(CALL, "408"), function="agents_of_tests:calculating", prompt="data")
    assert [turn.num_tokens > 0 for turn in sample.turns] == [True, True] and sample.opening_ids == []


def test_another_first_request_than_the_prompt_of_the_data_fails_the_sample() -> None:
    sample = new_sample(render([USER]))
    with pytest.raises(EnvironmentFailed, match=r'other prompt: .* environment.prompt = "agent"'):
        play(sample, Script(CALL), function="agents_of_tests:calculating", prompt="data")
    assert sample.num_tokens == 0


def test_an_agent_that_was_stopped_begins_again_and_gets_the_recorded_turns() -> None:
    sample, script = new_sample(render([USER])[:1]), Script(CALL, "408")
    agents_of_tests.calls.clear()

    async def run() -> Outcome:
        async with opened(function="agents_of_tests:calculating") as environment:
            reached, serve = asyncio.Event(), script.serve

            async def serve_and_stop(sample: Sample) -> None:
                if sample.num_tokens:
                    sample.extend(encode("40"), [-0.5, -0.5], version=7)
                    reached.set()
                    await asyncio.Event().wait()
                await serve(sample)

            script.serve = serve_and_stop  # type: ignore[method-assign]
            running = asyncio.ensure_future(environment.run(sample.prompt, episode(sample, script)))
            await reached.wait()
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()

            async def serve_the_rest(sample: Sample) -> None:
                sample.extend([*encode("8"), *END], [-0.5, -0.5], version=8)
                sample.finish_reason = "stop"

            script.serve = serve_the_rest  # type: ignore[method-assign]
            return await environment.run(sample.prompt, episode(sample, script))

    assert asyncio.run(asyncio.wait_for(run(), 60)).reward == 1.0
    assert script.served == [0]
    assert sample.completion_ids == [*encode(CALL), *END, *encode("408"), *END]
    assert agents_of_tests.calls == ["12 * 34", "12 * 34"]  # its tools are its own


def test_an_agent_that_does_not_repeat_itself_fails_the_sample() -> None:
    sample, script = new_sample(render([USER])[:1]), Script(CALL, "408")
    play(sample, script, function="agents_of_tests:calculating")
    del sample.turns[-1]
    sample.turns[-1].observation_ids = encode(AFTER_TOOL.replace("408", "409"))
    with pytest.raises(EnvironmentFailed, match="not repeatable"):
        play(sample, script, function="agents_of_tests:calculating")
    sample.turns[0] = Turn(0, "stop", observation_ids=encode("user\n"))
    with pytest.raises(EnvironmentFailed, match="not repeatable"):
        play(sample, script, function="agents_of_tests:calculating")


def test_a_request_that_is_sent_again_gets_the_same_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(client: Client) -> None:
        replies = [await ask(client, USER, max_tokens=9), await ask(client, USER, max_tokens=9)]
        assert replies[0].id == replies[1].id
        assert replies[0].choices == replies[1].choices

    script = Script("408")
    play(new_sample(render([USER])[:1]), script, function=steps(monkeypatch, take))
    assert script.served == [0] and script.limits == [9]


def test_what_clients_change_in_a_message_that_they_send_back_rewrites_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def take(client: Client) -> None:
        await ask(client, USER, tools=[TOOL])
        function = {"name": "calculator", "arguments": '{ "expression":"12 * 34" }'}
        call = {"id": "their-own", "type": "function", "function": function}
        parts = [{"type": "text", "text": f" {QUESTION} "}]
        said = {"role": "assistant", "content": "", "tool_calls": [call], "refusal": None, "audio": None}
        answer = {"role": "tool", "tool_call_id": "their-own", "content": "408"}
        await ask(client, {"role": "user", "content": parts}, said, answer, tools=[TOOL])

    sample, script = new_sample(render([USER])[:1]), Script(CALL, "408")
    outcome = play(sample, script, function=steps(monkeypatch, take))
    assert outcome.metrics == {"rewritten_history": 0} and script.served == [0, 1]


def test_parts_are_lines_of_a_message_and_what_is_no_text_is_refused_before_it_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [{"type": "text", "text": "user"}, {"type": "text", "text": "model"}]

    async def take(client: Client) -> None:
        for content in ([{"type": "image_url"}], None):
            with pytest.raises(openai.BadRequestError) as error:
                await ask(client, {"role": "user", "content": content})
            assert error.value.code == "invalid_prompt"
        await ask(client, {"role": "user", "content": parts})

    asked = render([{"role": "user", "content": "user\nmodel"}])
    sample = new_sample(asked[:1])
    play(sample, Script("408"), function=steps(monkeypatch, take))
    assert sample.opening_ids == asked[1:]


def test_without_room_for_a_branch_a_rewriting_request_is_refused_and_the_main_line_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def take(client: Client) -> float:
        await ask(client, USER)
        said, more = {"role": "assistant", "content": "408"}, {"role": "user", "content": "2 * 3"}
        for rewritten in (
            [more],
            [USER, {"role": "assistant", "content": "409"}, more],
            [{"role": "system", "content": "user\n"}, USER, said, more],
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await ask(client, *rewritten)
            assert error.value.code == "rewritten_history"
        with pytest.raises(openai.BadRequestError):
            await ask(client, USER, said, more, tools=[TOOL])
        assert (await ask(client, USER, said, more)).choices[0].message.content == "6"
        return 0.5

    sample, script = new_sample(render([USER])[:1]), Script("408", "6")
    outcome = play(sample, script, function=steps(monkeypatch, take), max_branches=1)
    assert outcome == Outcome(0.5, {"rewritten_history": 4})
    assert script.served == [0, 1]


def test_an_agent_that_ends_because_its_history_was_refused_fails_the_sample_with_this_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def take(client: Client) -> None:
        await ask(client, USER)
        await ask(client, {"role": "user", "content": "2 * 3"})

    with pytest.raises(EnvironmentFailed, match=r"^rewritten history: BadRequestError"):
        sample = new_sample(render([USER])[:1])
        play(sample, Script("408", "6"), function=steps(monkeypatch, take), max_branches=1)


def test_a_stream_has_the_turn_its_tool_calls_and_its_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(client: Client) -> None:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await ask(client, USER, tools=[TOOL], **options)]
        (call,) = chunks[0].choices[0].delta.tool_calls
        assert (call.index, call.id) == (0, "call00000")
        assert call.function.name == "calculator" and call.function.arguments == '{"expression":"12 * 34"}'
        assert chunks[0].choices[0].finish_reason == "tool_calls"
        num_context, num_tokens = len(render([USER], [TOOL])), len(encode(CALL)) + 1
        assert chunks[-1].usage.prompt_tokens == num_context
        assert chunks[-1].usage.total_tokens == num_context + num_tokens

    play(new_sample(render([USER])[:1]), Script(CALL), function=steps(monkeypatch, take))


def test_log_probs_come_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(client: Client) -> None:
        choice = (await ask(client, USER, logprobs=True)).choices[0]
        tokens = [(entry.token, entry.logprob) for entry in choice.logprobs.content]
        assert tokens == [("4", -0.25), ("0", -0.5), ("8", -0.75), ("<|im_end|>", -1.0)]
        assert (choice.message.content, choice.finish_reason) == ("408", "stop")

    play(new_sample(render([USER])[:1]), Script("408"), function=steps(monkeypatch, take))


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"stop": ["a"]},
        {"tool_choice": "required", "tools": [TOOL]},
        {"logprobs": True, "top_logprobs": 3},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_what_the_endpoint_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    async def take(client: Client) -> None:
        with pytest.raises(openai.BadRequestError):
            await ask(client, USER, **options)
        await ask(client, USER)

    script = Script("408")
    play(new_sample(render([USER])[:1]), script, function=steps(monkeypatch, take))
    assert script.served == [0]


@pytest.mark.parametrize("wrong", ["key", "session", "path"])
def test_a_request_without_the_secret_of_its_session_is_refused(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    async def take(client: Client) -> None:
        url, key = str(client.base_url), client.api_key
        if wrong == "key":
            key = "another"
        elif wrong == "session":
            url = url.replace("/sessions/1/", "/sessions/2/")
        else:
            url = url.replace("/sessions/1/", "/")
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as other:
            error = openai.NotFoundError if wrong == "path" else openai.AuthenticationError
            with pytest.raises(error):
                await ask(other, USER)
        await ask(client, USER)
        assert [model.id async for model in client.models.list()] == ["policy"]

    play(new_sample(render([USER])[:1]), Script("408"), function=steps(monkeypatch, take))


def test_an_episode_without_room_for_another_turn_is_over_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def take(client: Client) -> None:
        said = await ask(client, USER)
        more = {"role": "user", "content": "2 * 3"}
        try:
            await ask(client, USER, said.choices[0].message, more)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            raise

    sample = new_sample(render([USER])[:1])
    room = len(render([USER])) + len(encode("408")) + 2
    with pytest.raises(EpisodeOver):
        play(sample, Script("408"), max_context_tokens=room, function=steps(monkeypatch, take))
    assert sample.finish_reason == "length" and len(sample.turns) == 2


def test_a_first_request_that_does_not_fit_fails_the_sample() -> None:
    with pytest.raises(EnvironmentFailed, match="prompt too long: the first request has"):
        play(
            new_sample(render([USER])[:1]),
            Script("408"),
            max_context_tokens=10,
            function="agents_of_tests:calculating",
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("silent", "no request: the agent ended"),
        ("hanging", "agent timeout: no request for 0.05 s"),
        ("boastful", "reward: the agent returned 'very good'"),
        ("clumsy", "agent: LookupError: no such page"),
        ("leaving", "agent: SystemExit: 3"),
    ],
)
def test_an_agent_that_fails_is_a_failed_sample_with_the_reason(name: str, reason: str) -> None:
    limit_s = 0.05 if name == "hanging" else 30.0
    with pytest.raises(EnvironmentFailed, match=reason):
        play(
            new_sample(render([USER])[:1]),
            Script("408"),
            function=f"agents_of_tests:{name}",
            idle_timeout_s=limit_s,
        )


def test_a_function_that_is_not_async_may_leave_the_reward_to_reward_functions() -> None:
    sample = new_sample(render([USER])[:1])
    assert play(sample, Script("408"), function="agents_of_tests:blocking").reward is None
    assert sample.num_tokens == 4


PROGRAM = """
import json, os, sys, openai
row = json.load(sys.stdin)
client = openai.OpenAI()
messages = [{"role": "user", "content": row["question"]}]
reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
right = reply.choices[0].message.content == row["answer"]
print("done", json.dumps({"reward": 7}))
print(json.dumps({"reward": float(right)}))
sys.exit(row.get("exit"))
"""


def test_a_program_finds_the_policy_in_its_environment_and_prints_its_reward() -> None:
    sample = new_sample(render([USER])[:1])
    outcome = play(sample, Script("408"), command=(sys.executable, "-c", PROGRAM))
    assert outcome.reward == 1.0 and sample.num_tokens == 4


def test_a_program_that_exits_with_an_error_fails_the_sample_with_its_output() -> None:
    with pytest.raises(EnvironmentFailed, match=r"^agent: ProgramFailed: exit code 3\nno network"):
        command = (sys.executable, "-c", "print('no network'); raise SystemExit(3)")
        play(new_sample(render([USER])[:1]), Script("408"), command=command)


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def leaving(folder: Path) -> str:
    """A shell program that leaves processes of its group, with a session, and without a parent. Each
    names the folder in its command line."""
    idle = f"sh -c 'sleep 600; : {folder}' >/dev/null 2>&1 &"
    return f'{idle} setsid {idle} sh -c "setsid {idle}"; '


def running_in(folder: Path) -> list[str]:
    """The processes whose command lines name a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
    return found


def test_what_a_program_has_started_ends_when_its_episode_is_interrupted(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    async def run() -> None:
        async with opened(command=("sh", "-c", f"{leaving(tmp_path)} touch {begun}; wait")) as environment:
            sample = new_sample(render([USER])[:1])
            running = asyncio.ensure_future(environment.run(sample.prompt, episode(sample, Script())))
            await until(begun.exists)
            assert len(running_in(tmp_path)) >= 5
            running.cancel()
            await asyncio.wait([running])
            assert running_in(tmp_path) == []

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_a_program_has_started_ends_with_it(tmp_path: Path) -> None:
    command = ("sh", "-c", f"{leaving(tmp_path)} kill -KILL $$")
    with pytest.raises(EnvironmentFailed, match="signal SIGKILL"):
        play(new_sample(render([USER])[:1]), Script(), command=command)
    assert running_in(tmp_path) == []


CONTROLLER = """
import asyncio, sys
from tailrace.extras.agents.agents import AgentTask, make_agent
from tailrace.extras.agents.loop_thread import LoopThread
from tailrace.extras.agents.settings import AgentSettings
settings = AgentSettings(kind="agent", command=("sh", "-c", sys.argv[1]))
asyncio.run(make_agent(settings, LoopThread("agents"))(AgentTask({}, [], "", "")))
"""


def test_what_a_program_has_started_ends_when_the_controller_is_killed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command = f"{leaving(tmp_path)} touch {begun}; wait"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, command], env=environment)

    async def run() -> None:
        await until(begun.exists)
        controller.kill()
        controller.wait()
        await until(lambda: not running_in(tmp_path))

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "agents_of_tests:greedy"}, "it does not take base_url"),
        ({"function": "agents_of_tests:wishful"}, "its parameter 'browser' is given by nothing"),
        ({"command": ("no-such-program",)}, "there is no program 'no-such-program'"),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused_before_the_run(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        agent = AgentSettings(kind="agent", **settings)
        environment_kind(agent).check(agent)


@pytest.mark.parametrize("settings", [{}, {"function": "a:b", "command": ["c"]}])
def test_an_agent_is_a_function_or_a_command(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either `function` or `command`"):
        AgentSettings(kind="agent", **settings)
