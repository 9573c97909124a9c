"""Settings of engines and teachers behind HTTP."""

from typing import Annotated, Literal

from pydantic import Field

from tailrace.drivers.engine.settings import ServerEngineSettings
from tailrace.drivers.reward.settings import TeacherBase
from tailrace.settings import Resumable, RunPath, Shared


class VllmEngineSettings(ServerEngineSettings):
    """vLLM."""

    can_regroup = True
    sleep_args = ("--enable-sleep-mode",)
    server = "vLLM"
    kind: Literal["vllm"] = "vllm"
    """Selects this kind of engine."""
    drafts: Literal["off", "auto"] = "off"
    """auto: the servers that the run starts check tokens that followed the same tokens before in the request
    (vLLM's n-gram speculation). The distribution of tokens stays the same."""
    max_draft_tokens: int = Field(default=8, ge=1, le=64)
    """The most tokens of a request that a step checks; 1 to 64."""


class SglangEngineSettings(ServerEngineSettings):
    """SGLang."""

    server = "SGLang"
    kind: Literal["sglang"] = "sglang"
    """Selects this kind of engine."""


class PipelineRlEngineSettings(ServerEngineSettings):
    """Any engine with the three routes that PipelineRL needs (extras/http/pipelinerl.py)."""

    kind: Literal["pipelinerl"] = "pipelinerl"
    """Selects this kind of engine."""

    urls: tuple[Annotated[str, Field(pattern="^https?://")], ...] = Field(min_length=1)
    """Addresses of running engines, one each: the run starts none of this kind."""


class ServerTeacherSettings(TeacherBase):
    """A server that returns log-probs of a prompt: vLLM, or `tailrace serve`."""

    kind: Literal["server"] = "server"
    """Where the model runs."""
    url: Resumable[str] = Field(pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$")
    """Base address, such as `http://127.0.0.1:8000`."""
    model: str | None = Field(default=None, min_length=1)
    """Name of the model at the server. None: its only one."""
    tokenizer: Shared[RunPath | None] = None
    """Folder with the tokenizer of that model, for a server that does not tell its vocabulary."""
    api_key_env: Resumable[str | None] = Field(default=None, min_length=1)
    """Environment variable that holds the API key. None: no key is sent."""
    concurrency: Resumable[int] = Field(default=16, ge=1, le=65_536)
    """Requests at a time."""
    retry_timeout_s: Resumable[float] = Field(default=300.0, ge=0, le=86_400)
    """Seconds for which failures of the server (connection, 408, 429, 5xx) are retried before a sample fails;
    at most a day."""
