"""Kinds: one object for each kind of a section, imported only when a config names it.

A kind has `settings`, the class of its section, and its checks, memory and opening. Another package registers
an engine or a tracker as an entry point engine.NAME or tracker.NAME of the group `tailrace.kinds`, whose
class has `interface`, too. The config takes only kinds of this package in the other sections.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationInfo
from pydantic_core import CoreSchema, core_schema

from tailrace.errors import ConfigError, did_you_mean
from tailrace.importing import described, install
from tailrace.settings import Settings

INTERFACE = 1
"""The `interface` of kinds of other packages. It rises when what is asked of a kind changes."""
BUILT_IN: Mapping[str, str] = {
    "data.rows": "tailrace.drivers.data.open:RowsData",
    "data.reasoning_gym": "tailrace.drivers.data.procedural:ProceduralData",
    "data.mixture": "tailrace.drivers.data.open:MixtureData",
    "data.verifiers": "tailrace.extras.verifiers.kind:TasksetData",
    "engine.native": "tailrace.drivers.kinds.native:Native",
    "engine.vllm": "tailrace.extras.http.kinds:VllmServers",
    "engine.sglang": "tailrace.extras.http.kinds:SglangServers",
    "engine.pipelinerl": "tailrace.extras.http.kinds:PipelineRlEngines",
    "engine.tinker": "tailrace.extras.tinker.kind:ServiceEngines",
    "environment.single_turn": "tailrace.drivers.environments.open:EnvironmentKind",
    "environment.tools": "tailrace.drivers.environments.open:ToolsEnvironments",
    "environment.python": "tailrace.drivers.environments.open:PythonEnvironments",
    "environment.agent": "tailrace.extras.agents.kind:Agents",
    "environment.openenv": "tailrace.extras.openenv.kind:OpenEnvEnvironments",
    "environment.verifiers": "tailrace.extras.verifiers.kind:TasksetEnvironments",
    "host.local": "tailrace.drivers.workers.hosts:HostKind",
    "host.join": "tailrace.extras.cluster.join:JoinHost",
    "host.ray": "tailrace.extras.cluster.kind:RayHost",
    "judge.endpoint": "tailrace.extras.judges.endpoint:EndpointJudges",
    "judge.local": "tailrace.extras.judges.worker:LocalJudges",
    "sim.fitted": "tailrace.extras.plan.fit_command:FittedSim",
    "weights.shared_memory": "tailrace.drivers.weights.transports:SharedMemory",
    "weights.filesystem": "tailrace.drivers.weights.transports:Filesystem",
    "weights.process_group": "tailrace.drivers.weights.transports:ProcessGroup",
    "reward.audit": "tailrace.extras.audit.command:RewardAudit",
    "reward.code": "tailrace.extras.sandbox.code:CodeKind",
    "teacher.folder": "tailrace.drivers.kinds.teacher:FolderTeacher",
    "teacher.server": "tailrace.extras.http.teacher:ServerTeacher",
    "tracker.mlflow": "tailrace.extras.trackers.kinds:MLflow",
    "tracker.swanlab": "tailrace.extras.trackers.kinds:SwanLab",
    "tracker.tensorboard": "tailrace.extras.trackers.kinds:TensorBoard",
    "tracker.trackio": "tailrace.extras.trackers.kinds:Trackio",
    "tracker.wandb": "tailrace.extras.trackers.kinds:Wandb",
    "trainer.torch": "tailrace.drivers.kinds.torch:Torch",
    "trainer.tinker": "tailrace.extras.tinker.kind:ServiceTrainer",
}
"""The class of each kind of this package."""
EXTRAS: Mapping[str, str] = {"engine.tinker": "tinker", "trainer.tinker": "tinker"}
"""The extra of the installation that a kind needs."""


def built_in(section: str) -> set[str]:
    """Return the names of the kinds of this package."""
    return {name for of, _, name in (each.partition(".") for each in BUILT_IN) if of == section}


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
    place, _, attribute = BUILT_IN[full].partition(":")
    try:
        return getattr(importlib.import_module(place), attribute)()
    except ImportError as why:
        if full not in EXTRAS:
            raise
        raise ConfigError(key, name, f"{why.name} is not installed", install(EXTRAS[full])) from why


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


@dataclass(frozen=True)
class PlugIn:
    """Mark of a section of a kind of another package."""

    section: str
    found: dict[str, type[Settings]] = field(default_factory=dict, compare=False)
    """The classes of those that were named."""

    def of(self, name: str) -> type[Settings]:
        """Return the class of the settings of a kind. Raises as `kind_of`."""
        self.found[name] = kind_of(self.section, name).settings
        return self.found[name]

    def load(self, table: object) -> None:
        """Import the kind that the table of a section names. Raises as `kind_of`."""
        name = table.get("kind") if isinstance(table, dict) else None
        if isinstance(name, str) and f"{self.section}.{name}" not in BUILT_IN:
            self.of(name)

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        def validated(value: Any, info: ValidationInfo) -> Settings:
            if isinstance(value, Settings):
                return value
            settings = self.of(str(value["kind"]))
            if info.mode == "json":
                return settings.model_validate_json(json.dumps(value), strict=True)
            return settings.model_validate(value)

        as_it_is = core_schema.any_schema()
        return core_schema.with_info_plain_validator_function(validated, serialization=as_it_is)


def sections_in(annotation: Any) -> list[type[Settings]]:
    """Return the sections that the type of a field may hold; of other packages, those that were named."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    for mark in annotation.__metadata__ if get_origin(annotation) is Annotated else ():
        if isinstance(mark, PlugIn):
            return list(mark.found.values())
    return [section for part in get_args(annotation) for section in sections_in(part)]
