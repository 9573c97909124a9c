"""One episode between the thread of verifiers, which asks, and the policy's event loop, which answers."""

import asyncio
import concurrent.futures
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from verifiers.v1.clients import Client, ModelContext, TrainClientConfig
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import AssistantMessage, Response, Usage
from verifiers.v1.types import ToolCall as WireCall

from tailrace.data.taskset import Opening
from tailrace.environments.base import Completion, EpisodeOver, Message, Outcome, Policy
from tailrace.environments.history import Contexts, TooManyBranches
from tailrace.environments.tools import Parse
from tailrace.errors import BadRow, EnvironmentFailed

T = TypeVar("T")

POLICY = ModelContext(model="policy", client=TrainClientConfig(base_url="http://policy", api_key_var="NONE"))
"""The model of agents that name no other: calls to it reach `PolicyClient`. A client of this kind is asked
for whole replies."""


class PolicyClient(Client):  # type: ignore[misc]
    """The model of verifiers' agents: the policy.

    Args:
        plays: the episodes under way, by the id of their traces.
    """

    def __init__(self, plays: Mapping[str, "Play"]) -> None:
        self._plays = plays

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the policy's next turn."""
        assert session_id is not None
        response = await self._plays[session_id].respond(turn)
        response.raw = serialize_completion(response, POLICY.model)
        return response


class RecordedClient(Client):  # type: ignore[misc]
    """The model of an agent that is not trained. Its replies are recorded like results of tools, so that an
    episode that goes on has the same ones.

    Args:
        client: asks the model.
        plays: as for PolicyClient.
    """

    def __init__(self, client: Any, plays: Mapping[str, "Play"]) -> None:
        self._client, self._plays = client, plays

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the model's reply."""
        assert session_id is not None

        async def ask() -> str:
            reply = await self._client.get_response(dialect, body, sampling, session_id, turn, headers)
            return json.dumps({"response": reply.model_dump(mode="json"), "raw": reply.raw})

        record = json.loads(await self._plays[session_id].call(ask))
        response = Response.model_validate(record["response"])
        response.raw = record["raw"]
        return response

    async def close(self) -> None:
        await self._client.close()


class Play:
    """One episode: between the thread of verifiers, which asks, and that of the policy, which answers.

    Args:
        agent: the one that is trained.
        opening: its first request.
        parse: finds the tool calls in the text of a turn.
        contexts: makes the contexts of turns that begin a branch.
    """

    def __init__(
        self, agent: str, opening: Opening, policy: Policy, parse: Parse, contexts: Contexts
    ) -> None:
        self.agent, self._opening, self._policy, self._parse = agent, opening, policy, parse
        self._contexts = contexts
        self._loop = asyncio.get_running_loop()
        self._requests: asyncio.Queue[tuple[Callable[[], Awaitable[Any]], concurrent.futures.Future[Any]]]
        self._requests = asyncio.Queue()
        self._trace: Any = None
        self._num_turns = self._num_rewritten = 0
        self._problem = ""

    async def serve(self, playing: asyncio.Future[T]) -> T:
        """Do what verifiers asks of the policy until the episode has ended. One thing at a time, so that the
        order is the same when the episode is played again."""
        while True:
            next_request = asyncio.ensure_future(self._requests.get())
            try:
                await asyncio.wait((next_request, playing), return_when=asyncio.FIRST_COMPLETED)
            finally:
                next_request.cancel()
            if not next_request.done() or next_request.cancelled():
                return playing.result()
            action, answer = next_request.result()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(await action())
            except BaseException as why:
                answer.set_exception(why)
                if not isinstance(why, EpisodeOver):
                    raise

    async def call(self, action: Callable[[], Awaitable[str]]) -> str:
        """As Policy.call, from verifiers' thread; the action runs there."""
        there = asyncio.get_running_loop()

        async def go() -> str:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(action), there))

        return await self._ask(lambda: self._policy.call(go))

    async def respond(self, turn: Any) -> Response:
        """Return the next turn of the agent that asks, in verifiers' thread."""
        trace = turn.trace
        if trace.agent.name != self.agent:
            self._problem = f"the agent {trace.agent.name} has no model"
            raise ProviderError(self._problem, status_code=400)
        if self._trace not in (None, trace):
            self._problem = f"the agent {self.agent} runs twice in an episode"
            raise ProviderError(self._problem, status_code=400)
        self._trace = trace
        asked = [message_to_wire(message) for message in turn.prompt]
        tools = [tool_to_wire(tool) for tool in turn.tools or []]
        try:
            if self._num_turns:
                tail, context_ids = self._continue(turn, asked, tools)
                completion = await self._ask(lambda: self._policy.complete(tail, context_ids=context_ids))
            else:
                self._check_opening(Opening(asked, tools))
                completion = await self._ask(self._policy.complete)
        except BadRow as why:
            self._problem = str(why)
            raise ProviderError(self._problem, status_code=400) from why
        except TooManyBranches:
            self._num_rewritten += 1
            return self._end(trace, "rewritten_history")
        except EpisodeOver:
            return self._end(trace, "length")
        self._num_turns += 1
        return self._response(completion, has_tools=bool(turn.tools))

    def outcome(self, episode: Any) -> Outcome:
        """Return reward and metrics of the trained agent.

        Raises:
            EnvironmentFailed: the episode has failed.
        """
        errors = [*episode.errors, *(self._trace.errors if self._trace is not None else [])]
        if self._problem or errors or self._trace is None:
            detail = f"{errors[-1].type}: {errors[-1].message}" if errors else "the agent was not asked"
            raise EnvironmentFailed(errors[-1].type if errors else "agent", self._problem or detail)
        rewards = {name: each.score for name, each in self._trace.rewards.items() if each is not None}
        metrics = {name: value for name, value in self._trace.metrics.items() if value is not None}
        return Outcome(
            self._trace.reward, {**metrics, **rewards, "rewritten_history": float(self._num_rewritten)}
        )

    def _continue(
        self, turn: Any, asked: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[Sequence[Message], Sequence[int] | None]:
        """The messages since the last turn, and the context if the turn begins a branch."""
        last = max(number for number, node in enumerate(turn.trace.nodes) if node.sampled)
        continues = last in turn.prefix_node_ids
        conversation = [self._as_written(message) for message in asked]
        ids = self._contexts.rewritten(
            self._policy.context_ids, conversation, tools or None, continues=continues
        )
        self._num_rewritten += ids is not None
        return asked[turn.prefix_node_ids.index(last) + 1 if continues else 0 :], ids

    def _as_written(self, message: Message) -> Message:
        """The message without tool calls that its text has, too: a template would write them twice."""
        if message.get("tool_calls") and self._parse(str(message.get("content") or "")):
            return {key: value for key, value in message.items() if key != "tool_calls"}
        return message

    def _check_opening(self, asked: Opening) -> None:
        if json.dumps(asked, sort_keys=True) != json.dumps(self._opening, sort_keys=True):
            self._problem = f"the first request of the agent {self.agent} is not the prompt of its task"
            raise ProviderError(self._problem, status_code=400)

    def _end(self, trace: Any, reason: str) -> Response:
        """End the agent's run. verifiers scores what there is."""
        trace.stop(reason)
        raise ProviderError(reason, status_code=400)

    def _response(self, completion: Completion, *, has_tools: bool) -> Response:
        calls = [
            WireCall(
                id=f"call_{self._num_turns}_{number}",
                name=call.name or "unknown",
                arguments=call.problem or json.dumps(call.arguments),
            )
            for number, call in enumerate(self._parse(completion.text) if has_tools else [])
        ]
        finish = "tool_calls" if calls else completion.finish_reason
        return Response(
            id=f"turn-{self._num_turns}",
            created=0,
            model=POLICY.model,
            message=AssistantMessage(content=completion.text or None, tool_calls=calls or None),
            finish_reason=finish,
            usage=Usage(prompt_tokens=0, completion_tokens=completion.num_tokens),
        )

    async def _ask(self, action: Callable[[], Awaitable[T]]) -> T:
        """Have an action done in the policy's thread."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._requests.put_nowait, (action, answer))
        return await asyncio.wrap_future(answer)


async def _awaited(action: Callable[[], Awaitable[T]]) -> T:
    return await action()
