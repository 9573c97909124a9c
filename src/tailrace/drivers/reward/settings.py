"""The [reward] section: reward functions, judges, and programs with test cases."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tailrace.contracts.reward import TimeoutSettings
from tailrace.devices import Device
from tailrace.drivers.reward.calls import column_of
from tailrace.errors import ConfigError
from tailrace.kinds import OneOf
from tailrace.settings import Resumable, RunFunction, RunPath, Settings, Shared


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


JudgeSettings = Annotated[JudgeBase, OneOf("judge")]


class TeacherBase(Settings):
    """Settings of all teachers."""

    rows: dict[str, str | bool | int] = {}
    """Columns and values of the rows that it teaches, such as `{ topic = "sums" }`. A dot leads into a column
    that is an object. Empty: all that no earlier teacher has."""
    kind: str
    """Where the model runs."""

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


TeacherSettings = Annotated[TeacherBase, OneOf("teacher", FolderTeacherSettings, default="folder")]


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
    batch: Literal["sample", "group"] = "sample"
    """How many completions a call of a function of TRL's signature has. "sample": one, as soon as it ends.
    "group": all members of a group in their order, when the last has ended; it returns one number for each,
    and fails for all. Held-out completions are scored one by one. Other functions get one a call."""
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
