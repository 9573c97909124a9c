"""The config: one TOML file, checked before anything starts.

Each section is defined in the room that it configures. This module joins the sections, reads them, applies
overrides from the command line, checks them against one another, and explains what is wrong in one message.
"""

import json
import math
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

import tomli_w
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError
from typing_extensions import override

from tailrace.algo.base import AlgorithmSettings, check_algorithm
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.trainer import TrainerSettings
from tailrace.controller.base import RunSettings
from tailrace.drivers.data.settings import TASKSET_KEYS, DataSettings
from tailrace.drivers.engine.settings import EngineSettings, NativeEngineSettings
from tailrace.drivers.environments.settings import EnvironmentSettings, SingleTurnSettings
from tailrace.drivers.reward.settings import RewardSettings, TeacherSettings
from tailrace.drivers.weights.settings import SharedMemorySettings, WeightsSettings
from tailrace.drivers.workers.base import AnyHostSettings, LocalHostSettings
from tailrace.errors import ConfigError, did_you_mean, say
from tailrace.importing import check_training
from tailrace.kinds import OneOf, import_all, sections_in
from tailrace.ledger.base import LedgerSettings
from tailrace.ledger.prices import PriceSettings
from tailrace.model_folder import find_folder, model_name, path_or_hub_id
from tailrace.record.base import RecordSettings
from tailrace.rollout.admission import Admission
from tailrace.rollout.order import ORDERS
from tailrace.rollout.placement import PlacementSettings
from tailrace.schedules import SCHEDULES, Schedule
from tailrace.schedules.by_name import find_schedule, parameters_of
from tailrace.settings import (
    CHOSEN,
    RESUMABLE,
    SHARED,
    InFolder,
    PlainPath,
    Resumable,
    Settings,
    Shared,
    absolute_function,
    marks_of,
)
from tailrace.sim.settings import SimSettings

NOT_TOML = (ValueError, RecursionError)
"""Errors of Python's decoder: RecursionError of hundreds of open brackets, too."""
WHOLE, TEXT = ("it is no whole number", "write one, without quotes"), ("it is no text", "write it in quotes")
LIST = "it is no list", 'write ["A", "B"]; on the command line A,B'
SECTION = "it is no section", "write its keys below it"
PROBLEMS: Mapping[str, tuple[str, str]] = {
    "bool_type": ("it is neither true nor false", "write one of them, without quotes"),
    "date": ("it is no day", "write YYYY-MM-DD"),
    "dict_type": SECTION,
    "finite_number": ("it is not finite", "write a finite number"),
    "float_parsing": ("it is no number", "write one"),
    "float_type": ("it is no number", "write one, without quotes"),
    "greater_than": ("it must be above {gt:.10g}", "raise it"),
    "greater_than_equal": ("it must be at least {ge:.10g}", "raise it"),
    "int_from_float": WHOLE,
    "int_parsing": ("it is no whole number", "write one"),
    "int_parsing_size": ("it has too many digits", "write a smaller one"),
    "int_type": WHOLE,
    "less_than": ("it must be below {lt:.10g}", "lower it"),
    "less_than_equal": ("it must be at most {le:.10g}", "lower it"),
    "literal_error": ("there is no such choice", "choose from {expected}"),
    "model_type": SECTION,
    "path_type": TEXT,
    "string_pattern_mismatch": ("it is not of the form {pattern}", "write it so"),
    "string_too_short": ("it is empty", "write something, or remove the key"),
    "string_type": TEXT,
    "too_long": ("there are {actual_length}, and at most {max_length} may be", "remove some"),
    "too_short": ("there are {actual_length}, and at least {min_length} must be", "add some"),
    "tuple_type": LIST,
    "list_type": LIST,
    "union_tag_invalid": ("there is no such kind", "choose from {expected_tags}"),
    "union_tag_not_found": ("it names no kind", "set {discriminator}"),
}
"""Problem and remedy of each kind of error of pydantic that a key can raise, with its context filled in."""
TAG = re.compile(r"(literal|tuple|list|dict|function-\w+)\[.*|(constrained-)?(int|str|float|bool)")
"""The part of an error's path that pydantic adds for a member of a union."""


class ModelSettings(Settings):
    """The model that is trained."""

    path: Shared[Annotated[PlainPath, InFolder(path_or_hub_id)]]
    """A Hugging Face folder, the output directory of a run, or the id of a model on the hub,
    `organisation/name`: it is taken from the cache ($HF_HOME), or downloaded into it."""
    template_date: Resumable[date | None] = None
    """The day that the chat template tells, if it asks for the date (`strftime_now`), in every prompt of a
    run. None: that on which the run began."""


class CompareSettings(Settings):
    """`tailrace compare`: the schedules to compare, and how often."""

    schedules: tuple[str, ...] = ("serial", "rolloutpipe")
    """Names of the schedules."""
    repeats: int = Field(default=5, ge=1)
    """Counted trials of each schedule."""


class PlanSettings(Settings):
    """`tailrace plan`: the limits of a candidate, and how long it is simulated."""

    max_lag: int | None = Field(default=None, ge=0)
    """Largest age of a trained token, in optimizer steps. None: no limit."""
    max_mean_lag: float = Field(default=4.0, ge=0)
    """Largest mean age. Default: up to it 4,096 samples lost at most 8% of reward (docs/why/staleness.md)."""
    min_ess: float = Field(default=0.9, ge=0, le=1)
    """Least effective sample size, as a share; predicted with sim.trainer.drift."""
    max_length_bias: float = Field(default=0.02, ge=0)
    """Largest difference of the mean trained length from that of all responses to the same prompts."""
    steps: int | None = Field(default=None, ge=16)
    """Optimizer steps over which the best candidates are compared. None: 16 to 64, about 8,192 samples."""
    top: int = Field(default=10, ge=1)
    """Candidates that are printed."""


class SftSettings(Settings):
    """`tailrace sft`: supervised fine-tuning on the responses of [data]."""

    response_column: str = "response"
    """Column of the response: a string, or a list with one message. Without it the last message of the prompt
    is the response. It is trained to the end of its turn, where the exported model then ends its texts."""
    rows_per_step: int = Field(default=32, ge=1, le=65_536)
    """Rows of an optimizer step."""
    steps: Resumable[int] = Field(default=100, ge=1)
    """Optimizer steps."""
    eval_every: Resumable[int] = Field(default=20, ge=0)
    """Steps between two losses of held-out rows; there is also one at the start and at the end. 0: none."""
    eval_rows: Resumable[int] = Field(default=128, ge=1)
    """Held-out rows."""
    checkpoint_every: Resumable[int] = Field(default=50, ge=0)
    """Steps between checkpoints. 0: only at the end."""


class RunConfig(Settings):
    """The whole config of a run."""

    run: RunSettings
    schedule: Mapping[str, Any]
    """`name`: a built-in schedule, `package.module:function` or `path/to/file.py:function`. The other keys
    are the parameters of that schedule."""
    schedules: Mapping[str, Mapping[str, Any]] = {}
    """Parameters of one schedule, by its name. They replace those of [schedule] if `schedule.name` is it."""
    compare: Resumable[CompareSettings] = CompareSettings()
    plan: Resumable[PlanSettings] = PlanSettings()
    sft: SftSettings = SftSettings()
    model: ModelSettings | None = None
    data: DataSettings | None = None
    sampling: SamplingSettings | None = None
    reward: RewardSettings = RewardSettings()
    environment: EnvironmentSettings = SingleTurnSettings()
    engine: Resumable[EngineSettings] = NativeEngineSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    teacher: tuple[TeacherSettings, ...] = ()
    """The teacher of `algorithm.distill_coef`, or several, as [[teacher]]."""
    trainer: Resumable[TrainerSettings] = TrainerSettings()
    weights: Resumable[WeightsSettings] = SharedMemorySettings()
    placement: Resumable[PlacementSettings] = PlacementSettings()
    host: Resumable[AnyHostSettings] = LocalHostSettings()
    ledger: Resumable[LedgerSettings] = LedgerSettings()
    record: Resumable[RecordSettings] = RecordSettings()
    prices: Resumable[PriceSettings | None] = None
    sim: Resumable[SimSettings] = SimSettings()

    @model_validator(mode="after")
    def _check_together(self) -> "RunConfig":
        check_algorithm(self.algorithm, group_size=self.run.num_trained, sampling=self.sampling)
        if bool(self.teacher) != (self.algorithm.distill_coef > 0):
            problem = "a teacher needs a factor" if self.teacher else "there is no teacher"
            remedy = 'set algorithm.name = "distillation", and name the teacher in [teacher]'
            raise ConfigError("algorithm.distill_coef", self.algorithm.distill_coef, problem, remedy)
        cut = "[run.groups] cuts or replaces members" if self.run.groups.has_rule else ""
        cut = cut or ("an episode may fail alone" if self.environment.has_turns else "")
        if self.reward.batch == "group" and cut:
            raise ConfigError(
                "reward.batch", "group", f"a group may not become whole: {cut}", 'write "sample"'
            )
        if self.engine.of_service != self.trainer.of_service:
            problem, remedy = "engine and trainer are of one service", 'set both kinds to "tinker", or none'
            raise ConfigError("trainer.kind", self.trainer.kind, problem, remedy)
        return self

    @property
    def engines_on_gpu(self) -> bool:
        """Whether engines compute on a GPU. Servers, which choose, do if [placement] lists GPUs for them, or
        this machine has one."""
        device, listed = self.engine.torch_device, self.placement.devices == "gpus" and self.placement.engines
        return device != "cpu" if device else bool(listed) or Path("/proc/driver/nvidia/version").exists()

    @property
    def num_versions(self) -> int:
        """Versions of the weights that an engine can serve at the same time."""
        adapter = self.trainer.adapter
        return adapter.versions if adapter else 1

    def toml(self, *, chosen: bool = True) -> str:
        """Return the resolved config as TOML, with every default written out. `chosen`: whether to write what
        a live run chooses from its machine and the config does not set."""
        tree = self.model_dump(mode="json", exclude_none=True)
        for name in () if chosen else ("engine", "trainer"):
            section = getattr(self, name)
            for key, field in type(section).model_fields.items():
                if field.json_schema_extra == CHOSEN and key not in section.model_fields_set:
                    tree[name].pop(key, None)
        return tomli_w.dumps(tree)

    def shared(self) -> dict[str, Any]:
        """Return what may leave the machine (`settings.Shared`), without None. [schedule] has the parameters
        of the schedule that runs, and its name if it is built in."""
        name = str(self.schedule.get("name"))
        words = {*ORDERS, *(each.model_fields["kind"].default for each in sections_in(Admission))}
        words |= set() if ":" in name else {name}
        schedule = {**self.schedule, **self.schedules.get(name, {})}
        return {**_shared(self), "schedule": _shared(schedule, [dict], words)}

    def to_json(self) -> str:
        """Return the resolved config as JSON, for the ledger."""
        return json.dumps(self.model_dump(mode="json"))


class PolicyConfig(RunConfig):
    """The config of a policy on this machine, which is trained or served."""

    model: ModelSettings
    sampling: SamplingSettings = SamplingSettings()

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return a config with these sections, and with the folder of the model in place of its id on the
        hub. Raises a ConfigError if one of the sections is missing, and as `check_training` and
        `find_folder`."""
        if isinstance(config, cls):
            return config
        for name, field in cls.model_fields.items():
            if field.is_required() and getattr(config, name) is None:
                problem = "this command needs the section"
                raise ConfigError(name, None, problem, f"add [{name}] to the config")
        assert config.model is not None
        check_training("model.path", str(config.model.path))
        given = dict(config) | {"sampling": config.sampling or SamplingSettings()}
        found: Self = cls.model_construct(config.model_fields_set, **given)
        return found.changed(model={"path": find_folder(found.model.path)})


class LiveConfig(PolicyConfig):
    """The config of a run on this machine."""

    data: DataSettings

    @classmethod
    @override
    def of(cls, config: RunConfig) -> Self:
        """Return a config as `PolicyConfig.of`, with the commits of its data sets of the hub. Raises as that,
        and as `PromptSettings.pinned`."""
        found = super().of(config)
        return found if found is config else found.changed(data=found.data.pinned())


Config = TypeVar("Config", bound=RunConfig)
Policy = TypeVar("Policy", bound=PolicyConfig)
"""A config of either kind, which stays that."""


def _shared(value: Any, marks: Collection[object] = (), words: Collection[object] = ()) -> Any:
    """The part of a value that may leave the machine; None: nothing of it. `marks`: of its field, or `dict`
    within a table of free form. `words`: texts that are shared in each case."""
    match value:
        case Settings():
            of = type(value).model_fields.items()
            parts = {key: _shared(getattr(value, key), [*marks_of(f)], _words(f.annotation)) for key, f in of}
        case Mapping() if SHARED in marks or dict in marks:
            parts = {key: _shared(each, [dict], words) for key, each in value.items()}
        case tuple() | list():
            each = [_shared(part, marks, words) for part in value]
            return None if None in each else each
        case bool() | int() | float():
            return value
        case str() | Path() if value in words or SHARED in marks:
            names_file = isinstance(value, Path) or any(isinstance(mark, InFolder) for mark in marks)
            return value if not names_file else None if ":" in str(value) else model_name(value)
        case _:
            return None
    return {key: part for key, part in parts.items() if part is not None}


def _words(annotation: Any) -> set[object]:
    """The values of the literals in a type."""
    parts = get_args(annotation)
    return {*parts} if get_origin(annotation) is Literal else set[object]().union(*map(_words, parts))


def load_config(path: Path, overrides: Mapping[str, object] | None = None) -> RunConfig:
    """Read a config file. Paths in it are relative to it. Raises a ConfigError that names all that is wrong.
    `overrides`: values by dotted key, for example `{"run.seed": "3"}`, or tables of them. They replace those
    of the file. A text is a TOML value, or else a string."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        there = ", ".join(sorted(str(file) for file in path.parent.glob("*.toml"))[:5])
        remedy = f"choose from {there}" if there else "name a TOML file"
        raise ConfigError("CONFIG", str(path), "there is no such file", remedy) from None
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError("CONFIG", str(path), f"it cannot be read ({why})", "name a TOML file") from None
    except NOT_TOML as why:
        problem, remedy = f"this is not TOML ({why})", "correct that line"
        if found := _first_of_yaml(path.read_text(encoding="utf-8-sig")):
            problem, remedy = "this is YAML; tailrace reads TOML", "write `{}` as `{}`".format(*found)
        raise ConfigError("CONFIG", str(path), problem, remedy) from None
    try:
        return config_in(path.parent, tree, overrides)
    except RecursionError:
        raise ConfigError("CONFIG", str(path), "its tables are nested too deep", "remove some") from None


def config_in(folder: Path, tree: dict[str, Any], overrides: Mapping[str, object] | None = None) -> RunConfig:
    """Return the config of a tree of sections, with paths relative to a folder. Raises as `load_config`."""
    _make_paths_absolute(tree, [RunConfig], folder)
    if isinstance(schedule := tree.get("schedule"), dict) and isinstance(name := schedule.get("name"), str):
        schedule["name"] = absolute_function(folder, name)
    return config_of(tree, overrides)


def config_of(tree: dict[str, Any], overrides: Mapping[str, object] | None = None) -> RunConfig:
    """Return the config of a tree of sections. Raises as `load_config`."""
    written = _schedule_name(tree)
    given = dict(_by_dotted_key(overrides or {}))
    for key, value in given.items():
        _override(tree, key, value)
    tree = _with_tasks_as_data(tree)
    if isinstance(teacher := tree.get("teacher"), dict):
        tree = {**tree, "teacher": [teacher]}
    config: RunConfig = validated(RunConfig, tree)
    if written in (None, name := _schedule_name(tree)) or "schedule" in given:
        return config
    of_file = config.changed(schedule={**config.schedule, "name": written})
    kept = [key.split(".")[1] for key in given if key.startswith("schedule.")]
    return with_schedule(of_file, str(name), kept)


def _schedule_name(tree: Mapping[str, Any]) -> object:
    schedule = tree.get("schedule")
    return schedule.get("name") if isinstance(schedule, dict) else None


def _by_dotted_key(overrides: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield what replaces values of a config, with dotted keys in place of tables of tables."""
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            yield from _by_dotted_key(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def shared_parameters(config: RunConfig, name: str, schedule: Schedule | None = None) -> dict[str, Any]:
    """The [schedule] section for another schedule: the parameters that the other schedule has, too. Raises a
    ConfigError if there is no such schedule. `schedule`: the function, if no name leads to it."""
    accepted = parameters_of(schedule or find_schedule(name))
    return {key: value for key, value in config.schedule.items() if key in accepted} | {"name": name}


def translated_parameters(
    config: RunConfig, name: str, schedule: Schedule | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """[schedule] for another schedule. What it needs and the config does not give makes its rounds as large
    as those of the config's schedule, with twice a step in flight. One that makes one step of each round has
    the groups of a step in a round: its steps are as large as those of the other. Arguments and errors as
    `shared_parameters`.

    Returns:
        The parameters, and those of them that the config does not give.
    """
    shared, needed = shared_parameters(config, name, schedule), parameters_of(schedule or find_schedule(name))
    own = config.schedules.get(name, {})
    given = {key: value for key, value in {**config.schedule, **own}.items() if isinstance(value, int)}
    step = given.get("groups_per_step") or given.get("groups_per_round")
    if not step:
        return shared, {}  # the check of the parameters says what is missing
    groups = given.get("groups_per_round") or step * given.get("steps_per_round", 1)
    if "groups_per_step" not in needed:
        groups = own.get("groups_per_round", step)
    staleness = given.get("staleness", 1)
    requests = math.ceil(config.run.group_size / (config.sim.engines.count or config.engine.num_engines))
    sensible = {
        "groups_per_round": groups,
        "groups_per_step": step,
        "steps_per_round": max(1, groups // step),
        "groups_launched": math.ceil(1.5 * groups),
        "groups_per_draw": math.ceil(1.5 * groups),
        "staleness": staleness,
        "steps_off_policy": staleness,
        "groups_in_flight": (staleness + 1) * step,
        "window": step,
        "ring_groups": 2 * step,
        "in_flight_per_engine": 2 * step * requests,
        "requests_per_engine": math.ceil(1.5 * groups) * requests,
    }
    missing = [key for key, each in needed.items() if each.default is each.empty and key not in given]
    if shared.get("groups_per_round", groups) != groups:
        missing.append("groups_per_round")
    chosen = {key: sensible[key] for key in missing if key in sensible}
    return shared | chosen, chosen


def with_schedule(
    config: RunConfig, name: str, given: Collection[str] = (), schedule: Schedule | None = None
) -> RunConfig:
    """The config with [schedule] translated for another schedule; what is left out and filled in is said.
    Arguments and errors as `shared_parameters`; a ConfigError, too, if the config's own schedule lacks a key
    that is left out. `given`: keys that stay, because they were written for the other schedule."""
    section, own = dict(config.schedule), config.schedule.get("name")
    parameters, chosen = translated_parameters(config, name, schedule)
    parameters = {**parameters, **{key: section[key] for key in given}, "name": name}
    left_out = {key: value for key, value in section.items() if key not in parameters}
    for key in left_out if own in SCHEDULES else ():
        if key not in (known := parameters_of(find_schedule(own))):
            problem, remedy = f"neither {own} nor {name} has such a parameter", did_you_mean(key, known)
            raise ConfigError(f"schedule.{key}", section[key], problem, remedy)
    said = [
        f"{what} {', '.join(f'{key} = {value!r}' for key, value in part.items())}"
        for what, part in {"without": left_out, "with": chosen}.items()
        if part
    ]
    if said:
        what = f"[schedule] is translated for {name!r}: {', and '.join(said)}"
        say(f"{what}; run.rounds stays {config.run.rounds}")
    return config.changed(schedule=parameters)


def validated(kind: Any, value: object, key: str = "") -> Any:
    """A value of a TOML file as a type. No number, text or boolean is turned into one of another type. Raises
    a ConfigError that names all that is wrong. `key`: of the value, for the error."""
    for name, leaf in leaves({key: value}):
        if isinstance(leaf, int) and abs(leaf) >= 2**63:
            raise ConfigError(
                name.lstrip("."), leaf, "an integer has at most 64 bits", "choose a smaller one"
            )
    try:  # pydantic takes JSON's lists and texts for tuples and paths, and is strict with everything else
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as why:
        import_all()
        errors = (_explained(dict(detail), key, sections_in(kind)) for detail in why.errors())
        by_key = {each.key: each for each in errors}  # of the members of a union the last one speaks
        raise _joined([*by_key.values()]) from None


def _with_tasks_as_data(tree: dict[str, Any]) -> dict[str, Any]:
    """The tasks of a taskset of verifiers are the data: [data] takes over what names them."""
    environment, data = tree.get("environment"), tree.get("data", {})
    if not isinstance(environment, dict) or environment.get("kind") != "verifiers":
        return tree
    names = {key: environment[key] for key in TASKSET_KEYS if key in environment}
    return {**tree, "data": {"kind": "verifiers", **data, **names} if isinstance(data, dict) else data}


def files_of(config: RunConfig) -> Iterator[Path]:
    """Yield the files and folders that the config names and that a resumed run must find as they were."""
    for key, value in leaves(_effective(config.model_dump(mode="json"))):
        *parts, name = (part for part in key.split(".") if not part.isdigit())
        marks = [mark for field in _fields(sections_at(parts), name) for mark in marks_of(field)]
        if may_change(key) or not (
            key == "schedule.name" or any(isinstance(mark, InFolder) for mark in marks)
        ):
            continue
        for text in value if isinstance(value, list) else [value]:
            place = text.rpartition(":")[0]  # of a function: a file, or a module that was imported
            yield Path(getattr(sys.modules.get(place), "__file__", None) or place or text)


def changed_keys(old: str, config: RunConfig) -> dict[str, tuple[object, object]]:
    """Return the keys that differ from an earlier config (`RunConfig.to_json`), with both values, or None. A
    key that a version before this one lacked is not among them while it has its default."""
    before, after = (dict(leaves(_effective(json.loads(text)))) for text in (old, config.to_json()))
    both = {key: (before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())}
    changed = {key: (one, other) for key, (one, other) in both.items() if one != other}
    return {key: (one, other) for key, (one, other) in changed.items() if not _is_newer(key, other, before)}


def _is_newer(key: str, value: object, before: Mapping[str, object]) -> bool:
    """Whether a key that is not in an earlier config has its default, in a section that is not optional or
    that the earlier config has."""

    def defaults(parts: Sequence[str]) -> list[object]:
        names = [part for part in parts if not part.isdigit()]
        return [field.default for field in _fields(sections_at(names[:-1]), names[-1])]

    parts = key.split(".")
    above = [parts[:number] for number in range(1, len(parts))]
    absent = [each for each in above if not any(one.startswith(".".join(each) + ".") for one in before)]
    is_there = all(None not in defaults(each) for each in absent)
    return key not in before and value in defaults(parts) and is_there


def may_change(key: str) -> bool:
    """Return whether a resumed run may have changed a key, which may be one of an earlier version."""
    parts = [part for part in key.split(".") if not part.isdigit()]
    fields = [field for n, part in enumerate(parts) for field in _fields(sections_at(parts[:n]), part)]
    if (sections := sections_at(parts[:-1])) and not _fields(sections, parts[-1]):
        return True  # an earlier version had it
    return any(RESUMABLE in marks_of(field) for field in fields)


def check_resumable(old: str, config: RunConfig) -> None:
    """Check that a run that began with an earlier config (`RunConfig.to_json`) can be resumed with this one.
    Raises a ConfigError if keys changed that must stay; the message names each with both values."""
    errors = []
    if changed := changed_keys(old, config):
        import_all()
    for key, (before, after) in changed.items():
        if not may_change(key):
            begun = "without it" if before is None else f"with {before!r}"
            remedy = "change it back, or begin a new run in another --output-dir"
            errors.append(ConfigError(key, after, f"the run was begun {begun}", remedy))
    if errors:
        raise _joined(errors)


def _effective(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the parameters of the schedule that runs, and leave those of the others out."""
    own = (tree.get("schedules") or {}).get(str(tree["schedule"].get("name")), {})
    return {**tree, "schedule": {**tree["schedule"], **own}, "schedules": {}}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with its value; None counts as absent. Tables of an array have numbers as
    keys."""
    for name, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            value = {str(number): each for number, each in enumerate(value)}
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _joined(errors: Sequence[ConfigError]) -> ConfigError:
    errors[0].args = ("\n".join(map(str, errors)),)
    return errors[0]


def wrong_options(why: ValidationError, section: type[Settings]) -> ConfigError:
    """The error of a section whose keys are options of a command; it names all that are wrong."""
    errors = [_explained(dict(detail), "", [section]) for detail in why.errors()]
    names = [f"--{each.key.replace('_', '-')}" for each in errors]
    pairs = zip(names, errors, strict=True)
    return _joined([ConfigError(name, each.value, each.problem, each.remedy) for name, each in pairs])


def _explained(detail: Mapping[str, Any], prefix: str, sections: Sequence[type[Settings]]) -> ConfigError:
    parts = [*prefix.split("."), *_without_tags(detail["loc"], sections)]
    key = ".".join(part for part in parts if part)
    value, fault = detail.get("input"), detail["type"]
    if fault == "extra_forbidden":
        return ConfigError(key, value, "there is no such key", _suggest(key.split(".")))
    if fault == "missing":
        return ConfigError(key, None, "it is missing", "set it")
    message, _, remedy = str(detail["msg"]).removeprefix("Value error, ").partition("; ")
    remedy = remedy or ("change one of these keys" if isinstance(value, dict) else "correct it")
    fault = "date" if fault.startswith("date_") else fault
    if fault in PROBLEMS:
        message, remedy = (each.format(**detail.get("ctx", {})) for each in PROBLEMS[fault])
    *places, name = [part for part in parts if part and not part.isdigit()] or [""]
    if fault.startswith(("greater", "less")) and (fields := _fields(sections_at(places, sections), name)):
        remedy += f": {' '.join((fields[0].description or '').split())}"  # it says how "off" is written
    return ConfigError(key, value, message[0].lower() + message[1:], remedy)


def _without_tags(loc: Sequence[str | int], sections: Sequence[type[Settings]]) -> Iterator[str]:
    """Yield the parts of a path in sections that users write. pydantic adds the kind of a section of a union
    of its own."""
    for part in map(str, loc):
        fields = _fields(sections, part)
        if not fields and TAG.fullmatch(part) and ("[" in part or part == loc[-1]):
            continue
        if fields or part not in [each.default for each in _fields(sections, "kind")]:
            yield part
            if not part.isdigit():
                sections = [inner for field in fields for inner in sections_in(field)]


def counterparts() -> dict[str, list[str]]:
    """Return our keys, and what TRL, verl and earlier versions call them: a name, or section and name."""
    return tomllib.loads(Path(__file__).with_name("counterparts.toml").read_text(encoding="utf-8"))


def _suggest(parts: Sequence[str]) -> str:
    """Return a remedy for an unknown key of a section."""
    parts = [part for part in parts if not part.isdigit()]
    theirs = {parts[-1], ".".join(parts)}
    ours = [key for key, names in counterparts().items() if theirs.intersection(names)]
    if ours:
        return f"here this is {ours[0]}"
    sections = sections_at(parts[:-1])
    fields = (each.model_fields for each in sections if {"kind", parts[-1]} <= each.model_fields.keys())
    kinds = dict.fromkeys(each["kind"].default for each in fields)
    if kinds:
        return f"it belongs to {' or '.join(map(repr, kinds))}: set {'.'.join(parts[:-1])}.kind"
    known = (key for section in sections for key in section.model_fields)
    return did_you_mean(parts[-1], dict.fromkeys(known))


def sections_at(
    parts: Sequence[str], sections: Sequence[type[Settings]] = (RunConfig,)
) -> Sequence[type[Settings]]:
    """Return the sections that may stand at a dotted key of some, without the numbers of arrays, as
    `sections_in`."""
    for part in parts:
        sections = [inner for field in _fields(sections, part) for inner in sections_in(field)]
    return sections


def _fields(sections: Sequence[type[Settings]], name: str) -> list[FieldInfo]:
    return [section.model_fields[name] for section in sections if name in section.model_fields]


def _override(tree: dict[str, Any], key: str, given: object) -> None:
    """Set the key `a.b` to a value; of a text, as of the command line: to a TOML value, or else a string."""
    text = str(given)
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # as Python decodes other bytes
        raise ConfigError(key, text, "it is not UTF-8", "write it in UTF-8")
    value = given if isinstance(given, list | tuple) else _toml_or_text(text)
    *sections, name = key.split(".")
    if not isinstance(value, list | tuple) and not text.startswith("[") and _takes_list(key.split("."), text):
        value = [_toml_or_text(part.strip()) for part in text.split(",") if part.strip()]
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(key, text, f"{section} is not a section", "use --section.key value")
    tree[name] = value


def _toml_or_text(text: str) -> Any:
    """Return the TOML value that a text is, or else the text."""
    try:
        toml = text.lower() if text in ("True", "False") else text  # as Python writes them
        return tomllib.loads(f"value = {toml}")["value"]
    except NOT_TOML:
        return text


def _takes_list(parts: Sequence[str], text: str) -> bool:
    """Whether a key takes a list, and not this text."""
    fields = _fields(sections_at(parts[:-1]), parts[-1])
    if not fields and parts[0] != "schedule":  # whose keys are parameters of a function
        import_all()  # the command line may name a kind that the file does not
        fields = _fields(sections_at(parts[:-1]), parts[-1])
    for field in fields:
        kinds = [field.annotation] if get_origin(field.annotation) is tuple else get_args(field.annotation)
        if any(get_origin(kind) is tuple for kind in kinds):
            return not any(get_origin(kind) is Literal and text in get_args(kind) for kind in kinds)
    return False


def _first_of_yaml(text: str) -> tuple[str, str] | None:
    """Return the first line of a text, if it is YAML, and the same in TOML."""
    lines = (line.strip() for line in text.splitlines())
    line = next((line for line in lines if line and not line.startswith(("#", "---"))), "")
    if not (found := re.fullmatch(r"([\w.-]+):(?:\s+(.*))?", line)):
        return None
    value = _toml_or_text(found[2] or "")
    return line, f"{found[1]} = {json.dumps(value, default=str)}" if found[2] else f"[{found[1]}]"


def _make_paths_absolute(table: Any, sections: Sequence[type[Settings]], folder: Path) -> None:
    """Resolve the names of files in a table that is one of several sections. Values of other types stay: the
    validation refuses them."""
    for name, value in table.items() if isinstance(table, dict) else ():
        for field in _fields(sections, name):
            tables = value if isinstance(value, list) else [value]
            for mark in marks_of(field):
                if isinstance(mark, OneOf):
                    for each in tables:
                        with suppress(PydanticKnownError):
                            mark.of_table(each)
                if isinstance(mark, InFolder):
                    table[name] = _resolved(mark, value, folder)
            for each in tables:
                _make_paths_absolute(each, sections_in(field), folder)


def _resolved(mark: InFolder, value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_resolved(mark, each, folder) for each in value]
    return mark.resolve(folder, value) if isinstance(value, str) and "\0" not in value else value
