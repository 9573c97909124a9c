"""Tasksets of verifiers: loaded, and turned into prompts.

The prompt of a task is the first request of the trained agent: its messages and its tools. It is found by
running the environment of the taskset with agents that only note what they are asked to do.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any, NamedTuple

from pydantic import ValidationError

from tailrace.data.base import TasksetSettings
from tailrace.data.seats import Seats, run_elsewhere
from tailrace.errors import BadRow, ConfigError

Message = Mapping[str, object]

CHAT_LOOPS = ("bash", "null")
"""The harnesses of verifiers that start a Python process for a chat loop. `harness` of Taskset replaces
them: the first where it is only the default, the second everywhere."""


class Opening(NamedTuple):
    """The first request of the trained agent."""

    messages: list[Message]
    tools: list[Message]
    """Descriptions of the tools as JSON schemas."""


class Taskset:
    """A taskset of verifiers with its environment.

    Args:
        harness: id of the harness that replaces those that start a process for a chat loop.

    Raises:
        ConfigError: verifiers, the taskset or something that it needs is not installed; it does not know the
            arguments, or it needs a container.
    """

    def __init__(self, settings: TasksetSettings, harness: str = "null") -> None:
        self._settings = settings
        vf = import_verifiers()
        try:
            self.env = vf.load_environment(vf.resolve_env_config(self._config(vf, harness)))
        except ImportError as why:
            remedy = "install the package of the taskset, with what it needs, beside tailrace"
            problem = f"the taskset cannot be imported ({why.__cause__ or why})"
            raise ConfigError("environment.taskset", settings.taskset, problem, remedy) from why
        except ValidationError as why:
            raise _refused(why) from why
        except (ValueError, TypeError, AttributeError) as why:
            problem = f"verifiers refuses the taskset ({why})"
            remedy = "name the package of a taskset of verifiers 0.4"
            raise ConfigError("environment.taskset", settings.taskset, problem, remedy) from why
        agents = self.env._agent_specs
        self.agent = settings.agent or next(iter(agents))
        if self.agent not in agents:
            problem = f"the taskset has no such agent, it has {', '.join(agents)}"
            raise ConfigError("environment.agent", self.agent, problem, "name one of them")
        if self.env.config.max_concurrent_agents != 1:
            value = self.env.config.max_concurrent_agents
            problem = "an episode that goes on after an interruption needs its agents in a fixed order"
            raise ConfigError("environment.verifiers.max_concurrent_agents", value, problem, "remove it")
        self._check_models(agents)
        self._schemas: dict[str, list[Message]] = {}

    def load(self) -> list[Any]:
        """Load the tasks.

        Raises:
            ConfigError: they cannot be loaded, there is none, or they have no end and no number is set.
        """
        name, limit = self._settings.taskset, self._settings.num_tasks
        if limit is None and not self.env.taskset.bounded:
            problem = f"the tasks of {name} have no end"
            raise ConfigError("data.num_tasks", None, problem, "set how many of them are used")
        try:
            tasks = list(islice(self.env.taskset, limit))
        except ImportError as why:
            problem = f"the tasks of {name} need a package that is not installed ({why})"
            raise ConfigError("environment.taskset", name, problem, "install it") from why
        except Exception as why:
            problem = f"its tasks cannot be loaded ({type(why).__name__}: {why})"
            raise ConfigError("environment.taskset", name, problem, "check environment.args") from why
        if not tasks:
            raise ConfigError("environment.taskset", name, "it has no task", "check environment.args")
        self._check(tasks[0])
        return tasks

    def row(self, task: Any) -> dict[str, object]:
        """Return a task as plain data, from which `task` makes it again."""
        data: dict[str, object] = task.data.model_dump(mode="json")
        return data

    def task(self, row: object) -> Any:
        """Return the task of a row, as verifiers' own server makes it."""
        task_type = type(self.env.taskset).task_type()
        return task_type(task_type.data_type().model_validate(row), self.env.config.taskset.task)

    def opening(self, task: Any) -> Opening:
        """Return the first request of the trained agent.

        Raises:
            BadRow: the environment does not ask the trained agent first.
        """
        seats = Seats()
        try:
            run_elsewhere(partial(self._play, task, seats))
        except Exception as why:
            if seats.asked is None:
                raise BadRow("task without an opening", f"{type(why).__name__}: {why}") from why
        if seats.asked is None:
            raise BadRow("task without an opening", "its environment asks no agent")
        name, asked, message = seats.asked
        if name != self.agent:
            problem = f"the agent {name} speaks before {self.agent}, so the prompt is not known"
            raise BadRow("task opened by another agent", f"{problem}; train {name}")
        return Opening(opening_messages(asked.data, message), self._tools(asked))

    async def _play(self, task: Any, seats: "Seats") -> None:
        await self.env.setup(seats)
        await self.env.run(task, seats)

    def _tools(self, task: Any) -> list[Message]:
        """Return the tools of a task. Those of tasks of one type and config are the same."""
        key = f"{type(task)} {task.config.model_dump_json()}"
        if key not in self._schemas:
            own = isinstance(task, type(self.env.taskset).task_type())
            shared = self.env.taskset.toolsets(self.env.taskset.config) if own else []
            toolsets = [*shared, *task.toolsets(task.config)]
            self._schemas[key] = run_elsewhere(partial(_list_tools, toolsets)) if toolsets else []
        return self._schemas[key]

    def _check_models(self, agents: Mapping[str, Any]) -> None:
        """Check that the trained agent has no model of its own, and every other agent has one.

        Raises:
            ConfigError: that is not so.
        """
        for name, spec in agents.items():
            key = f"environment.verifiers.{name}.client"
            if name == self.agent and spec.client is not None:
                problem = "the model of the trained agent is the policy"
                raise ConfigError(key, spec.client.base_url, problem, "remove it")
            if name != self.agent and spec.client is None:
                problem = "this agent is not trained, so it needs a model"
                remedy = "name an OpenAI-compatible endpoint, as docs/verifiers.md shows"
                raise ConfigError(key, None, problem, remedy)

    def _check(self, task: Any) -> None:
        """Check that a task can be played here.

        Raises:
            ConfigError: it needs a container.
        """
        from verifiers.v1.utils.compile import resolve_runtime_config, validate_pairing

        runtime = self.env._agent_specs[self.agent].runtime
        try:
            runtime = resolve_runtime_config(runtime, task)
            validate_pairing(self.env._harnesses[self.agent], type(task), runtime)
        except ValueError as why:
            remedy = f'set environment.verifiers.{self.agent}.runtime = {{ type = "docker" }}'
            problem = f"its tasks cannot run here ({why})"
            raise ConfigError("environment.taskset", self._settings.taskset, problem, remedy) from why

    def _config(self, vf: Any, harness: str) -> dict[str, object]:
        """Return the config of the environment. Agents run in this process unless the settings or the taskset
        name another harness or runtime."""
        given: dict[str, Any] = dict(self._settings.verifiers)
        taskset = self._settings.taskset
        default = vf.default_harness_id(taskset)
        for name, field in vf.env_config_type(taskset, given.get("id", "")).model_fields.items():
            if isinstance(field.default, vf.AgentConfig):
                agent = dict(given.get(name, {}))
                own = agent.get("harness") or {}
                pinned = own.get("id") or (field.default.harness.id if field.default.harness else None)
                if pinned == "null" or (pinned is None and default in CHAT_LOOPS):
                    agent["harness"] = {**own, "id": harness}
                if "runtime" not in agent and isinstance(field.default.runtime, vf.PrimeConfig):
                    agent["runtime"] = {"type": "subprocess"}
                given[name] = agent
        return {
            **given,
            "taskset": {**self._settings.args, "id": taskset},
            "interception": {"type": "server"},
        }


def import_verifiers() -> Any:
    """Import verifiers.

    Raises:
        ConfigError: it is not installed, or it is another release.
    """
    try:
        release = version("verifiers")
        import verifiers.v1 as vf
    except ImportError as why:
        problem = f"the package verifiers is not installed ({why})"
        raise ConfigError("environment.kind", "verifiers", problem, "see docs/verifiers.md") from why
    if not release.startswith("0.4."):
        problem = f"verifiers {release} is installed, and 0.4 is needed"
        raise ConfigError("environment.kind", "verifiers", problem, "see docs/verifiers.md")
    return vf


def _refused(error: ValidationError) -> ConfigError:
    """Return the first error of verifiers' config in the words of [environment]."""
    detail = error.errors()[0]
    first, *rest = map(str, detail["loc"]) if detail["loc"] else ("",)
    parts = ["args", *rest] if first == "taskset" else ["verifiers", first, *rest]
    key = ".".join(["environment", *parts]).strip(".")
    return ConfigError(key, detail["input"], f"verifiers says: {detail['msg']}", "change it")


def opening_messages(data: Any, message: Any = None) -> list[Message]:
    """Return the first messages to an agent in OpenAI's format.

    Args:
        data: of its task.
        message: what the environment says first, where the task has no prompt: text, or messages.
    """
    from verifiers.v1.dialects.chat import message_to_wire

    said = data.prompt if message is None else message
    first: list[Message] = [] if data.system_prompt is None else [_text("system", data.system_prompt)]
    if isinstance(said, str):
        return [*first, _text("user", said)]
    return [*first, *(message_to_wire(each) for each in said or [])]


def mcp_server(toolset: Any) -> Any:
    """Return the MCP server of a toolset, in this process and without a socket."""
    from mcp.server.mcpserver import MCPServer

    # A server configures the logging of the process, unless it has a handler.
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        server = MCPServer(toolset.server_name or type(toolset).__name__)
    finally:
        logging.root.removeHandler(handler)
    toolset.register(server)
    return server


def is_local(toolset: Any) -> bool:
    """Return whether a toolset may run in this process: it is no server elsewhere and has no container."""
    return not toolset.config.url and toolset.config.runtime.type == "subprocess"


def full_name(toolset: Any, tool: str) -> str:
    """Return the name under which the model calls a tool."""
    return f"{toolset.server_name}_{tool}" if toolset.server_name else tool


async def schemas_of(toolset: Any, server: Any) -> list[Message]:
    """Return the descriptions of the tools of a local toolset."""
    return [
        {
            "type": "function",
            "function": {
                "name": full_name(toolset, tool.name),
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in await server.list_tools()
    ]


async def _list_tools(toolsets: Sequence[Any]) -> list[Message]:
    found: list[Message] = []
    for toolset in toolsets:
        if not is_local(toolset):
            problem = f"the tools of {toolset.server_name} run in another place, so they are not known"
            raise BadRow("tools elsewhere", problem)
        found += await schemas_of(toolset, mcp_server(toolset))
    return found


def _text(role: str, content: str) -> Message:
    return {"role": role, "content": content}
