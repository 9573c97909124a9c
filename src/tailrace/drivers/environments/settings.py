"""The [environment] section."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator

from tailrace.settings import Resumable, RunFunction, Settings, Shared, default_tag

ParserName = Literal["hermes", "llama3_json", "mistral", "qwen3_coder"]
"""The formats of tool calls have the names that vLLM gives its parsers."""
MODEL = "policy"
"""The name that agents give the model."""


class SingleTurnSettings(Settings):
    """A sample is one response to its prompt."""

    has_turns: ClassVar[bool] = False
    gives_rewards: ClassVar[bool] = False

    kind: Literal["single_turn"] = "single_turn"
    """Selects this kind of environment."""


class EpisodeSettings(Settings):
    """Settings that all environments of several turns have."""

    has_turns: ClassVar[bool] = True
    """Whether an episode may have several turns. Then it may fill the model's context."""
    gives_rewards: ClassVar[bool] = True
    """Whether it may give rewards itself, so that a run may go without reward functions."""
    always_rewards: ClassVar[bool] = False
    """Whether it gives every reward itself, so that reward functions and judges are not called."""

    parking_timeout_s: Resumable[float] = Field(default=5.0, ge=0, le=86_400, allow_inf_nan=False)
    """Seconds for which an action that is under way, such as a call of a tool, is awaited when its episode is
    parked; 0 to a day. After that it is cancelled, and made again when the episode goes on."""
    max_failures: Resumable[int] = Field(default=100, ge=1, le=1_000_000_000)
    """Consecutive episodes that fail because the environment raises, which end the run; at least 1."""
    episode_timeout_s: float | None = Field(default=None, gt=0, le=604_800, allow_inf_nan=False)
    """Seconds after which an episode fails as "environment timeout"; above 0, at most a week. The time in
    which the policy generates does not count. An episode that goes on after an interruption has them again.
    None: no limit."""
    history: Literal["keep", "template"] = "keep"
    """Form of earlier turns. "keep": the policy's own tokens. "template": as the chat template writes them;
    where it leaves something out (Qwen3's: the thinking of earlier turns), the turn begins a branch."""
    max_branches: int = Field(default=16, ge=1, le=100_000)
    """Sequences that an episode may consist of: one, and one more for each time that its history is
    rewritten; at least 1. Each may fill the model's context, and they are trained in one micro-batch. A
    request of an agent that would begin one more is refused; with other environments the episode is over."""


class ToolsSettings(EpisodeSettings):
    """The model calls Python functions, in as many turns as it needs. Reward functions score the episode."""

    gives_rewards: ClassVar[bool] = False

    kind: Literal["tools"] = "tools"
    """Selects this kind of environment."""
    functions: tuple[RunFunction, ...] = Field(min_length=1)
    """The tools: 'package.module:name' or 'path/to/file.py:name'. Their type hints and docstrings tell the
    chat template of the prompt what they do."""
    parser: ParserName = "hermes"
    """How the model writes a call. "hermes" (also Qwen 2.5 and 3): <tool_call>JSON</tool_call>.
    "llama3_json": the whole turn is JSON. "mistral": JSON after [TOOL_CALLS]. "qwen3_coder" (also Qwen 3.5):
    <function=NAME><parameter=NAME>TEXT</parameter></function>."""
    max_turns: int = Field(default=8, ge=1, le=100_000)
    """Turns of the model in an episode; at least 1."""
    call_timeout_s: Resumable[float] = Field(default=30.0, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds after which a call is given up; above 0, at most a day. A function that is not async keeps its
    thread until it returns."""
    on_error: Literal["answer", "end"] = "answer"
    """Effect of a call that raises or takes too long: its error is the answer to the model, or the episode
    ends. A malformed call is answered in each case."""
    answer_role: Literal["tool", "user"] = "tool"
    """Role of the messages that answer calls. "user" is for models whose chat template knows no other."""
    max_answer_chars: int = Field(default=10_000, ge=1, le=2**31)
    """Longer answers of tools are cut off; at least 1."""


class PythonSettings(EpisodeSettings):
    """An environment of your own."""

    kind: Literal["python"] = "python"
    """Selects this kind of environment."""
    environment: RunFunction
    """'package.module:name' or 'path/to/file.py:name' of an async function of a prompt and a policy that
    returns an Outcome, or of a class that has such a method `run`."""
    arguments: dict[str, str | bool | int | float | list[str]] = {}
    """Arguments of the class."""


class AgentSettings(EpisodeSettings):
    """An agent written for OpenAI's API: a function or a program, which talks to the policy over HTTP."""

    kind: Literal["agent"] = "agent"
    """Selects this kind of environment."""
    function: RunFunction | None = None
    """'package.module:name' or 'path/to/file.py:name'. It is called for each episode, with those of the
    arguments `row`, `messages`, `base_url`, `api_key` and `model` that it names, and returns the reward, or
    None where reward functions score the episode. Async functions share a thread; each call of another
    one has its own."""
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A program and its arguments, in place of `function`. It is started for each episode, with the row as
    JSON in its input and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment. It may give a
    reward in its last line of output: {"reward": 1.0}."""
    prompt: Literal["agent", "data"] = "agent"
    """Prompt of a sample. "agent": the first request of the agent, with its own system prompt and tools.
    "data": the prompt of the data, which the first request must repeat; engines then compute it once for a
    group."""
    parser: ParserName = "hermes"
    """How the model writes tool calls, as in the environment "tools"; the agent gets them as `tool_calls`."""
    idle_timeout_s: Resumable[float] = Field(default=600.0, gt=0, le=86_400)
    """Seconds without a request after which an episode fails; above 0, at most a day. The time in which the
    policy generates does not count."""

    @model_validator(mode="after")
    def _check_that_there_is_one(self) -> "AgentSettings":
        if bool(self.function) == bool(self.command):
            raise ValueError("an agent needs either `function` or `command`")
        return self


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


class OpenEnvSettings(EpisodeSettings):
    """An environment behind a server of OpenEnv: each turn of the model is an action."""

    always_rewards: ClassVar[bool] = True

    kind: Literal["openenv"] = "openenv"
    """Selects this kind of environment."""
    url: Resumable[str] = Field(pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$")
    """Base address of the server, such as `http://127.0.0.1:8000`."""
    reset: Mapping[str, str] = {}
    """Arguments of the environment's `reset`, each with the column of the row that has its value. Without
    `seed` the seed is the number of the row, so that the samples of a group play the same task."""
    observation: str = ""
    """The field of an observation that the model reads. Empty: all fields, as JSON."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of the episode, of the rewards of its steps."""
    max_turns: int = Field(default=8, ge=1, le=100_000)
    """Actions in an episode; at least 1."""
    max_sessions: Resumable[int] = Field(default=64, ge=1, le=65_536)
    """Episodes at a time; at most what the server was started for (`max_concurrent_envs`)."""
    step_timeout_s: Resumable[float] = Field(default=60.0, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds for a connection, and for each answer of the server; above 0, at most a day."""


EnvironmentSettings = Annotated[
    Annotated[SingleTurnSettings, Tag("single_turn")]
    | Annotated[ToolsSettings, Tag("tools")]
    | Annotated[PythonSettings, Tag("python")]
    | Annotated[AgentSettings, Tag("agent")]
    | Annotated[VerifiersSettings, Tag("verifiers")]
    | Annotated[OpenEnvSettings, Tag("openenv")],
    default_tag("single_turn"),
]
