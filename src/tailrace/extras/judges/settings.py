"""Settings of the judges: models that score completions."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from tailrace.devices import Device
from tailrace.settings import Resumable, RunPath, Settings


class WeightedSettings(Settings):
    """Settings that reward functions and judges share."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of its value in the reward, which is the weighted sum."""
    sources: tuple[str, ...] | None = None
    """Data sources whose samples it scores. None: all."""

    def applies_to(self, source: str) -> bool:
        """Return whether it scores samples of a data source."""
        return self.sources is None or source in self.sources


class JudgeBase(WeightedSettings):
    """Settings of all judges."""

    name: str = Field(default="judge", pattern=r"^[\w.-]+$")
    """Name of its metric, `rewards/NAME`."""
    system: str | None = None
    """System message that comes before the text. None: none."""


class AnswerSettings(JudgeBase):
    """How the score is read in an answer in words."""

    pattern: str | None = None
    """Regular expression with one group, the score in the answer; the last match counts. None, without
    `field`: the last number."""
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
    parameters: dict[str, JsonValue] = {"temperature": 0.0, "max_tokens": 512}
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
    probability of `labels[0]` among the labels as the next token; with `answer_tokens` it writes an answer,
    which is read as an endpoint's. Layers that do not fit `memory_mib` are copied from host memory while
    others compute (RollPacker 4.3); for a written answer, once a token.
    """

    kind: Literal["local"] = "local"
    """Where the model runs."""
    path: RunPath
    """A Hugging Face folder."""
    template: str | None = Field(default=None, min_length=1)
    """Template, as that of an endpoint. None, for a reward model: the conversation."""
    labels: tuple[str, ...] = Field(default=("Yes", "No"), min_length=2)
    """Answers of a causal language model; their first tokens differ."""
    answer_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """Tokens of a written answer, at most; if it cannot be read its sample fails. None: none is written."""
    device: Resumable[Device] = "cpu"
    """Device on which it computes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of its weights and computation."""
    threads: Resumable[int] = Field(default=1, ge=1, le=1024)
    """Threads on the CPU."""
    memory_mib: Resumable[int | None] = Field(default=None, ge=1)
    """Memory on the device for layers and activations together, in MiB. None: all layers stay there."""
    max_tokens: Resumable[int] = Field(default=4096, ge=1, le=10_000_000)
    """Tokens of a batch, padding and answers included; a longer text fails its sample."""

    @model_validator(mode="after")
    def _check_answer(self) -> "LocalJudgeSettings":
        fields = type(self).model_fields  # a resolved config gives all of them
        given = {name for name, field in fields.items() if getattr(self, name) != field.get_default()}
        unread = sorted(given & AnswerSettings.__annotations__.keys())
        if self.answer_tokens is None and unread:
            raise ValueError(f"{unread[0]} reads an answer, and none is written; set answer_tokens")
        if {"labels", "answer_tokens"} <= given:
            raise ValueError("labels and answer_tokens are both set; keep one of them")
        if (self.answer_tokens or 0) >= self.max_tokens:
            raise ValueError(f"answer_tokens leave no room in max_tokens = {self.max_tokens}; raise it")
        return self


JudgeSettings = Annotated[EndpointJudgeSettings | LocalJudgeSettings, Field(discriminator="kind")]
