"""`tailrace serve --tinker`: a trainer and engines behind Tinker's API."""

from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from tailrace import clock
from tailrace.config import PolicyConfig, config_of
from tailrace.contracts.mark import claim
from tailrace.drivers.assembly.check import check_policy, fitted_to_machine
from tailrace.drivers.assembly.open import open_workers
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.trainer.checksums import CHECKSUMS_FILE
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import ConfigError, Interrupted
from tailrace.extras.serve.command import SHUTDOWN_TIMEOUT_S, ServedApi, bearer_token
from tailrace.extras.serve.generation import ServedModel
from tailrace.extras.serve.listening import HttpServer, bind
from tailrace.extras.serve.settings import ServeSettings
from tailrace.extras.tinker.app import KEY_PREFIX, make_app
from tailrace.extras.tinker.service import INITIAL, STATE, TinkerService
from tailrace.model_folder import context_length, read_config


class TinkerApi(ServedApi):
    """The service."""

    @override
    def serve(
        self,
        model: Path,
        settings: ServeSettings,
        engine: NativeEngineSettings,
        token_file: Path | None,
        folder: Path,
        overrides: Mapping[str, str],
    ) -> None:
        tree = {  # its clients say what the config of a run would
            "run": {"rounds": 1, "group_size": 2},
            "schedule": {"name": "serial"},
            "weights": {"transport": "filesystem"},
            "model": {"path": str(model.absolute())},
            "engine": engine.model_dump(mode="json", exclude_unset=True),
            "sampling": {"max_completion_tokens": context_length(model) - 1},
        }
        config = PolicyConfig.of(config_of(tree, overrides))
        if not config.engine.own_sampling:
            problem = "each request has its sampling"
            raise ConfigError("engine.kind", config.engine.kind, problem, 'use "native"')
        if config.trainer.adapter:
            problem, remedy = "the engines of this service take whole weights", 'set it to "merged"'
            raise ConfigError("trainer.lora.publish", "adapter", problem, remedy)
        if config.trainer.restarts:
            problem, remedy = "a new process would not get the calls of clients again", "leave it out"
            raise ConfigError("trainer.restarts", config.trainer.restarts, problem, remedy)
        check_policy(config)
        config = fitted_to_machine(config, prompt_tokens=1, overlaps=True).config
        names = (*STATE, "logs")
        earlier = names if (folder / INITIAL / CHECKSUMS_FILE).exists() else ()
        claim(folder, "serve", names, earlier, key="--state-folder")
        key = bearer_token(token_file, KEY_PREFIX)
        clock.run(_serve_policy(config, settings, key, folder.absolute()), virtual=False)


async def _serve_policy(config: PolicyConfig, settings: ServeSettings, key: str, folder: Path) -> None:
    """Serve a trainer and engines until a signal comes or a worker ends."""
    path, context = config.model.path, 1 + config.sampling.max_completion_tokens
    vocabulary, name = read_config(path)["vocab_size"], settings.served_model_name
    policy = ServedModel(name, path, vocabulary, context, config.trainer.lora)
    with bind(settings.host, settings.port, "--host, --port") as bound:
        async with open_workers(config, folder, load_tokenizer(path)) as workers:
            assert isinstance(workers.trainer, RemoteTrainer)
            service = TinkerService(workers.trainer, workers.engines, policy, folder)
            await service.open()
            app = make_app(service, settings, key)
            server = HttpServer(app, bound, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
            with signals_received(server.stop):
                print(f"serving   {server.url}", flush=True)
                await server.serve()
    if server.signal is not None:
        raise Interrupted("the server was stopped", server.signal)
