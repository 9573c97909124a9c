"""The [data] section."""

from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from tailrace.contracts.data import PoolSettings
from tailrace.contracts.sampling import SamplingSettings
from tailrace.errors import ConfigError
from tailrace.importing import install
from tailrace.kinds import OneOf
from tailrace.model_folder import hub_snapshot, is_hub_id, path_or_hub_id
from tailrace.settings import InFolder, PlainPath, Settings, Shared

RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "return_dict", "return_tensors", "chat_template"}
)
"""Arguments of `apply_chat_template` that the data room sets itself."""


TEMPLATE_KEYS = {"system_prompt", "chat_template_kwargs", "tools_in_system_prompt"}
"""Keys of [data] that need a chat template."""


TASKSET_KEYS = ("taskset", "args", "verifiers", "agent")
"""Keys of [environment] that name the tasks of a taskset of verifiers."""


class PromptSettings(Settings):
    """How prompts become token ids. Both kinds of data have these keys."""

    brings_scorer: ClassVar[bool] = False
    """Whether the data score completions themselves."""

    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether a plain string becomes one user message of the chat template. `auto`: if there is a template.
    `always`: a missing one is an error. `never`: it is encoded as it stands. Rows that are chat messages use
    the template in each case."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """Content of a system message placed before each prompt. Rows of messages that begin with a system
    message keep their own. It needs the chat template."""
    chat_template_kwargs: Shared[dict[str, bool | int | float | str]] = {}
    """Arguments passed to the chat template, for example `{ enable_thinking = false }` for Qwen3."""
    tools_in_system_prompt: bool = False
    """Whether the tools of a prompt are described at the end of its system message, in the words of Qwen's
    template (calls are then in the format "hermes"). For models whose chat template leaves tools out."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """A longer prompt is dropped with the reason "prompt too long". In every case a prompt is dropped when
    the model's context leaves no room for one completion token."""
    pools: PoolSettings = PoolSettings()
    kind: str
    """Selects a kind of data."""

    @property
    def sources(self) -> tuple[Self]:
        """The sources of the data: themselves."""
        return (self,)

    @property
    def source_name(self) -> str:
        """Name of the data as a source of a mixture; empty: they are no such source."""
        return ""

    def pinned(self, begun: "PromptSettings | MixtureSettings | None" = None) -> Self:
        """Return the settings with the commit of each data set of the hub, which is downloaded if it is not
        in the cache. Raises a ConfigError if the hub does not give it.

        Args:
            begun: settings with which a run began. A data set that these name, too, keeps its commit.
        """
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_arguments(cls, given: dict[str, object]) -> dict[str, object]:
        for name in sorted(RESERVED_TEMPLATE_ARGUMENTS & given.keys()):
            raise ValueError(f"{name!r} is set by tailrace and cannot be given here")
        return given

    @model_validator(mode="after")
    def _check_that_the_template_is_used(self) -> "PromptSettings":
        if self.chat_template == "never" and self.model_dump(include=TEMPLATE_KEYS, exclude_defaults=True):
            named = " and ".join(sorted(TEMPLATE_KEYS))
            raise ValueError(f"{named} need the chat template, and chat_template is 'never'")
        return self


class TermsSettings(Settings):
    """The clipped lognormal distribution of one difficulty parameter of a procedural task."""

    median: float = Field(gt=0, le=1e9)
    """Median of the lognormal distribution, before rounding and clipping."""
    sigma: float = Field(ge=0, le=10)
    """Standard deviation of the logarithm; 0 gives the median each time."""
    minimum: int = Field(ge=1)
    """Smaller draws are raised to this number."""
    maximum: int = Field(ge=1)
    """Larger draws are lowered to this number."""


class ProceduralSettings(PromptSettings):
    """A reasoning-gym task: an endless stream of prompts with a scorer of its own."""

    brings_scorer: ClassVar[bool] = True

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Selects this kind of data."""
    task: Shared[str]
    """Name of the task in reasoning-gym, for example `chain_sum`."""
    params: Shared[dict[str, int | float | str | bool]] = {}
    """Parameters of the task's own config."""
    lengths: Shared[dict[str, TermsSettings]] = {}
    """Difficulty parameters drawn anew for each prompt. The task must have `min_X` and `max_X` for a key `X`:
    key `terms` draws a number and sets both `min_terms` and `max_terms` to it."""
    template: str = "{question}"
    """Text of the prompt. `{question}` is replaced by the question of the task."""
    size: int | None = Field(default=None, ge=2)
    """Number of different training prompts, shuffled anew in each epoch. Without it each prompt is new."""
    answer: str | None = None
    """Regular expression that extracts the answer from a completion: the last group of the last match.
    Without it the whole completion is the answer."""

    @model_validator(mode="after")
    def _check_pools(self) -> "ProceduralSettings":
        if self.pools.is_used and self.size is None:
            raise ValueError("pools are of prompts that come again: they need size")
        return self


DataPath = Annotated[PlainPath, InFolder(path_or_hub_id)]
HUB_TABLES = ["*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow", "*.jsonl.gz", "*.md", "*.yaml"]
"""The files of a data set of the hub that are downloaded: its tables, and what names their splits."""


def data_folder(key: str, path: Path, revision: str | None) -> Path:
    """The file or folder of a table, or the folder in the cache of a data set of the hub. Raises as
    `hub_snapshot`, or a ConfigError without the package datasets."""
    if not is_hub_id(str(path)) or path.exists():
        return path
    if find_spec("datasets") is None:
        problem = "there is no such file or folder, and a data set of the hub needs the package datasets"
        raise ConfigError(key, str(path), problem, f"correct it, or {install('datasets')}")
    return hub_snapshot(key, str(path), "data set", HUB_TABLES, repo_type="dataset", revision=revision)


class RowsSettings(PromptSettings):
    """Rows of a file or a data set."""

    kind: Literal["rows"] = "rows"
    """Selects this kind of data."""
    path: Shared[DataPath]
    """A JSONL file, a parquet file, a Hugging Face dataset folder, or the id of a data set on the hub,
    `organisation/name`: it is taken from the cache ($HF_HOME), or downloaded into it."""
    config: Shared[str | None] = None
    """Config of a data set that has several."""
    revision: Shared[str | None] = None
    """Commit, branch or tag of a data set of the hub. None: the newest commit, or that in the cache. The run
    keeps the commit with which it began."""
    prompt_column: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    prompt_template: str | None = None
    """Text of the prompt, in which {COLUMN} stands for a column of the row, and {{ for a brace. It becomes
    the column `prompt_column`. None: the rows have that column."""
    tools_column: str = "tools"
    """Column of the tools that the model may call: a list of JSON schemas, or its JSON text. Rows without it
    have none."""
    split: Shared[str] = "train"
    """Training split of a data set that has several splits."""
    eval_path: DataPath | None = None
    """File, folder or id of the evaluation set. Without it: the split `eval_split` of `path`, or else one
    sixteenth of its different prompts, which is then not trained on."""
    eval_config: Shared[str | None] = None
    """Config of the evaluation set, if `eval_path` has several."""
    eval_revision: Shared[str | None] = None
    """Commit, branch or tag of the evaluation set that `eval_path` names, as `revision`."""
    eval_split: Shared[str | None] = None
    """Evaluation split of a data set that has several splits. Without it: `test`, or else `validation`."""

    @override
    def pinned(self, begun: "PromptSettings | MixtureSettings | None" = None) -> Self:
        commits: dict[str, str | None] = {}
        for of in ("path", "eval_path"):
            name, key = f"data.{of}", of.replace("path", "revision")
            path, revision = getattr(self, of), getattr(self, key)
            if revision is None and path == getattr(begun, of, None):
                revision = getattr(begun, key, None)
            if path is not None and (folder := data_folder(name, path, revision)) != path:
                revision = folder.name
            elif revision is not None:
                problem, remedy = "it is of a data set of the hub", f"remove it, or name one in {name}"
                raise ConfigError(f"data.{key}", revision, problem, remedy)
            commits[key] = revision
        return self.changed(**commits)

    @field_validator("prompt_template")
    @classmethod
    def _check_template(cls, template: str | None) -> str | None:
        parts = [*Formatter().parse(template or "")]  # raises a ValueError of a brace without its other
        if any(name is not None and (not name or spec or how) for _, name, spec, how in parts):
            raise ValueError("braces hold the name of a column; write {{ and }} for braces of the text")
        return template


class MixedSettings(Settings):
    """Settings of a source of a mixture besides those of its kind."""

    name: Shared[str] = Field(pattern=r"^[\w.-]+$")
    """Name of the source, in metrics (`reward/source/NAME`) and in `reward.functions.sources`."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Its share of the prompts, relative to those of the other sources."""

    @property
    def source_name(self) -> str:
        return self.name


class MixedProceduralSettings(MixedSettings, ProceduralSettings):
    """A procedural task as a source of a mixture."""


class MixedRowsSettings(MixedSettings, RowsSettings):
    """Rows as a source of a mixture."""


SourceSettings = Annotated[MixedProceduralSettings | MixedRowsSettings, Field(discriminator="kind")]


class MixtureSettings(Settings):
    """Several sources of prompts, mixed with weights."""

    kind: Literal["mixture"] = "mixture"
    """Selects this kind of data."""
    sources: tuple[SourceSettings, ...] = Field(min_length=1, max_length=100)
    """The sources, each with the keys of its own kind."""
    pools: PoolSettings = PoolSettings()

    def pinned(self, begun: "PromptSettings | MixtureSettings | None" = None) -> Self:
        """Return the settings with each source as `PromptSettings.pinned`. Names identify sources."""
        earlier = {source.source_name: source for source in (begun.sources if begun else ())}
        return self.changed(sources=tuple(each.pinned(earlier.get(each.name)) for each in self.sources))

    @model_validator(mode="after")
    def _check_names(self) -> "MixtureSettings":
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two sources have the name {name!r}")
        if any(source.pools.is_used for source in self.sources):
            raise ValueError("the pools of a mixture are data.pools, and not those of a source")
        return self


DataSettings = Annotated[
    PromptSettings | MixtureSettings, OneOf("data", ProceduralSettings, RowsSettings, MixtureSettings)
]


def longest_sequence(
    data: DataSettings, sampling: SamplingSettings, *, max_context_tokens: int, unbounded_prompt: int
) -> int:
    """Tokens of the longest sequence of a run without an environment of several turns, prompt included.

    Args:
        max_context_tokens: positions of the model, prompt and completion together.
        unbounded_prompt: tokens that a prompt counts where no `max_prompt_tokens` bounds it.
    """
    prompts = [source.max_prompt_tokens or unbounded_prompt for source in data.sources]
    return min(max_context_tokens, max(prompts) + sampling.max_completion_tokens)
