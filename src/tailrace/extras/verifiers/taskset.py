"""Tasksets of verifiers, and their tasks as prompts in an endless seeded order."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from itertools import islice
from typing import Any, ClassVar, Literal
from zlib import crc32

from pydantic import Field, ValidationError

from tailrace.contracts.data import Epochs, Split
from tailrace.drivers.data.rows import hold_out
from tailrace.drivers.data.settings import PromptSettings
from tailrace.drivers.environments.settings import EpisodeSettings, ParserName
from tailrace.errors import ConfigError
from tailrace.settings import Shared
from tailrace.types import Prompt


class VerifiersSettings(EpisodeSettings):
    """The environment of a taskset of verifiers, whose tasks are the data."""

    always_rewards: ClassVar[bool] = True

    kind: Literal["verifiers"] = "verifiers"
    """Selects this kind of environment."""
    taskset: Shared[str] = Field(min_length=1)
    """The taskset: the name of an installed package, as verifiers takes it."""
    args: Mapping[str, Any] = {}
    """Arguments of the taskset: the keys of its own config."""
    verifiers: Mapping[str, Any] = {}
    """Keys of verifiers' config of the environment: `id`, or for an agent its `model`, `client`, `harness`,
    `runtime`, limits."""
    agent: str = ""
    """The agent that is trained. Without it the first one of the environment."""
    parser: ParserName = "hermes"
    """How the model writes a call, as in the environment "tools"."""


class TasksetSettings(PromptSettings):
    """The tasks of a taskset of verifiers. [environment] with kind "verifiers" names the taskset."""

    kind: Literal["verifiers"] = "verifiers"
    """Selects this kind of data. It is the default where [environment] has this kind."""
    num_tasks: int | None = Field(default=None, ge=2)
    """The first tasks, which are used; at least 2. Without it all are. One sixteenth is held out for
    evaluation."""
    taskset: Shared[str] = Field(min_length=1)
    """Set from environment.taskset."""
    args: Mapping[str, Any] = {}
    """Set from environment.args."""
    verifiers: Mapping[str, Any] = {}
    """Set from environment.verifiers."""
    agent: str = ""
    """Set from environment.agent."""


CHAT_LOOPS = ("bash", "null")
"""The harnesses of verifiers that start a Python process for a chat loop. `harness` of Taskset replaces
them: the first where it is only the default, the second everywhere."""


class Taskset:
    """A taskset of verifiers with its environment. Raises a ConfigError if verifiers, or what the taskset
    needs, is not installed, it does not know the arguments, or it needs a container. `harness`: id of the
    harness that replaces those that start a process for a chat loop."""

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
        from verifiers.v1.configs.agent import agent_config_fields

        self._agents = agents = agent_config_fields(self.env.config)
        self.agent = settings.agent or next(iter(agents))
        if self.agent not in agents:
            problem = f"the taskset has no such agent, it has {', '.join(agents)}"
            raise ConfigError("environment.agent", self.agent, problem, "name one of them")
        self._check_models()

    def load(self) -> list[Any]:
        """Load the tasks. Raises a ConfigError if they cannot be loaded, are none, or do not end."""
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

    def task(self, row: object) -> Any:
        """Return the task with the data of a row, as verifiers' own server makes it."""
        task_type = type(self.env.taskset).task_type()
        return task_type(task_type.data_type().model_validate(row), self.env.config.taskset.task)

    def _check_models(self) -> None:
        """Raises a ConfigError if the trained agent has a model of its own, or another agent has none."""
        for name, spec in self._agents.items():
            key = f"environment.verifiers.{name}.client"
            if name == self.agent and spec.client is not None:
                problem = "the model of the trained agent is the policy"
                raise ConfigError(key, spec.client.base_url, problem, "remove it")
            if name != self.agent and spec.client is None:
                problem = "this agent is not trained, so it needs a model"
                remedy = "name an OpenAI-compatible endpoint, as docs/how-to/episodes.md shows"
                raise ConfigError(key, None, problem, remedy)

    def _check(self, task: Any) -> None:
        """Raises a ConfigError if the task cannot be played here."""
        from verifiers.v1.utils.compile import resolve_runtime_config, validate_pairing
        from verifiers.v1.utils.loaders import load_harness

        harness = load_harness(self.env.config.agent_harnesses()[self.agent])
        try:
            runtime = resolve_runtime_config(self._agents[self.agent].runtime, task)
            validate_pairing(harness, type(task), runtime)
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
    """Import verifiers. Raises a ConfigError if it is not installed, or is another release."""
    remedy = "see docs/how-to/episodes.md"
    try:
        release = version("verifiers")
        import verifiers.v1 as vf
    except ImportError as why:
        problem = f"the package verifiers is not installed ({why})"
        raise ConfigError("environment.kind", "verifiers", problem, remedy) from why
    if not release.startswith("0.4."):
        problem = f"verifiers {release} is installed, and 0.4 is needed"
        raise ConfigError("environment.kind", "verifiers", problem, remedy)
    return vf


def _refused(error: ValidationError) -> ConfigError:
    """Return the first error of verifiers' config in the words of [environment]."""
    detail = error.errors()[0]
    first, *rest = map(str, detail["loc"]) if detail["loc"] else ("",)
    parts = ["args", *rest] if first == "taskset" else ["verifiers", first, *rest]
    key = ".".join(["environment", *parts]).strip(".")
    return ConfigError(key, detail["input"], f"verifiers says: {detail['msg']}", "change it")


class TaskPrompts:
    """The endless prompts of one split of the tasks, shuffled anew in each epoch. They have no tokens: the
    trained agent's first request has them."""

    def __init__(self, settings: TasksetSettings, seed: int, split: Split) -> None:
        """Raises a ConfigError if the taskset cannot be loaded or played."""
        self._taskset = Taskset(settings)
        tasks = self._taskset.load()
        digests = [crc32(task.key.encode()) for task in tasks]
        kept = hold_out("environment.taskset", settings.taskset, list(digests))
        pairs = zip(tasks, digests, strict=True)
        self._tasks = [task for task, digest in pairs if (digest in kept) == (split == "eval")]
        self._epochs = Epochs(len(self._tasks), seed)

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._epochs.row_at(index)
        data = self._tasks[row_number].data
        row = data.model_dump(mode="json")
        text = data.prompt if isinstance(data.prompt, str) else json.dumps(row["prompt"] or row)
        return Prompt(index, (), text, {"task": row}, row_number)
