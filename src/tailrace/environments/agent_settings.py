"""The settings of agents."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tailrace.environments.tool_calls import ParserName
from tailrace.settings import Settings

MODEL = "policy"
"""The name that agents give the model."""


class AgentSettings(Settings):
    """An agent written for OpenAI's API: a function or a program, which talks to the policy over HTTP."""

    gives_rewards: ClassVar[bool] = True

    kind: Literal["agent"]
    """Selects this kind of environment."""
    function: str | None = None
    """'package.module:name' or 'path/to/file.py:name'. It is called for each episode, with those of the
    arguments `row`, `messages`, `base_url`, `api_key` and `model` that it names, and returns the reward, or
    None where reward functions score the episode. One that is not async runs in a thread of its own."""
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A program and its arguments, in place of `function`. It is started for each episode, with the row as JSON
    in its input and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment. It may give a reward
    in its last line of output: {"reward": 1.0}."""
    prompt: Literal["agent", "data"] = "agent"
    """What the prompt of a sample is. "agent": the first request of the agent, with its own system prompt and
    tools. "data": the prompt of the data, which the first request must repeat; engines then compute it once
    for a group."""
    parser: ParserName = "hermes"
    """How the model writes tool calls, which the agent gets as `tool_calls`: "hermes" (also Qwen):
    <tool_call>JSON</tool_call>; "llama3_json": the whole turn is JSON."""
    idle_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds without a request after which an episode fails; above 0, at most a day. The time in which the
    policy generates does not count."""
    grace_s: float = Field(default=0.0, ge=0, le=86_400)
    """Unused: an agent is stopped at once when its episode is parked, and begins again."""
    max_failures: int = Field(default=100, ge=1, le=1_000_000_000)
    """Consecutive episodes that fail, which end the run; at least 1."""

    @model_validator(mode="after")
    def _check_that_there_is_one(self) -> "AgentSettings":
        if bool(self.function) == bool(self.command):
            raise ValueError("an agent needs either `function` or `command`")
        return self
