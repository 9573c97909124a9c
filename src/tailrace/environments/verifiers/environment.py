"""Environments of verifiers: each episode is played by the environment of a taskset.

verifiers runs in a thread with an event loop of its own, because tasks, tools and rewards may compute for
long. A model call of the trained agent goes to the policy: the messages that are new since its last turn are
the environment's, and nothing is tokenised again.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import httpx
from verifiers.v1.clients import resolve_client

from tailrace.clock import RealTimeLoop
from tailrace.data.base import TasksetSettings
from tailrace.data.taskset import Opening, Taskset, is_local
from tailrace.environments.base import Outcome, Policy
from tailrace.environments.history import RequestEncoder
from tailrace.environments.settings import VerifiersSettings
from tailrace.environments.tools import PARSERS
from tailrace.environments.verifiers.harness import ID, RUNS, LocalTools, Run
from tailrace.environments.verifiers.play import POLICY, Play, PolicyClient, RecordedClient
from tailrace.types import Prompt

T = TypeVar("T")


@asynccontextmanager
async def open_verifiers(
    settings: VerifiersSettings, encoder: RequestEncoder
) -> AsyncIterator["VerifiersEnvironment"]:
    """Open the environment of a taskset for the length of the block.

    Raises:
        ConfigError: as Taskset.
    """
    names = TasksetSettings(
        taskset=settings.taskset, args=settings.args, verifiers=settings.verifiers, agent=settings.agent
    )
    taskset = Taskset(names, harness=ID)
    environment = VerifiersEnvironment(taskset, settings, encoder)
    try:
        await environment.start()
        yield environment
    finally:
        await environment.stop()


class VerifiersEnvironment:
    """`Environment` (base.py) around an environment of verifiers.

    Args:
        encoder: for contexts of turns that begin a branch.
    """

    def __init__(self, taskset: Taskset, settings: VerifiersSettings, encoder: RequestEncoder) -> None:
        self._taskset, self._settings, self._encoder = taskset, settings, encoder
        self._loop = RealTimeLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True)
        self._life: concurrent.futures.Future[None] | None = None
        self._closing = asyncio.Event()
        self._plays: dict[str, Play] = {}
        env = taskset.env
        toolsets = env.taskset.toolsets(env.taskset.config)
        env.taskset.toolsets = lambda config: [each for each in toolsets if not is_local(each)]
        self._shared = LocalTools(toolsets)

    async def start(self) -> None:
        """Start the thread, the interception server and the shared tools."""
        self._thread.start()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._life = asyncio.run_coroutine_threadsafe(self._live(started), self._loop)
        await asyncio.wrap_future(started)

    async def stop(self) -> None:
        """Stop them."""
        if self._life is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            await asyncio.wait([asyncio.wrap_future(self._life)])
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """As Environment.run.

        Raises:
            EnvironmentFailed: a hook of the taskset has failed, or the agent's conversation cannot be
                trained.
        """
        task = self._taskset.task(prompt.row["task"])
        opening = Opening(prompt.given, prompt.row["tools"])  # type: ignore[arg-type]
        settings = self._settings
        contexts = self._encoder.contexts(prompt, settings.history, settings.max_branches)
        play = Play(self._taskset.agent, opening, policy, PARSERS[settings.parser], contexts)
        playing = asyncio.ensure_future(self._there(self._play(task, play)))
        try:
            episode = await play.serve(playing)
        finally:
            if not playing.done():
                playing.cancel()
                await asyncio.wait([playing])
        return play.outcome(episode)

    async def _live(self, started: concurrent.futures.Future[None]) -> None:
        """Serve in verifiers' thread until `stop`. One task, because what enters a context must leave it."""
        env = self._taskset.env
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(env.serving())
                # The server makes a client for each endpoint that it has none for.
                clients = env._interception.clients
                clients[POLICY.client.model_dump_json()] = PolicyClient(self._plays)
                for spec in env._agent_specs.values():
                    if spec.client is not None:
                        other = RecordedClient(resolve_client(spec.client), self._plays)
                        clients[spec.client.model_dump_json()] = other
                        stack.push_async_callback(other.close)
                self._http = httpx.AsyncClient(
                    timeout=None, limits=httpx.Limits(), verify=False, trust_env=False
                )
                await stack.enter_async_context(self._http)
                stack.push_async_callback(self._shared.stop)
                await self._shared.start()
                started.set_result(None)
                await self._closing.wait()
        except BaseException as why:
            if started.done():
                raise
            started.set_exception(why)
        await self._loop.shutdown_default_executor()

    async def _play(self, task: Any, play: "Play") -> Any:
        """Play one episode, in verifiers' thread."""
        env = self._taskset.env
        toolsets = task.toolsets(task.config)
        task.toolsets = lambda config: [each for each in toolsets if not is_local(each)]
        own = LocalTools(toolsets)
        traces: list[str] = []

        def begin(trace: Any) -> None:
            traces.append(trace.id)
            self._plays[trace.id] = play
            tools = [self._shared, own] if trace.task.type == type(task).__name__ else []
            RUNS[trace.id] = Run(tools, play.call if trace.agent.name == play.agent else None, self._http)

        try:
            await own.start(task.data)
            return await env.run_episode(task, POLICY, on_trace=begin)
        finally:
            await own.stop()
            for id in traces:
                del RUNS[id], self._plays[id]

    async def _there(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in verifiers' thread. If this is cancelled, the coroutine has ended afterwards."""
        ended: concurrent.futures.Future[asyncio.Task[T]] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(ended.set_result)

        self._loop.call_soon_threadsafe(begin)
        here = asyncio.wrap_future(ended)
        try:
            return (await asyncio.shield(here)).result()
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await here
            raise
