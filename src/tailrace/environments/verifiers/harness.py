"""A harness of verifiers that plays an agent in this process.

The harnesses of verifiers start a Python process for each rollout. This one runs the same chat loop as a
coroutine, and calls the tools of toolsets directly. Model calls go through the interception server of
verifiers as ever, so limits, stops and hooks work.
"""

import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp, mcp_content_to_chat_content

from tailrace.data.taskset import full_name, is_local, mcp_server, opening_messages, schemas_of

ID = "tailrace"
"""Under this id verifiers finds the harness."""

Call = Callable[[Callable[[], Awaitable[str]]], Awaitable[str]]
"""Awaits an action and records what it returns, as Policy.call."""

_trace: ContextVar[Any] = ContextVar("trace")
"""The trace whose tool is called: one shared toolset serves many at a time."""


class LocalTools:
    """Tools of toolsets in this process. What they write to `self.state` is the state of the trace.

    Args:
        toolsets: the toolsets. Those that are served elsewhere are left out.
    """

    def __init__(self, toolsets: Sequence[Any]) -> None:
        self._toolsets = [toolset for toolset in toolsets if is_local(toolset)]
        self.schemas: list[Mapping[str, object]] = []
        self._found: dict[str, tuple[Any, str]] = {}
        self._stack = AsyncExitStack()

    async def start(self, data: object = None) -> None:
        """Set the toolsets up.

        Args:
            data: of the task, for toolsets of one task.
        """
        for toolset in self._toolsets:
            toolset._pull_state, toolset._push_state = _pull_state, _push_state
            await self._stack.enter_async_context(toolset._exit_stack)
            await toolset.setup()
            if data is not None:
                await toolset.setup_task(data)
            server = mcp_server(toolset)
            for tool in await server.list_tools():
                self._found[full_name(toolset, tool.name)] = (server, tool.name)
            self.schemas += await schemas_of(toolset, server)

    async def stop(self) -> None:
        await self._stack.aclose()

    def __contains__(self, name: str) -> bool:
        return name in self._found

    async def call(self, trace: Any, name: str, arguments: dict[str, Any]) -> object:
        """Return what a tool returns, as the content of a message."""
        server, tool = self._found[name]
        token = _trace.set(trace)
        try:
            result = await server.call_tool(tool, arguments)
        finally:
            _trace.reset(token)
        return mcp_content_to_chat_content(result.content)


class Run:
    """What the harness needs for one run of an agent.

    Args:
        tools: its tools in this process.
        call: records what a tool returns. None: the agent is not trained, so nothing is recorded here.
    """

    def __init__(self, tools: Sequence[LocalTools], call: Call | None, http: httpx.AsyncClient) -> None:
        self._tools, self._call, self._http = tools, call, http

    @property
    def schemas(self) -> list[Mapping[str, object]]:
        return [schema for tools in self._tools for schema in tools.schemas]

    async def complete(self, url: str, secret: str, body: Mapping[str, object]) -> httpx.Response:
        """Ask the interception server for the model's next turn."""
        headers = {"Authorization": f"Bearer {secret}"}
        return await self._http.post(url, json=body, headers=headers)

    async def use(self, trace: Any, name: str, arguments: str, served: Callable[..., Any]) -> object:
        """Return the answer to a tool call. A call that has answered is not made again when an episode goes
        on: its content and the state after it are recorded.

        Args:
            served: calls a tool of a server, by name and arguments.
        """
        if self._call is None:
            return await self._answer(trace, name, arguments, served)

        async def action() -> str:
            content = await self._answer(trace, name, arguments, served)
            return json.dumps({"content": content, "state": trace.state.model_dump(mode="json")})

        record = json.loads(await self._call(action))
        trace.state = type(trace.state).model_validate(record["state"])
        content: object = record["content"]
        return content

    async def _answer(self, trace: Any, name: str, arguments: str, served: Callable[..., Any]) -> object:
        try:
            given = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            return f"error: the call is malformed: {arguments}"
        local = next((tools for tools in self._tools if name in tools), None)
        try:
            return await (local.call(trace, name, given) if local else served(name, given))
        except Exception as why:
            return f"error: {why}"


RUNS: dict[str, Run] = {}
"""Runs under way, by the id of the trace: verifiers makes a harness from its config alone."""


class TailraceHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """The chat loop of the harness "null", in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

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
        """Play the agent until it answers without a tool call."""
        run = RUNS[trace.id]
        messages = opening_messages(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            schemas, dispatch, clients = await connect_mcp({"mcpServers": servers}, stack)

            async def served(name: str, arguments: dict[str, Any]) -> object:
                if name not in dispatch:
                    return f"error: unknown tool {name!r}"
                return await call_mcp(clients, dispatch, name, arguments)

            tools = [*run.schemas, *schemas]
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                reply = await run.complete(f"{endpoint}/chat/completions", secret, body)
                if reply.status_code >= 400:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                    answer = await run.use(trace, name, arguments, served)
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": answer}
                    )


async def _pull_state() -> Any:
    return _trace.get().state


async def _push_state(before: bytes) -> None:
    """Nothing to do: the tool has changed the state of the trace itself."""


__all__ = ["TailraceHarness"]
sys.modules.setdefault(f"verifiers.v1.harnesses.{ID}", sys.modules[__name__])
