"""What the workers of a run take of a cluster, role by role."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tailrace.engine.settings import EngineSettings, NativeEngineSettings
from tailrace.reward.base import RewardSettings
from tailrace.trainer.base import TrainerSettings
from tailrace.workers.base import RayHostSettings

Role = Literal["trainer", "reference", "engine", "reward"]
Strategy = Literal["PACK", "SPREAD"]

STRATEGY: Mapping[Role, Strategy] = {
    "trainer": "PACK",
    "reference": "PACK",
    "engine": "SPREAD",
    "reward": "SPREAD",
}
"""Ranks exchange gradients, so they share nodes. A lost node takes as few engines with it as possible."""


@dataclass(frozen=True, slots=True)
class Bundles:
    """The workers of one role.

    Args:
        names: one worker each.
        resources: of each worker, by name.
    """

    role: Role
    names: Sequence[str]
    resources: Mapping[str, float]


def plan_bundles(
    host: RayHostSettings,
    *,
    engine: EngineSettings,
    trainer: TrainerSettings,
    reward: RewardSettings,
    needs_reference: bool,
) -> list[Bundles]:
    """Return the bundles of a run, in the order in which they are placed."""
    named, of_trainer = host.resources, _default(trainer.threads, trainer.device)
    found = [Bundles("trainer", trainer_names(trainer), named.trainer or of_trainer)]
    if needs_reference and not trainer.lora:  # otherwise the trainer is the reference
        found.append(Bundles("reference", ["reference"], named.reference or of_trainer))
    if isinstance(engine, NativeEngineSettings):
        names = [f"engine-{number}" for number in range(engine.num_engines)]
        resources = named.engine or _default(engine.threads, engine.device)
        found.append(Bundles("engine", names, resources))
    elif not engine.urls:
        names = [f"engine-{number}" for number in range(engine.num_engines)]
        gpus = {"CPU": 1.0, "GPU": float(engine.tensor_parallel_size)}
        found.append(Bundles("engine", names, named.engine or gpus))
    names = [f"scorer-{number}" for number in range(reward.workers)]
    return [*found, Bundles("reward", names, named.reward or {"CPU": 1.0})]


def trainer_names(trainer: TrainerSettings) -> list[str]:
    """Return the names of the trainer's processes."""
    if trainer.ranks * trainer.replicas == 1:
        return ["trainer"]
    return [f"trainer-{i}-{rank}" for i in range(trainer.replicas) for rank in range(trainer.ranks)]


def _default(threads: int, device: str) -> dict[str, float]:
    return {"CPU": float(threads)} | ({} if device == "cpu" else {"GPU": 1.0})
