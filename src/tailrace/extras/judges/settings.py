"""Settings of judges."""

import re
from typing import Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from tailrace.devices import Device
from tailrace.drivers.reward.settings import JudgeBase
from tailrace.settings import Resumable, RunPath, Shared


class AnswerSettings(JudgeBase):
    """How the score is read in an answer in words."""

    pattern: str | None = None
    """Regular expression with one group, the score in the answer; the last match counts. None, without
    `field`: the last number. "3/10", "3 out of 10" and "3 (on a scale of 0 to 10)" are 3."""
    field: str | None = Field(default=None, min_length=1)
    """Key of the score, where the answer has a JSON object; the last such object counts."""
    values: dict[str, float] = {}
    """Numbers of answers that are words, such as `{ yes = 1, no = 0 }`; case does not count."""
    scale: tuple[float, float] = (0.0, 1.0)
    """The worst and the best score; they become 0 and 1. An answer outside counts as unreadable."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        try:
            groups = 1 if pattern is None else re.compile(pattern).groups
        except re.error as why:
            raise ValueError(f"this is no regular expression ({why})") from None
        if groups != 1:
            raise ValueError(f"it has {groups} groups, and the score is the text of one")
        return pattern

    @model_validator(mode="after")
    def _check_reading(self) -> Self:
        if self.pattern is not None and self.field is not None:
            raise ValueError("pattern and field are both set; keep one of them")
        if self.scale[0] == self.scale[1]:
            raise ValueError(f"the scale {self.scale} has no width")
        return self


class EndpointJudgeSettings(AnswerSettings):
    """A model behind an OpenAI-compatible endpoint, which answers in words."""

    kind: Literal["endpoint"] = "endpoint"
    """Where the model runs."""
    url: Resumable[str] = Field(pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$")
    """Base address, such as `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""
    template: str = Field(min_length=1)
    """The question. `{prompt}`, `{completion}` and `{COLUMN}` are replaced; a dot leads into a column that is
    an object; `{{word}}` stands for `{word}`. Other braces are text."""
    api_key_env: Resumable[str | None] = Field(default=None, min_length=1)
    """Environment variable that holds the API key. None: no key is sent."""
    parameters: Shared[dict[str, JsonValue]] = {"temperature": 0.0, "max_tokens": 512}
    """Further fields of the request, such as `max_tokens`."""
    concurrency: Resumable[int] = Field(default=16, ge=1, le=65_536)
    """Requests at a time."""
    asks: int = Field(default=3, ge=1, le=100)
    """How often it is asked until an answer can be read; 1 to 100. From the second time on a temperature
    of `parameters` is at least 1."""
    retry_timeout_s: Resumable[float] = Field(default=300.0, ge=0, le=86_400)
    """Seconds for which failures of the endpoint (connection, 408, 429, 5xx) are retried before a sample
    fails; at most a day."""
    cache_size: Resumable[int] = Field(default=10_000, ge=0, le=100_000_000)
    """Answers kept in memory for questions that come again; 0: none."""
    cache_folder: Resumable[RunPath | None] = None
    """Folder in which all readable answers are kept, for later runs, too. None: none."""

    @model_validator(mode="after")
    def _check_parameters(self) -> "EndpointJudgeSettings":
        for reserved in ("model", "messages", "stream", "n"):
            if reserved in self.parameters:
                raise ValueError(f"parameters.{reserved} is set by the judge; remove it")
        return self


class LocalJudgeSettings(AnswerSettings):
    """A model that a process of this run loads, on a device that it may share with an engine.

    A reward model (one output) scores the conversation. A causal language model scores the template with the
    probability of `labels[0]` among the labels as the next token, or writes one token, which is read as an
    endpoint's answer. Layers that do not fit `memory_mib` are copied from host memory while others compute
    (RollPacker 4.3).
    """

    kind: Literal["local"] = "local"
    """Where the model runs."""
    path: Shared[RunPath]
    """A Hugging Face folder."""
    template: str | None = Field(default=None, min_length=1)
    """Template, as that of an endpoint. None, for a reward model: the conversation."""
    labels: tuple[str, ...] = ("Yes", "No")
    """Answers of a causal language model; their first tokens differ. Empty: the likeliest of all tokens is
    its answer; if that cannot be read its sample fails."""
    device: Resumable[Device] = "cpu"
    """Device on which it computes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of its weights and computation."""
    threads: Resumable[int] = Field(default=1, ge=1, le=1024)
    """Threads on the CPU."""
    memory_mib: Resumable[int | None] = Field(default=None, ge=1)
    """Memory on the device for layers and activations together, in MiB. None: all layers stay there."""
    max_tokens: Resumable[int] = Field(default=4096, ge=1, le=10_000_000)
    """Tokens of a batch, padding included; a longer text fails its sample."""

    @model_validator(mode="after")
    def _check_answer(self) -> "LocalJudgeSettings":
        fields = type(self).model_fields  # a resolved config gives all of them
        given = {name for name, field in fields.items() if getattr(self, name) != field.get_default()}
        unread = sorted(given & AnswerSettings.__annotations__.keys())
        if self.labels and unread:
            raise ValueError(f"{unread[0]} reads an answer, and the labels are the answers; set labels = []")
        if len(self.labels) == 1:
            raise ValueError("one label is always the answer; name two, or none")
        return self


AnyJudgeSettings = EndpointJudgeSettings | LocalJudgeSettings
