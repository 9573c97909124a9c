"""The [reward] section: reward functions, judges, and programs with test cases."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, Tag, field_validator, model_validator

from tailrace.contracts.reward import TimeoutSettings
from tailrace.devices import Device
from tailrace.drivers.reward.calls import column_of
from tailrace.errors import ConfigError
from tailrace.settings import Resumable, RunFunction, RunPath, Settings, Shared, default_tag


class WeightedSettings(Settings):
    """Settings that reward functions and judges share."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor of its value in the reward, which is the weighted sum."""
    sources: Shared[tuple[str, ...] | None] = None
    """Data sources whose samples it scores. None: all."""

    def applies_to(self, source: str) -> bool:
        """Return whether it scores samples of a data source."""
        return self.sources is None or source in self.sources


class JudgeBase(WeightedSettings):
    """Settings of all judges."""

    name: Shared[str] = Field(default="judge", pattern=r"^[\w.-]+$")
    """Name of its metric, `rewards/NAME`."""
    system: str | None = None
    """System message that comes before the text. None: none."""


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


JudgeSettings = Annotated[EndpointJudgeSettings | LocalJudgeSettings, Field(discriminator="kind")]


class TeacherBase(Settings):
    """Settings of all teachers."""

    rows: dict[str, str | bool | int] = {}
    """Columns and values of the rows that it teaches, such as `{ topic = "sums" }`. A dot leads into a column
    that is an object. Empty: all that no earlier teacher has."""

    def teaches(self, row: Mapping[str, object]) -> bool:
        """Return whether it teaches a row."""
        return all(column_of(row, name) == value for name, value in self.rows.items())


class FolderTeacherSettings(TeacherBase):
    """A model that a process of this run loads, with the trainer's type and packing."""

    kind: Literal["folder"] = "folder"
    """Where the model runs."""
    path: Shared[RunPath]
    """A Hugging Face folder, whose vocabulary is the model's, or begins with it."""
    device: Resumable[Device | None] = None
    """Device on which it computes. None: the trainer's."""
    threads: Resumable[int] = Field(default=1, ge=1, le=1024)
    """Threads on the CPU."""


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


TeacherSettings = Annotated[
    Annotated[FolderTeacherSettings, Tag("folder")] | Annotated[ServerTeacherSettings, Tag("server")],
    default_tag("folder"),
]


SandboxKind = Literal["bubblewrap", "none"]


class CodeSettings(Settings):
    """Completions are Python programs, which are run on the test cases of their row."""

    column: str = Field(default="tests", min_length=1)
    """Column of the test cases. A dot leads into a column that is an object, for example
    `reward_model.ground_truth`. docs/how-to/score-responses.md lists the formats."""
    score: Literal["all", "share"] = "all"
    """`all`: the reward is 1 if all test cases pass, else 0; the others are stopped when one fails. `share`:
    the share of the test cases that pass."""
    timeout: TimeoutSettings = TimeoutSettings()
    memory_mib: int = Field(default=512, ge=64, le=1_048_576)
    """Address space of each process of a program, in MiB."""
    processes: int = Field(default=8, ge=1, le=4096)
    """Processes and threads of a program, itself included. Enforced by bubblewrap only."""
    tmp_mib: int = Field(default=64, ge=1, le=1_048_576)
    """Size of a program's /tmp, which is in memory, and of each file that it writes, in MiB. For each 4 KiB
    it may have one file or folder."""
    output_kib: int = Field(default=1024, ge=1, le=1_048_576)
    """Output of a program, in KiB, above which it is stopped."""


class FunctionSettings(WeightedSettings):
    """One of several reward functions."""

    function: Shared[RunFunction]
    """The function, in the forms of `reward.function`."""
    name: Shared[str | None] = Field(default=None, pattern=r"^[\w.-]+$")
    """Name of its metric, `rewards/NAME`. None: the name of the function."""
    signature: Literal["auto", "tailrace", "trl", "verl"] = "auto"
    """How it is called. "auto": recognised from its parameters."""
    arguments: dict[str, str | bool | int | float | list[str]] = {}
    """Arguments given by name in each call, for instance `{ column = "gold" }`."""


class RewardSettings(Settings):
    """How finished samples are scored."""

    function: Shared[RunFunction | None] = None
    """'package.module:name', 'path/to/file.py:name', or the name of a checker: 'math', 'exact_match',
    'json_schema'. None: the scorer of the data, where they bring one."""
    functions: tuple[FunctionSettings, ...] = ()
    """Several functions, in place of `function`. The reward is the weighted sum of their values."""
    judges: tuple[JudgeSettings, ...] = ()
    """Models whose scores are added to the reward. Without `function` and `functions`, the scorer of the data
    is then not called."""
    code: CodeSettings | None = None
    """Set: the completions of rows with test cases are programs. Other rows need a function."""
    sandbox: SandboxKind = "bubblewrap"
    """Isolation of the programs of [reward.code]. `none`: they run as this user, with your files and the
    network; only time, output and the memory of each process are bounded."""
    synchronous: bool = False
    """Whether rewards wait until no request is served (the baseline of RollPacker 4.3). Otherwise a sample
    is scored as soon as it ends. A schedule that generates without a pause cannot be synchronous."""
    timeout_s: Resumable[float] = Field(default=10.0, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds after which a call is stopped together with the processes that it started."""
    completed_only: bool = True
    """Whether a response cut off at the length limit gets 0 from checkers, scorers of the data and test cases
    (PipelineRL 5). Functions of yours get `finish_reason`."""
    on_timeout: Literal["zero", "drop"] = "zero"
    """Result of a call that is stopped: a reward of zero, which is counted as a timeout (RollPacker), or a
    failure, which drops the sample."""
    max_failures: Resumable[int | None] = Field(default=None, ge=1, le=1_000_000_000)
    """Consecutive failures or timeouts that end the run. None: as many as a round has samples."""
    workers: Resumable[int] = Field(default=1, ge=1, le=1024)
    """Processes that score, one call at a time each; with [reward.code]: test cases that run at a time."""

    @property
    def calls_functions(self) -> bool:
        """Whether reward functions are called, in reward workers."""
        return self.named() is not None or (self.code is None and not self.judges)

    def named(self) -> str | None:
        """Return what the config names as reward functions, for messages."""
        return ", ".join(each.function for each in self.functions) or self.function

    @model_validator(mode="after")
    def _check_that_there_is_one_way(self) -> "RewardSettings":
        if self.function is not None and self.functions:
            raise ValueError("function and functions are both set; keep one of them")
        names = [judge.name for judge in self.judges]
        names += [each.name for each in self.functions if self.judges and each.name]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{names.count(name)} judges or functions have the name {name!r}")
        return self


def check_sources(
    kind: Literal["function", "judge"],
    scorers: Sequence[WeightedSettings],
    sources: Collection[str],
    *,
    others: Sequence[WeightedSettings] = (),
    complete: bool = True,
) -> None:
    """Check the data sources whose samples functions or judges score. Raises a ConfigError if the data have
    no such source, or nothing scores one.

    Args:
        sources: of a mixture; empty: they are known only when rows are read.
        others: what scores samples besides them.
        complete: each source must be scored.
    """
    key = f"reward.{kind}s.sources"
    for named in [name for each in scorers for name in each.sources or () if sources]:
        if named not in sources:
            remedy = f"choose from {', '.join(sources)}"
            raise ConfigError(key, named, "the data have no such source", remedy)
    for source in sources if complete else ():
        if not any(each.applies_to(source) for each in (*scorers, *others)):
            raise ConfigError(
                key, source, f"no {kind} scores this source", "add a judge or a function for it"
            )
