"""The config: one TOML file, checked before anything starts.

Each section stands in the room it configures; here they are joined, read, overridden from the command
line, checked against one another, and turned into one message in the user's words when they cannot work.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import Field, ValidationError, model_validator

from tailrace.algo.base import AlgorithmSettings
from tailrace.algo.check import check_algorithm
from tailrace.data.base import DataSettings
from tailrace.engine.base import EngineSettings, SamplingSettings
from tailrace.errors import ConfigError
from tailrace.ledger.base import LedgerSettings
from tailrace.parts import RunSettings
from tailrace.record.base import RecordSettings
from tailrace.reward.base import RewardSettings
from tailrace.settings import Settings
from tailrace.sim.settings import SimSettings
from tailrace.trainer.base import TrainerSettings
from tailrace.workers.base import HostSettings

_KINDS = ("reasoning_gym", "rows", "at_most", "frontier", "frontier_first")
"""Which of a union's sections is meant: pydantic puts it into the path of a key, users do not."""


class ModelSettings(Settings):
    """The model to train."""

    path: Path
    """A Hugging Face folder: config.json, safetensors, tokenizer."""


class CompareSettings(Settings):
    """How schedules are raced."""

    schedules: tuple[str, ...] = ("serial", "rolloutpipe")
    """Schedules, or variants of this config."""
    repeats: int = Field(default=5, ge=1)
    """Counted laps of each."""
    seeds: Literal["same", "own"] = "same"
    """own: lap r of every schedule has the seed run.seed + r, its prompts with it."""
    warm_up_rounds: int = Field(default=0, ge=0)
    """First rounds of each lap that do not count; 0: a lap of each schedule before the race instead."""
    probe_every: int = Field(default=0, ge=0)
    """Rounds between the checkpoints of a lap, which are evaluated after it; 0: none."""
    target_accuracy: float = Field(default=0.8, gt=0, le=1)
    """Held out: the time until it is reached is compared."""


class RunConfig(Settings):
    """Everything a run is made from."""

    run: RunSettings
    schedule: Mapping[str, Any]
    """`name`, a schedule of ours or 'package.module:function', and that function's parameters."""
    schedules: Mapping[str, Mapping[str, Any]] = {}
    """Parameters that one schedule has of its own, by its name: used when `schedule.name` is that."""
    variants: Mapping[str, Mapping[str, Any]] = {}
    """This config under another name, for races: what stands here replaces the same keys; a `schedule`, and
    an `algorithm` with a name, the whole section."""
    compare: CompareSettings = CompareSettings()
    model: ModelSettings | None = None
    data: DataSettings | None = None
    sampling: SamplingSettings | None = None
    reward: RewardSettings = RewardSettings()
    engine: EngineSettings = EngineSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    trainer: TrainerSettings = TrainerSettings()
    host: HostSettings = HostSettings()
    ledger: LedgerSettings = LedgerSettings()
    record: RecordSettings = RecordSettings()
    sim: SimSettings = SimSettings()

    @model_validator(mode="after")
    def _check_together(self) -> "RunConfig":
        check_algorithm(self.algorithm, group_size=self.run.group_size, sampling=self.sampling)
        return self

    def variant(self, name: str) -> "RunConfig":
        """The config with the sections of [variants.NAME] over its own. A schedule stands there whole.

        Raises:
            ConfigError: what stands there does not fit a config.
        """
        tree = self.model_dump(exclude={"variants"})
        if "schedule" in self.variants[name]:
            tree["schedules"] = {}
        for section, values in self.variants[name].items():
            whole = section == "schedule" or (section == "algorithm" and "name" in values)
            tree[section] = values if whole else {**(tree.get(section) or {}), **values}
        try:
            return RunConfig.model_validate(tree)
        except ValidationError as why:
            raise explain(why, f"variants.{name}") from None

    def toml(self) -> str:
        """The resolved config, every default written out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def digest(self) -> str:
        """Names what a ledger depends on: all but how long the run is, how it is watched and where it is
        kept."""
        tree = self.model_dump(mode="json", exclude={"sim", "variants", "compare", "ledger", "record"})
        for free in ("rounds", "eval_every", "eval_prompts", "checkpoint_every", "patience_s", "give_up_s"):
            del tree["run"][free]
        return blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=8).hexdigest()


def load_config(path: Path, overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Read a config file; dotted overrides (`{"run.seed": "3"}`) win over it.

    Paths in the file are relative to the file.

    Raises:
        ConfigError: all that is wrong, in one message.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError("CONFIG", str(path), "there is no such file", "name a TOML file") from None
    except tomllib.TOMLDecodeError as why:
        raise ConfigError("CONFIG", str(path), f"this is not TOML ({why})", "mend that line") from None
    _make_paths_absolute(tree, path.parent)
    for key, text in (overrides or {}).items():
        _override(tree, key, text)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as why:
        raise explain(why) from None


def require_sections(config: RunConfig, *names: str) -> None:
    """
    Raises:
        ConfigError: a section that this command needs is missing.
    """
    for name in names:
        if getattr(config, name) is None:
            raise ConfigError(name, None, "this command needs the section", f"add [{name}] to the config")


def explain(error: ValidationError, prefix: str = "") -> ConfigError:
    """All errors of a validation as one: key, value and remedy of each."""
    errors = [_explain_one(dict(detail), prefix) for detail in error.errors()]
    first, *rest = errors
    if rest:
        first.args = ("\n".join(str(each) for each in errors),)
    return first


def _explain_one(detail: Mapping[str, Any], prefix: str) -> ConfigError:
    parts = [*prefix.split("."), *(str(part) for part in detail["loc"] if part not in _KINDS)]
    key = ".".join(part for part in parts if part)
    value, kind = detail.get("input"), detail["type"]
    if kind == "extra_forbidden":
        return ConfigError(key, value, "there is no such key", _suggest(key.split(".")))
    if kind == "missing":
        return ConfigError(key, None, "it is missing", "set it")
    message = str(detail["msg"])
    return ConfigError(key, value, message[0].lower() + message[1:], "change it")


def _suggest(parts: Sequence[str]) -> str:
    """The keys that the section does have; the most similar one first."""
    sections: list[type[Settings]] = [RunConfig]
    for part in parts[:-1]:
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        sections = [section for field in fields for section in _sections_in(field.annotation)]
    keys = list(dict.fromkeys(key for section in sections for key in section.model_fields))
    if not keys:
        return "remove it"
    close = difflib.get_close_matches(parts[-1], keys, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(keys)}"


def _sections_in(annotation: Any) -> list[type[Settings]]:
    """The sections that a field may hold, out of whatever union."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]


def _override(tree: dict[str, Any], key: str, text: str) -> None:
    """Set `a.b` from the command line. The text is a TOML value, or else a string."""
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(key, text, f"{section} is not a section", "use --section.key value")
    tree[name] = value


def _make_paths_absolute(tree: dict[str, Any], base: Path) -> None:
    for section, key in (("model", "path"), ("data", "path"), ("data", "eval_path")):
        value = _get(tree, section, key)
        if isinstance(value, str):
            tree[section][key] = str((base / value).resolve())
    for section, key in (("reward", "function"), ("schedule", "name")):
        if isinstance(value := _get(tree, section, key), str):
            tree[section][key] = _absolute_function(value, base)
    if isinstance(sinks := _get(tree, "record", "sinks"), list):
        tree["record"]["sinks"] = [
            _absolute_function(sink, base) if isinstance(sink, str) else sink for sink in sinks
        ]


def _absolute_function(name: str, base: Path) -> str:
    """'file.py:function' with an absolute path; 'package.module:function' as it is."""
    in_file = name.partition(":")[0].endswith(".py")
    return str((base / name).resolve()) if in_file else name


def _get(tree: Mapping[str, Any], section: str, key: str) -> Any:
    """What stands there, if the section is one: what it is instead, the validation tells."""
    table = tree.get(section)
    return table.get(key) if isinstance(table, dict) else None
