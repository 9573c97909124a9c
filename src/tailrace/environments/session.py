"""A session: the conversation of one agent, whose requests are the turns of one episode.

A request continues the conversation, repeats the last request, or rewrites the history. One that repeats gets
the same reply: clients send a request again when a connection breaks. One that rewrites is refused, because
the tokens of an episode are one sequence; the session goes on from the history that it has.
"""

import asyncio
from dataclasses import dataclass

from tailrace.environments.agent_prompts import Encode
from tailrace.environments.base import Completion, EpisodeOver, Policy
from tailrace.environments.chat_replies import Reply, assistant_message
from tailrace.environments.chat_requests import Plain, SessionRequest, continues, plain
from tailrace.environments.tool_calls import Parse
from tailrace.errors import BadRow, EnvironmentFailed


class Refused(Exception):
    """A request gets an error for a reply.

    Args:
        code: OpenAI's name of the error, or ours.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class _Ask:
    body: SessionRequest
    turn: asyncio.Future[Reply]


class Session:
    """The requests of one agent.

    Args:
        name: part of the ids of replies.
        key: the secret that requests must bear.
        encode: makes the context of the first turn.
        parse: finds tool calls in the text of a turn.
    """

    def __init__(self, name: str, key: str, encode: Encode, parse: Parse) -> None:
        self.name, self.key = name, key
        self.num_turns = self.num_rewritten = 0
        """Turns that were answered, and requests that were refused because they rewrite the history."""
        self.is_over = False
        """A request found no room for another turn."""
        self._encode, self._parse = encode, parse
        self._asks: asyncio.Queue[_Ask] = asyncio.Queue()
        self._open: set[_Ask] = set()
        self._asked: list[Plain] = []
        self._tools: list[Plain] | None = None
        self._num_calls = 0
        self._last: Reply | None = None
        self._is_closed = False

    async def ask(self, body: SessionRequest) -> Reply:
        """Wait for the reply to a request.

        Raises:
            Refused: there is none.
        """
        ask = _Ask(body, asyncio.get_running_loop().create_future())
        if self._is_closed:
            raise _closed()
        self._open.add(ask)
        self._asks.put_nowait(ask)
        try:
            return await ask.turn
        finally:
            self._open.discard(ask)

    async def waiting(self) -> _Ask:
        """Wait for the next request."""
        return await self._asks.get()

    async def answer(self, ask: _Ask, policy: Policy) -> None:
        """Let the policy answer a request.

        Raises:
            EnvironmentFailed: the episode cannot go on.
        """
        try:
            turn = await self._turn(ask.body, policy)
        except Refused as why:
            if not ask.turn.done():
                ask.turn.set_exception(why)
        else:
            if not ask.turn.done():
                ask.turn.set_result(turn)

    def close(self) -> None:
        """Refuse the open requests and all later ones."""
        self._is_closed = True
        for ask in self._open:
            if not ask.turn.done():
                ask.turn.set_exception(_closed())

    async def _turn(self, body: SessionRequest, policy: Policy) -> Reply:
        messages = body.messages
        if self._last and len(messages) == len(self._asked) and continues(self._asked, messages):
            return self._last
        new = self._new_messages(body)
        try:
            if self._last is None:
                self._open_episode(body, policy)
            completion = await policy.complete(new, max_tokens=body.max_completion_tokens or body.max_tokens)
        except EpisodeOver as why:
            self.is_over = True
            raise Refused("context_length_exceeded", "no room is left for another turn") from why
        return self._add(body, completion)

    def _new_messages(self, body: SessionRequest) -> list[Plain]:
        """The messages since the last turn."""
        if self._last is None:
            return []
        history = [*self._asked, plain(self._last.message)]
        if body.tools != self._tools or not continues(history, body.messages):
            self.num_rewritten += 1
            problem = "a request must have the messages of the last one, its reply, and the same tools"
            raise Refused("rewritten_history", problem)
        return body.messages[len(history) :]

    def _open_episode(self, body: SessionRequest, policy: Policy) -> None:
        try:
            ids = self._encode(body.messages, body.tools)
        except BadRow as why:
            raise Refused("invalid_prompt", str(why)) from why
        try:
            policy.open(ids)
        except ValueError as why:
            detail = (
                'the first request is not the prompt of the data; write environment.prompt = "agent", or '
                "give the data the agent's system prompt and tools"
            )
            raise EnvironmentFailed("other prompt", detail) from why
        except EpisodeOver as why:
            detail = f"the first request has {len(ids)} tokens"
            raise EnvironmentFailed("prompt too long", detail) from why

    def _add(self, body: SessionRequest, completion: Completion) -> Reply:
        parse = self._parse if body.tools and body.tool_choice != "none" else None
        message = assistant_message(completion, parse, self._num_calls)
        self._num_calls += len(message.get("tool_calls", ()))
        self.num_turns += 1
        self._asked, self._tools = body.messages, body.tools
        self._last = Reply(f"{self.name}-{self.num_turns}", completion, message)
        return self._last


def _closed() -> Refused:
    return Refused("session_closed", "the episode of this session is over or was interrupted")
