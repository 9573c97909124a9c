"""Kinds: one object for each kind of a section, imported only when a config names it.

A kind has `settings`, the class of its section, and its checks, memory and opening. Another package registers
an engine or a tracker as an entry point engine.NAME or tracker.NAME of the group `tailrace.kinds`, whose
class has `interface`, too. The config takes only kinds of this package in the other sections.
"""

import importlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any, get_args

from pydantic import ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from tailrace.errors import ConfigError, did_you_mean
from tailrace.importing import described
from tailrace.settings import Settings

INTERFACE = 1
"""The `interface` of kinds of other packages. It rises when what is asked of a kind changes."""
BUILT_IN: Mapping[str, str] = {
    "data.reasoning_gym": "tailrace.drivers.data.procedural:ProceduralData",
    "data.rows": "tailrace.drivers.data.open:RowsData",
    "data.verifiers": "tailrace.extras.verifiers.kind:TasksetData",
    "data.mixture": "tailrace.drivers.data.open:MixtureData",
    "engine.native": "tailrace.drivers.kinds.native:Native",
    "engine.vllm": "tailrace.extras.http.kind:VllmServers",
    "engine.sglang": "tailrace.extras.http.kind:SglangServers",
    "engine.pipelinerl": "tailrace.extras.http.kind:PipelineRlEngines",
    "engine.tinker": "tailrace.extras.tinker.kind:ServiceEngines",
    "environment.single_turn": "tailrace.drivers.environments.open:EnvironmentKind",
    "environment.tools": "tailrace.drivers.environments.tools:ToolsEnvironments",
    "environment.python": "tailrace.drivers.environments.episodes:PythonEnvironments",
    "environment.agent": "tailrace.extras.agents.kind:Agents",
    "environment.verifiers": "tailrace.extras.verifiers.kind:TasksetEnvironments",
    "environment.openenv": "tailrace.extras.openenv.kind:OpenEnvEnvironments",
    "host.local": "tailrace.drivers.workers.hosts:HostKind",
    "hosts.join": "tailrace.extras.cluster.join:JoinHost",
    "host.ray": "tailrace.extras.cluster.kind:RayHost",
    "judge.endpoint": "tailrace.extras.judges.kind:EndpointJudges",
    "judge.local": "tailrace.extras.judges.kind:LocalJudges",
    "serve.tinker": "tailrace.extras.tinker.command:TinkerApi",
    "parts.any_engine": "tailrace.drivers.engine.native.any_model:AnyEngine",
    "parts.drafter": "tailrace.drivers.engine.native.drafts:Drafter",
    "parts.equality": "tailrace.drivers.trainer.equality:Equality",
    "parts.graphs": "tailrace.drivers.engine.native.graphs:Graphs",
    "parts.restarting_trainer": "tailrace.drivers.workers.restarting:RestartingTrainer",
    "placement.joined": "tailrace.drivers.assembly.tensor_parallel:Joined",
    "run.replay": "tailrace.drivers.assembly.replay:Replay",
    "sim.fitted": "tailrace.extras.plan.fit_command:FittedSim",
    "sim.judges": "tailrace.extras.judges.kind:SimJudges",
    "weights.shared_memory": "tailrace.drivers.weights.transports:SharedMemory",
    "weights.filesystem": "tailrace.drivers.weights.transports:Filesystem",
    "weights.process_group": "tailrace.drivers.weights.process_group:ProcessGroup",
    "reward.audit": "tailrace.extras.audit.command:ShortAudit",
    "reward.checkers": "tailrace.drivers.reward.checkers:Checkers",
    "reward.code": "tailrace.extras.sandbox.code:CodeKind",
    "teacher.folder": "tailrace.drivers.kinds.torch:FolderTeacher",
    "teacher.server": "tailrace.extras.http.teacher:ServerTeacher",
    "train.dry_run": "tailrace.drivers.commands.dry_run:DryRun",
    "tracker.mlflow": "tailrace.extras.trackers.kind:MLflow",
    "tracker.swanlab": "tailrace.extras.trackers.kind:SwanLab",
    "tracker.tensorboard": "tailrace.extras.trackers.kind:TensorBoard",
    "tracker.trackio": "tailrace.extras.trackers.kind:Trackio",
    "tracker.wandb": "tailrace.extras.trackers.kind:Wandb",
    "trainer.torch": "tailrace.drivers.kinds.torch:Torch",
    "trainer.tinker": "tailrace.extras.tinker.kind:ServiceTrainer",
    "workers.judge": "tailrace.extras.judges.local:ModelJudge",
    "workers.server": "tailrace.extras.http.server:ServerWorker",
}
"""The class of each kind of this package; and hooks, which are asked for something else than a section (a
protocol of the module that asks), imported by the fork server of the workers (`workers`), or made with
arguments (`parts`)."""


def built_in(section: str) -> list[str]:
    """Return the names of the kinds of this package."""
    return [name for of, _, name in (each.partition(".") for each in BUILT_IN) if of == section]


@cache
def kind_of(section: str, name: str, key: str = "") -> Any:
    """Return a kind. Raises a ConfigError if it is not installed, two packages register it, it cannot be
    imported, or it is of another interface. `key`: of the setting that names it; by default SECTION.kind."""
    full, key = f"{section}.{name}", key or f"{section}.kind"
    if entry := registered("tailrace.kinds", full, key, BUILT_IN):
        kind = load(entry, key)
        if (given := getattr(kind, "interface", None)) != INTERFACE:
            problem = f"{package_of(entry)} has it for interface {given} of kinds, here is {INTERFACE}"
            raise ConfigError(key, name, problem, "install another version of one of them")
        return kind()
    if full not in BUILT_IN:
        there = [each.partition(".") for each in (*BUILT_IN, *entries("tailrace.kinds"))]
        known = [other for of, _, other in there if of == section]
        raise ConfigError(key, name, "nothing that is installed has such a kind", did_you_mean(name, known))
    return class_of(full)()


def class_of(name: str) -> Any:
    """Import a class of BUILT_IN."""
    place, _, attribute = BUILT_IN[name].partition(":")
    return getattr(importlib.import_module(place), attribute)


def registered(group: str, name: str, key: str, built_in: Mapping[str, object]) -> metadata.EntryPoint | None:
    """Return what another package registers. Raises a ConfigError if two do, this one included."""
    found = entries(group).get(name, ())
    packages = {*map(package_of, found)} | ({"tailrace"} if found and name in built_in else set())
    if len(packages) > 1:
        problem = f"{' and '.join(sorted(packages))} register it"
        raise ConfigError(key, name.rpartition(".")[2], problem, "uninstall one of them")
    return found[0] if found else None


def load(entry: metadata.EntryPoint, key: str) -> Any:
    """Import what another package registers. Raises a ConfigError, whatever the import raises."""
    try:
        return entry.load()
    except (Exception, SystemExit) as why:
        problem = f"{package_of(entry)} registers it, and cannot be imported ({described(why)})"
        remedy = "install another version of it, or uninstall it"
        raise ConfigError(key, entry.name.rpartition(".")[2], problem, remedy) from why


@cache
def entries(group: str) -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
    """Return what other packages register in a group, by name."""
    found = metadata.entry_points(group=group)
    return {name: tuple(found.select(name=name)) for name in sorted(found.names)}


def package_of(entry: metadata.EntryPoint) -> str:
    """Return the name and the version of the package that registers an entry."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


_SECTIONS: "list[OneOf]" = []


class OneOf:
    """Mark of a section that is of one of several kinds, each with a class of settings of its own.

    Args:
        section: its name in BUILT_IN.
        own: classes that need not be found by name, because the room that has the section defines them.
        default: the kind of a table that names none; None: it must name one.
        key: that names the kind.
        is_open: whether kinds of other packages are taken.
    """

    def __init__(
        self,
        section: str,
        *own: type[Settings],
        default: str | None = None,
        key: str = "kind",
        is_open: bool = False,
    ) -> None:
        self._section, self._default, self._key, self._is_open = section, default, key, is_open
        self.known = built_in(section)
        self.found = {str(each.model_fields[key].default): each for each in own}
        _SECTIONS.append(self)

    def of(self, name: str) -> type[Settings]:
        """Return the class of the settings of a kind. Raises as `kind_of`."""
        if name not in self.found:
            self.found[name] = kind_of(self._section, name).settings
        return self.found[name]

    def of_table(self, table: Any) -> type[Settings]:
        """Return the class that a table names. Raises as `kind_of`, or as a union of pydantic."""
        is_table = isinstance(table, dict)
        name = table.get(self._key, self._default) if is_table else getattr(table, self._key, self._default)
        by = "tag()" if self._default else f"'{self._key}'"
        if name is None and not is_table:
            return Settings  # it says that this is no table
        if name is None and not self._is_open:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": by})
        if str(name) not in self.known and not self._is_open:
            tags = ", ".join(map(repr, self.known))
            context = {"discriminator": by, "tag": str(name), "expected_tags": tags}
            raise PydanticKnownError("union_tag_invalid", context)
        return self.of(str(name))

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        as_it_is = core_schema.any_schema()
        return core_schema.with_info_plain_validator_function(self._validated, serialization=as_it_is)

    def _validated(self, value: Any, info: ValidationInfo) -> Settings:
        settings = self.of_table(value)
        if info.mode == "json":
            return settings.model_validate_json(json.dumps(value), strict=True)
        return settings.model_validate(value)


def import_all() -> None:
    """Import the settings of all kinds of this package. Until then `sections_in` has those that a config
    named."""
    for section in _SECTIONS:
        section.found = {name: section.of(name) for name in section.known} | section.found


def sections_in(annotation: Any) -> list[type[Settings]]:
    """Return the sections that a field or a type may hold; of those of several kinds, what was imported."""
    is_field = isinstance(annotation, FieldInfo)
    for mark in annotation.metadata if is_field else getattr(annotation, "__metadata__", ()):
        if isinstance(mark, OneOf):
            return [*mark.found.values()]
    annotation = annotation.annotation if is_field else annotation
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]
