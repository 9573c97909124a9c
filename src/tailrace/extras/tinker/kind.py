"""Engine and trainer at a service with Tinker's API."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tailrace.config import PolicyConfig
from tailrace.contracts.trainer import LoraSettings
from tailrace.drivers.kinds.base import EngineKind, Opening, StartingEngine, TrainerKind
from tailrace.errors import ConfigError
from tailrace.extras.tinker.settings import TinkerEngineSettings
from tailrace.importing import install

if TYPE_CHECKING:  # it needs the package that `check` looks for
    from tailrace.extras.tinker.client import TinkerTrainer


class ServiceEngines(EngineKind):
    """The samplers of the service, as one engine."""

    settings = TinkerEngineSettings

    @override
    def check(self, config: PolicyConfig) -> None:
        """The folder of the model has the tokenizer and the context; its weights are not read."""
        if importlib.util.find_spec("tinker") is None:
            raise ConfigError("engine.kind", "tinker", "tinker is not installed", install("tinker"))
        from tailrace.extras.tinker.client import check_algorithm_of_service, check_service

        check_algorithm_of_service(config.algorithm, config.sampling)
        for section, is_other, problem in (
            ("environment", config.environment.has_turns, "a service plays no episodes"),
            ("placement", config.placement.takes_turns, "the devices are the service's"),
            ("host", config.host.gives_devices, "nothing of the run is on other hosts"),
        ):
            if is_other:
                given, why = getattr(config, section).kind, f'{problem} (engine.kind = "tinker")'
                raise ConfigError(f"{section}.kind", given, why, "remove it")
        if (decay := config.trainer.learning_rate_decay) != "constant":
            problem = "the rate of a service is constant after the warm-up"
            raise ConfigError("trainer.learning_rate_decay", decay, problem, "remove it")
        assert isinstance(config.engine, TinkerEngineSettings)
        check_service(config.engine)

    @override
    def begin(self, opening: Opening, trainer: Any) -> Sequence[StartingEngine]:
        from tailrace.extras.tinker.client import TinkerEngine, TinkerTrainer

        settings, counter = opening.config.engine, opening.counter("engine-0")
        assert isinstance(settings, TinkerEngineSettings) and isinstance(trainer, TinkerTrainer)
        return [TinkerEngine(trainer.service, settings, opening.config.sampling, counter, opening.decode)]


class ServiceTrainer(TrainerKind):
    """The trainer of the service."""

    is_local = False

    @override
    async def begin(self, opening: Opening) -> "TinkerTrainer":
        from tailrace.extras.tinker.client import TinkerSession, TinkerTrainer

        config = opening.config
        assert isinstance(config.engine, TinkerEngineSettings)
        service = await TinkerSession.open(config.engine, (config.trainer.lora or LoraSettings()).rank)
        opening.closing.append(service.close)
        opening.watches.append(service.keep)
        return TinkerTrainer(service, config.trainer, config.algorithm, opening.config.sampling)
