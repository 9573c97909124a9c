"""The contract of rewards, and their settings."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from pydantic import Field, model_validator

from tailrace.errors import ConfigError
from tailrace.extras.judges.settings import JudgeSettings, WeightedSettings
from tailrace.settings import Resumable, RunFunction, Settings
from tailrace.types import FinishReason, Sample

SandboxKind = Literal["bubblewrap", "none"]


class TimeoutSettings(Settings):
    """The time limit of a test case: min(max(min_s, factor * anchor), max_s) (RollPacker 4.3).

    The anchor is the longest run of this test case among the correct responses to the prompt so far. Without
    one, and in evaluations, the limit is max_s.
    """

    adaptive: bool = True
    """False: the limit is always max_s."""
    factor: float = Field(default=1.5, ge=1, le=1000)
    """Lambda of the paper."""
    min_s: float = Field(default=2.0, gt=0, le=86_400)
    """T_min, in seconds; above 0, at most max_s."""
    max_s: float = Field(default=30.0, gt=0, le=86_400)
    """T_max, in seconds."""

    @model_validator(mode="after")
    def _check_order(self) -> "TimeoutSettings":
        if self.min_s > self.max_s:
            raise ValueError(f"min_s ({self.min_s:g}) is above max_s ({self.max_s:g})")
        return self


class CodeSettings(Settings):
    """Completions are Python programs, which are run on the test cases of their row."""

    column: str = Field(default="tests", min_length=1)
    """Column of the test cases. A dot leads into a column that is an object, for example
    `reward_model.ground_truth`. docs/environments-and-rewards.md lists the formats."""
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

    function: RunFunction
    """The function, in the forms of `reward.function`."""
    name: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """Name of its metric, `rewards/NAME`. None: the name of the function."""
    signature: Literal["auto", "tailrace", "trl", "verl"] = "auto"
    """How it is called. "auto": recognised from its parameters."""
    arguments: dict[str, str | bool | int | float | list[str]] = {}
    """Arguments given by name in each call, for instance `{ column = "gold" }`."""


class RewardSettings(Settings):
    """How finished samples are scored."""

    function: RunFunction | None = None
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


OWN_ARGUMENTS = ("prompt", "completion", "completion_ids", "finish_reason", "completion_prefix")
"""Arguments of a reward function from the sample, besides the columns of its row."""


class Call(msgspec.Struct, array_like=True):
    """The arguments of one call of a reward function."""

    prompt: str
    completion: str
    completion_ids: Sequence[int]
    finish_reason: FinishReason
    row: Mapping[str, object]
    """The columns of the data."""
    given: object = None
    """The prompt as the data give it: a string or chat messages, without one that the completion goes on
    with. None: as `prompt`."""
    source: str = ""
    """Name of the data source; empty where the data name none."""
    version: int = 0
    """Version of the policy that generated the last token."""
    messages: Sequence[Mapping[str, object]] = ()
    """The completion as chat messages, where an environment took part in it."""
    completion_prefix: str = ""
    """Beginning of the assistant's turn that the prompt already has (Prompt.opened)."""

    @classmethod
    def of(cls, sample: Sample) -> "Call":
        """Return the call that scores a finished sample, whose text is set."""
        prompt, given = sample.prompt, sample.prompt.given
        if isinstance(given, list) and given[-1].get("role") == "assistant":
            given = given[:-1]
        return cls(
            prompt.text,
            sample.text,
            sample.completion_ids,
            sample.finish_reason or "stop",
            prompt.row,
            given,
            prompt.source,
            sample.spans[-1].version if sample.spans else 0,
            sample.messages,
            prompt.opened,
        )

    @property
    def turn(self) -> str:
        """The assistant's whole turn: the beginning that the prompt has, and the completion."""
        return self.completion_prefix + self.completion

    def arguments(self) -> dict[str, object]:
        """Return the arguments by name. The sample's own win over columns of the same names."""
        return {**self.row, **{name: getattr(self, name) for name in OWN_ARGUMENTS}}


class Scores(msgspec.Struct, array_like=True):
    """Results of the reward functions for one completion."""

    reward: float
    """Weighted sum of the values."""
    metrics: dict[str, float] = {}
    """The value of each of several functions by its name, and the numbers that functions report."""
    columns: dict[str, str | float | int | None] = {}
    """Columns that functions report for the record of the sample."""


class Rewards(Protocol):
    """Scores samples outside the controller's event loop."""

    async def score(self, sample: Sample) -> float:
        """Return the reward of a finished sample. Set `sample.text`, `reward_metrics` and `reward_columns`.

        A call that exceeds the time limit gives 0.0 and sets `sample.timed_out`, or fails with the reason
        'timeout', as `RewardSettings.on_timeout` says. The call may be cancelled. Raises a RewardFailed if
        the function raised, ended its process, or returned no finite number."""
