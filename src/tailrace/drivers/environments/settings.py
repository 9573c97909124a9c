"""The [environment] section."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tailrace.kinds import OneOf
from tailrace.settings import Resumable, RunFunction, Settings

ParserName = Literal["hermes", "llama3_json", "mistral", "qwen3_coder"]
"""The formats of tool calls have the names that vLLM gives its parsers."""
MODEL = "policy"
"""The name that agents give the model."""


class SingleTurnSettings(Settings):
    """A sample is one response to its prompt."""

    has_turns: ClassVar[bool] = False
    calls_have_effects: ClassVar[bool] = False
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
    calls_have_effects: bool = True
    """Whether a call changes what later calls return, or anything else outside its episode. Such an episode
    cannot lose turns: with schedule.stale = "verify" this must be false."""
    history: Literal["keep", "template"] = "keep"
    """Form of earlier turns. "keep": the policy's own tokens. "template": as the chat template writes them;
    where it leaves something out (Qwen3's: the thinking of earlier turns), the turn begins a branch."""
    max_branches: int = Field(default=16, ge=1, le=100_000)
    """Sequences that an episode may consist of: one, and one more for each time that its history is
    rewritten; at least 1. Each may fill the model's context, and they are trained in one micro-batch. A
    request of an agent that would begin one more is refused; with other environments the episode is over."""
    kind: str
    """Selects a kind of environment."""


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


EnvironmentSettings = Annotated[
    SingleTurnSettings | EpisodeSettings,
    OneOf("environment", SingleTurnSettings, ToolsSettings, PythonSettings, default="single_turn"),
]
