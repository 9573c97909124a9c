"""The [environment] section."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from tailrace.environments.tool_calls import ParserName
from tailrace.settings import Settings


class SingleTurnSettings(Settings):
    """A sample is one response to its prompt."""

    kind: Literal["single_turn"] = "single_turn"
    """Selects this kind of environment."""


class EpisodeSettings(Settings):
    """What the settings of all environments of several turns have in common."""

    gives_rewards: ClassVar[bool] = True
    """Whether it may give rewards itself, so that a run may go without reward functions."""

    grace_s: float = Field(default=5.0, ge=0, le=86_400, allow_inf_nan=False)
    """Seconds for which an action that is under way, such as a call of a tool, is awaited when its episode is
    parked; 0 to a day. After that it is cancelled, and made again when the episode goes on."""
    max_failures: int = Field(default=100, ge=1, le=1_000_000_000)
    """Consecutive episodes that fail because the environment raises, which end the run; at least 1."""


class ToolsSettings(EpisodeSettings):
    """The model calls Python functions, in as many turns as it needs. Reward functions score the episode."""

    gives_rewards: ClassVar[bool] = False

    kind: Literal["tools"]
    """Selects this kind of environment."""
    functions: tuple[str, ...] = Field(min_length=1)
    """The tools: 'package.module:name' or 'path/to/file.py:name'. Their type hints and docstrings tell the
    chat template of the prompt what they do."""
    parser: ParserName = "hermes"
    """How the model writes a call. "hermes" (also Qwen): <tool_call>JSON</tool_call>. "llama3_json": the
    whole turn is JSON."""
    max_turns: int = Field(default=8, ge=1, le=100_000)
    """Turns of the model in an episode; at least 1."""
    call_timeout_s: float = Field(default=30.0, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds after which a call is given up; above 0, at most a day. A function that is not async keeps its
    thread until it returns."""
    on_error: Literal["answer", "end"] = "answer"
    """What a call that raises or takes too long does: its error is the answer to the model, or the episode
    ends. A malformed call is answered in each case."""
    max_answer_chars: int = Field(default=10_000, ge=1, le=2**31)
    """Longer answers of tools are cut off; at least 1."""


class PythonSettings(EpisodeSettings):
    """An environment of your own."""

    kind: Literal["python"]
    """Selects this kind of environment."""
    environment: str
    """'package.module:name' or 'path/to/file.py:name' of an async function of a prompt and a policy that
    returns an Outcome, or of a class that has such a method `run`."""
    arguments: dict[str, str | bool | int | float | list[str]] = {}
    """Arguments of the class."""


def _kind_of(value: Any) -> str:
    default = "single_turn"
    return str(value.get("kind", default) if isinstance(value, dict) else getattr(value, "kind", default))


EnvironmentSettings = Annotated[
    Annotated[SingleTurnSettings, Tag("single_turn")]
    | Annotated[ToolsSettings, Tag("tools")]
    | Annotated[PythonSettings, Tag("python")],
    Discriminator(_kind_of),
]
