"""Sessions: the conversations of agents, whose requests to an OpenAI server are the turns of an episode.

A request continues the conversation, repeats the last request, or rewrites the history. One that repeats gets
the same reply: clients send a request again when a connection breaks. One that rewrites begins a branch
(turns.py); if the episode may have no other, it is refused, and the session goes on from the history that it
has. The server is that of engine/serve, on loopback, in the controller's process.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field, field_validator

from tailrace.contracts.environments import Completion, EpisodeOver, Message, Policy
from tailrace.drivers.data.encoding import Tokenizer, plain
from tailrace.drivers.environments.history import Contexts, TooManyBranches
from tailrace.drivers.environments.settings import MODEL
from tailrace.drivers.environments.tools import Parse, Schemas
from tailrace.errors import BadRow, EnvironmentFailed
from tailrace.extras.agents.loop_thread import STOP_S
from tailrace.extras.serve.app import RequestRefused, bearer, check_token, model_list, openai_app
from tailrace.extras.serve.formats import (
    ChatCompletionRequest,
    ChatFormat,
    Delta,
    Json,
    read,
    respond,
    token_strings,
)
from tailrace.extras.serve.listening import HttpServer, bind

T = TypeVar("T")

ROUTED = "routed"
"""Stands for a session's name in the path: the name is in the header X-Session-ID, for routers."""
MAX_BODY_BYTES = 32 * 2**20
IDLE_TIMEOUT_S = 600.0
"""Agents think and act between two requests of a connection."""


class SessionRequest(ChatCompletionRequest):
    """Body of /v1/chat/completions of a session.

    Tokens are sampled as the run's settings say: the request's `temperature`, `top_p`, `top_k` and `seed`
    have no effect.
    """

    carried_out: ClassVar[frozenset[str]] = frozenset({"tools"})

    n: int = Field(default=1, ge=1, le=1)
    stop: None = None
    tools: list[Json] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _take_no_stop_strings(cls, value: object) -> object:
        return value or None


def continues(history: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Return whether messages begin with those of the history.

    What agents change when they send a message back does not count: whitespace around the content, ids of
    tool calls in the assistant's messages, and fields that no template reads.
    """
    if len(messages) < len(history):
        return False
    return all(_essence(a) == _essence(b) for a, b in zip(history, messages, strict=False))


def _essence(message: Message) -> tuple[object, ...]:
    message = plain(message)
    functions = [call.get("function") or call for call in message.get("tool_calls", ())]
    called = [(function.get("name"), function["arguments"]) for function in functions]
    return message.get("role"), message["content"].strip(), called, message.get("tool_call_id")


class ChatReply(NamedTuple):
    """A turn of the policy as an agent sees it."""

    id: str
    num_context_tokens: int
    turn: Delta

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield the turn as one delta."""
        yield 0, self.turn

    def message(self) -> Json:
        """Return the assistant's message."""
        return plain({"role": "assistant", "content": self.turn.text, "tool_calls": self.turn.tool_calls})


class Session:
    """The requests of one agent.

    Args:
        name: part of the ids of replies.
        key: the secret that requests must bear.
        contexts: makes the contexts of the turns that do not extend the one before.
        parse: finds tool calls in the text of a turn.
    """

    def __init__(self, name: str, key: str, contexts: Contexts, parse: Parse) -> None:
        self.name, self.key = name, key
        self.num_turns = self.num_rewritten = self.num_refused = 0
        """Turns that were answered; requests that rewrote the history; those of them that were refused."""
        self.is_over = False
        """A request found no room for another turn."""
        self._contexts, self._parse = contexts, parse
        self._asks: asyncio.Queue[tuple[SessionRequest, asyncio.Future[ChatReply]]] = asyncio.Queue()
        self._open: set[asyncio.Future[ChatReply]] = set()
        self._asked: list[Json] = []
        self._tools: list[Json] | None = None
        self._num_calls = 0
        self._last: ChatReply | None = None
        self._is_closed = False

    async def ask(self, body: SessionRequest) -> ChatReply:
        """Wait for the reply to a request. Raises RequestRefused if there is none."""
        if self._is_closed:
            raise _closed()
        reply: asyncio.Future[ChatReply] = asyncio.get_running_loop().create_future()
        self._open.add(reply)
        self._asks.put_nowait((body, reply))
        try:
            return await reply
        finally:
            self._open.discard(reply)

    async def serve(
        self,
        agent: Coroutine[Any, Any, T],
        policy: Policy,
        *,
        idle_timeout_s: float | None = None,
        after_each: Callable[[], None] = lambda: None,
    ) -> asyncio.Future[T]:
        """Run an agent, and let the policy answer its requests until it has ended. Returns the ended agent.
        Raises an EnvironmentFailed if the episode cannot go on.

        Args:
            idle_timeout_s: seconds without a request after which the episode fails; None: no limit.
            after_each: called before a reply is sent.
        """
        playing = asyncio.ensure_future(agent)
        try:
            while True:
                asked = asyncio.ensure_future(self._asks.get())
                both: list[asyncio.Future[Any]] = [asked, playing]
                try:
                    await asyncio.wait(both, timeout=idle_timeout_s, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    asked.cancel()
                if playing.done():
                    return playing
                if not asked.done():
                    raise EnvironmentFailed("agent timeout", f"no request for {idle_timeout_s:g} s")
                await self._answer(*asked.result(), policy)
                after_each()
        finally:
            playing.cancel()
            await asyncio.wait([playing], timeout=STOP_S)

    def close(self) -> None:
        """Refuse the open requests and all later ones."""
        self._is_closed = True
        for reply in self._open:
            if not reply.done():
                reply.set_exception(_closed())

    async def _answer(self, body: SessionRequest, reply: asyncio.Future[ChatReply], policy: Policy) -> None:
        try:
            turn = await self._turn(body, policy)
        except RequestRefused as why:
            if not reply.done():
                reply.set_exception(why)
        else:
            if not reply.done():
                reply.set_result(turn)

    async def _turn(self, body: SessionRequest, policy: Policy) -> ChatReply:
        messages = body.messages
        max_tokens = body.max_completion_tokens or body.max_tokens
        try:
            for message in messages:  # what is malformed is refused before it is a part of the episode
                plain(message)
            if self._last and len(messages) == len(self._asked) and continues(self._asked, messages):
                return self._last
            if self._last is None:
                self._open_episode(body, policy)
                completion = await policy.complete(max_tokens=max_tokens)
            else:
                new, ids = self._continue(self._last, body, policy)
                completion = await policy.complete(new, max_tokens=max_tokens, context_ids=ids)
        except EpisodeOver as why:
            self.is_over = True
            raise RequestRefused("context_length_exceeded", "no room is left for another turn") from why
        except BadRow as why:
            raise RequestRefused("invalid_prompt", str(why)) from why
        self.num_turns += 1
        self._asked, self._tools = messages, body.tools
        turn = self._delta(completion, () if body.tool_choice == "none" else body.tools or ())
        self._last = ChatReply(f"{self.name}-{self.num_turns}", completion.num_context_tokens, turn)
        return self._last

    def _continue(
        self, last: ChatReply, body: SessionRequest, policy: Policy
    ) -> tuple[list[Json], Sequence[int] | None]:
        """The messages since the last turn, and the context if the turn begins a branch."""
        history = [*self._asked, last.message()]
        is_longer = body.tools == self._tools and continues(history, body.messages)
        try:
            ids = self._contexts.rewritten(policy.context_ids, body.messages, body.tools, continues=is_longer)
        except TooManyBranches as why:
            self.num_rewritten += 1
            self.num_refused += 1
            problem = (
                "the history is rewritten more often than environment.max_branches allows: continue with the "
                "messages of the last request, its reply, and the same tools"
            )
            raise RequestRefused("rewritten_history", problem) from why
        self.num_rewritten += ids is not None
        return body.messages[len(history) if is_longer else 0 :], ids

    def _open_episode(self, body: SessionRequest, policy: Policy) -> None:
        ids = self._contexts.first(body.messages, body.tools)
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

    def _delta(self, completion: Completion, tools: Schemas) -> Delta:
        """The turn as text and tool calls. A turn with a malformed call is text: the agent decides about
        it."""
        ids, logprobs = list(completion.token_ids), list(completion.logprobs)
        text = self._contexts.opened + completion.text
        calls = self._parse(text, tools) if tools else []
        if not calls or any(call.problem for call in calls):
            return Delta(ids, logprobs, completion.text, completion.finish_reason)
        called = []
        for call in calls:
            # Numbered, so that an agent that begins again sees the same ids. Mistral's templates demand nine
            # letters and digits.
            id, self._num_calls = f"call{self._num_calls:05}", self._num_calls + 1
            function = {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}
            called.append({"id": id, "type": "function", "function": function})
        finish = "tool_calls" if completion.finish_reason == "stop" else completion.finish_reason
        content = text[len(self._contexts.opened) : calls[0].begin].strip() or None
        return Delta(ids, logprobs, content, finish, tool_calls=called)


def _closed() -> RequestRefused:
    return RequestRefused("session_closed", "the episode of this session is over or was interrupted")


def new_key() -> str:
    """Return a secret for the requests of a session."""
    return secrets.token_urlsafe(24)


class SessionServer:
    """Serves /sessions/<name>/v1/chat/completions and /sessions/<name>/v1/models. `tokenizer`: for log-probs
    in replies."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._sessions: dict[str, Session] = {}
        self._names = map(str, itertools.count(1))
        self._strings = token_strings(tokenizer.backend_tokenizer)
        self._bound = bind("127.0.0.1", 0, "environment.kind")
        app = openai_app([self._router()], max_body_bytes=MAX_BODY_BYTES)
        self._server = HttpServer(app, self._bound, idle_timeout_s=IDLE_TIMEOUT_S)
        self._serving: asyncio.Task[None] | None = None
        self.routed_url = f"{self._server.url}/sessions/{ROUTED}/v1"
        """The base URL of clients that name the session in a header."""

    @contextmanager
    def session(self, contexts: Contexts, parse: Parse, key: str = "") -> Iterator[Session]:
        """Open a session and close it with the block. Requests must bear the key; without it a new one."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._server.serve())
        session = Session(next(self._names), key or new_key(), contexts, parse)
        self.route(session.name, session)
        try:
            yield session
        finally:
            for name in [name for name, each in self._sessions.items() if each is session]:
                del self._sessions[name]
            session.close()

    def route(self, name: str, session: Session) -> None:
        """Let requests reach a session by a name."""
        self._sessions[name] = session

    def url(self, session: Session) -> str:
        """Base URL for an OpenAI client."""
        return f"{self._server.url}/sessions/{session.name}/v1"

    async def close(self) -> None:
        """Stop listening."""
        self._server.stop()
        if self._serving:
            with suppress(asyncio.CancelledError):
                await self._serving
        self._bound.close()

    def _router(self) -> APIRouter:
        async def find(name: str, request: Request) -> Session:
            """The session whose key the request bears."""
            name = request.headers.get("x-session-id", "") if name == ROUTED else name
            session = self._sessions.get(name)
            check_token(bearer(request), session.key if session else new_key())
            assert session is not None
            return session

        router = APIRouter(prefix="/sessions/{name}/v1")

        @router.post("/chat/completions")
        async def chat(session: Annotated[Session, Depends(find)], request: Request) -> Response:
            body = await read(SessionRequest, request)
            reply = await session.ask(body)
            num_context = reply.num_context_tokens
            format = ChatFormat(body, f"chatcmpl-{reply.id}", MODEL, self._strings, (), num_context)
            return await respond(format, reply.deltas(), request)

        @router.get("/models", dependencies=[Depends(find)])
        async def models() -> Json:
            return model_list(MODEL)

        return router
