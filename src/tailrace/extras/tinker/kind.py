"""Engine and trainer at a service with Tinker's API."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from tailrace.config import PolicyConfig
from tailrace.contracts.trainer import LoraSettings
from tailrace.drivers.engine.settings import TinkerEngineSettings
from tailrace.drivers.kinds.base import EngineKind, Opening, StartingEngine, TrainerKind
from tailrace.errors import ConfigError
from tailrace.extras.tinker.client import (
    TinkerEngine,
    TinkerSession,
    TinkerTrainer,
    check_algorithm_of_service,
    check_service,
)


class ServiceEngines(EngineKind):
    """The samplers of the service, as one engine."""

    settings = TinkerEngineSettings

    @override
    def check(self, config: PolicyConfig) -> None:
        """The folder of the model has the tokenizer and the context; its weights are not read."""
        check_algorithm_of_service(config.algorithm, config.sampling)
        for section, kind, problem in (
            ("environment", "single_turn", "a service plays no episodes"),
            ("placement", "disaggregated", "the devices are the service's"),
            ("host", "local", "nothing of the run is on other hosts"),
        ):
            if (given := getattr(config, section).kind) != kind:
                raise ConfigError(
                    f"{section}.kind", given, f'{problem} (engine.kind = "tinker")', "remove it"
                )
        assert isinstance(config.engine, TinkerEngineSettings)
        check_service(config.engine)

    @override
    def begin(self, opening: Opening, trainer: Any) -> Sequence[StartingEngine]:
        settings, counter = opening.config.engine, opening.counter("engine-0")
        assert isinstance(settings, TinkerEngineSettings) and isinstance(trainer, TinkerTrainer)
        return [TinkerEngine(trainer.service, settings, opening.sampling, counter, opening.decode)]


class ServiceTrainer(TrainerKind):
    """The trainer of the service."""

    is_local = False

    @override
    async def begin(self, opening: Opening) -> TinkerTrainer:
        config = opening.config
        assert isinstance(config.engine, TinkerEngineSettings)
        service = await TinkerSession.open(config.engine, (config.trainer.lora or LoraSettings()).rank)
        opening.closing.append(service.close)
        opening.watches.append(service.keep)
        return TinkerTrainer(service, config.trainer, config.algorithm, opening.sampling)
