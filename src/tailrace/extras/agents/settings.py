"""Settings of agents."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tailrace.drivers.environments.settings import EpisodeSettings, ParserName
from tailrace.settings import Resumable, RunFunction


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
