"""Tasksets of verifiers: each episode is played by the environment of the taskset.

verifiers runs in a thread with an event loop of its own, because tasks and rewards may compute for long. It
asks the policy as it asks vLLM elsewhere: its own client sends requests to the session of the episode
(session.py), which it names in the header X-Session-ID.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import verifiers.v1 as vf
from typing_extensions import override
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from tailrace.contracts.environments import Environment, Message, Outcome, Policy
from tailrace.drivers.environments.history import RequestEncoder
from tailrace.drivers.environments.settings import MODEL
from tailrace.drivers.environments.tools import PARSERS
from tailrace.errors import EnvironmentFailed
from tailrace.extras.agents.loop_thread import LoopThread
from tailrace.extras.agents.session import Session, SessionServer, new_key
from tailrace.extras.verifiers.taskset import Taskset, TasksetSettings, VerifiersSettings
from tailrace.types import Prompt

__all__ = ["ChatLoop", "VerifiersEnvironment", "open_verifiers"]

HARNESS = "tailrace"
"""Id under which verifiers finds `ChatLoop`."""
sys.modules.setdefault(f"verifiers.v1.harnesses.{HARNESS}", sys.modules[__name__])


@asynccontextmanager
async def open_verifiers(
    settings: VerifiersSettings, encoder: RequestEncoder, server: SessionServer, thread: LoopThread
) -> AsyncIterator["VerifiersEnvironment"]:
    """Open the environment of a taskset for the length of the block. Raises a ConfigError as Taskset."""
    names = TasksetSettings(
        taskset=settings.taskset, args=settings.args, verifiers=settings.verifiers, agent=settings.agent
    )
    taskset = Taskset(names, harness=HARNESS)
    # verifiers reads the key of an endpoint from an environment variable. Programs that it starts do not get
    # those with API_KEY in their names.
    variable = f"TAILRACE_API_KEY_{os.urandom(4).hex()}"
    os.environ[variable] = new_key()
    try:
        async with thread.entered(taskset.env.serving()):
            yield VerifiersEnvironment(taskset, settings, encoder, server, thread, variable)
    finally:
        del os.environ[variable]


class VerifiersEnvironment(Environment):
    """Plays the episodes of a taskset. Its sessions have one key, which an environment variable holds."""

    def __init__(
        self,
        taskset: Taskset,
        settings: VerifiersSettings,
        encoder: RequestEncoder,
        server: SessionServer,
        thread: LoopThread,
        key_variable: str,
    ) -> None:
        self._taskset, self._settings, self._encoder = taskset, settings, encoder
        self._server, self._thread, self._key = server, thread, os.environ[key_variable]
        endpoint = EvalClientConfig(base_url=server.routed_url, api_key_var=key_variable)
        self._model = ModelContext(model=MODEL, client=endpoint)

    @override
    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        settings, traces = self._settings, list[Any]()
        here = asyncio.get_running_loop()
        contexts = self._encoder.contexts(prompt, settings.history, settings.max_branches)
        with self._server.session(contexts, PARSERS[settings.parser], self._key) as session:

            def route(trace: Any) -> None:
                """Let the requests of a run of the trained agent reach the session."""
                if trace.agent.name == self._taskset.agent:
                    traces.append(trace)
                    if len(traces) == 1:
                        here.call_soon_threadsafe(self._server.route, trace.id, session)

            def end() -> None:
                """End the agent's run after a request that was refused; verifiers scores what there is."""
                if session.is_over or session.num_refused:
                    traces[0].stop("length" if session.is_over else "rewritten_history")

            task = self._taskset.task(prompt.row["task"])
            played = self._taskset.env.run_episode(task, self._model, on_trace=route)
            ended = await session.serve(self._thread.run(played), policy, after_each=end)
        return _outcome(ended.result(), traces, session)


def _outcome(episode: Any, traces: Sequence[Any], session: Session) -> Outcome:
    """Reward and metrics of the trained agent. Raises EnvironmentFailed if the episode has failed."""
    if len(traces) > 1:
        raise EnvironmentFailed("agent", f"the agent {traces[0].agent.name} runs twice in an episode")
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors:
        raise EnvironmentFailed(errors[-1].type, f"{errors[-1].type}: {errors[-1].message}")
    if not session.num_turns:
        raise EnvironmentFailed("no request", "the environment ended and had not asked the trained agent")
    (trace,) = traces
    rewards = {name: each.score for name, each in trace.rewards.items() if each is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Outcome(trace.reward, {**metrics, **rewards, "rewritten_history": float(session.num_rewritten)})


class ChatLoop(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """The chat loop of verifiers' harness "null", in this process. The original starts a Python process for
    each rollout."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    @override
    async def launch(
        self,
        ctx: ModelContext,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        messages = _opening(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, clients = await connect_mcp({"mcpServers": servers}, stack)
            headers = {"Authorization": f"Bearer {secret}"}
            http = httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None, trust_env=False)
            await stack.enter_async_context(http)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                reply = await http.post("/chat/completions", json=body)
                if reply.status_code >= 400:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    content = await _content(call["function"], dispatch, clients)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _content(function: Message, dispatch: Any, clients: Any) -> object:
    """The answer to a tool call."""
    name, arguments = str(function["name"]), str(function["arguments"] or "{}")
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    try:
        return await call_mcp(clients, dispatch, name, json.loads(arguments))
    except Exception as why:
        return f"error: {why}"


def _opening(data: Any) -> list[Message]:
    """The first messages to an agent in OpenAI's format."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(each) for each in data.prompt or [])]
