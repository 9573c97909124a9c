"""`tailrace serve`: the embedded engine behind HTTP, or a trainer and engines behind Tinker's API."""

import asyncio
import os
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Annotated

from cyclopts import Parameter

from tailrace import clock
from tailrace.config import PolicyConfig, config_of
from tailrace.contracts.mark import claim
from tailrace.contracts.sampling import SamplingSettings
from tailrace.devices import check_device
from tailrace.drivers.assembly.check import check_policy, fitted_to_machine
from tailrace.drivers.assembly.open import open_workers
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.data.encoding import Tokenizer, load_tokenizer
from tailrace.drivers.engine.settings import NativeEngineSettings, ServeSettings
from tailrace.drivers.kinds.native import check_served
from tailrace.drivers.trainer.checksums import CHECKSUMS_FILE
from tailrace.drivers.workers.engine import EngineJob, EngineWorker
from tailrace.drivers.workers.process import LocalSpawner, preload
from tailrace.drivers.workers.template import TemplateJob, TemplateWorker
from tailrace.drivers.workers.trainer import RemoteTrainer
from tailrace.errors import ConfigError, Interrupted, WorkerDied
from tailrace.extras.http.engine import TOKEN_VARIABLE
from tailrace.importing import install
from tailrace.model_folder import context_length, find_folder, read_config

OF_ENGINE = Parameter("*", parse=re.compile("^(?!(kind|replicas|recovery_timeout_s)$)"))
"""Settings of an engine are options, but for those that only a run has a use for."""
REPORT_EVERY_S = 0.02
"""Seconds between two outputs of a request: what a stream is late, at most."""
SHUTDOWN_TIMEOUT_S = 2
"""Seconds that replies under way have to end after a signal."""


def serve(
    model: Path,
    /,
    *,
    token_file: Path | None = None,
    tinker: bool = False,
    state_folder: Path = Path("runs/tinker"),
    settings: Annotated[ServeSettings, Parameter("*")] = ServeSettings(),  # noqa: B008 (frozen)
    engine: Annotated[NativeEngineSettings, OF_ENGINE] = NativeEngineSettings(),  # noqa: B008
    overrides: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Serve a model until a signal comes.

    Args:
        model: a Hugging Face folder with a tokenizer, the output directory of a run, or an id on the hub.
        token_file: has the bearer token, or receives a new one. Without it: $TAILRACE_TOKEN, or a new one is
            printed.
        tinker: train and sample for clients of Tinker's SDK, in place of the other routes. Settings of a
            config can be given, for example --trainer.lora.rank 16; without that all weights are trained.
        state_folder: of checkpoints, with --tinker.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401

        if tinker:
            import tinker as sdk  # noqa: F401
    except ImportError as why:
        remedy = install("tinker" if tinker else "serve")
        raise ConfigError("serve", why.name, "this package is not installed", remedy) from why
    preload()
    settings = settings.model_copy(update={"served_model_name": settings.served_model_name or str(model)})
    model = find_folder(model)
    if tinker:
        _serve_tinker(model, settings, engine, token_file, state_folder, overrides)
        return
    if overrides:
        (key, value), *_ = overrides.items()
        raise ConfigError(f"--{key}", value, "serve has no config to override without --tinker", "remove it")
    if settings.own_stable_reinforce:
        raise ConfigError("--own-stable-reinforce", True, "it is a loss of --tinker", "remove it")
    check_served(model)
    check_device("--device", engine.device)
    tokenizer = load_tokenizer(model)
    folder = settings.weights_folder
    if folder is not None and not folder.is_dir():
        raise ConfigError("--weights-folder", str(folder), "there is no such folder", "make it")
    token = bearer_token(token_file)
    clock.run(_serve(model, engine, settings, tokenizer, token), virtual=False)


def _serve_tinker(
    model: Path,
    settings: ServeSettings,
    engine: NativeEngineSettings,
    token_file: Path | None,
    folder: Path,
    overrides: Mapping[str, str],
) -> None:
    """Check the config that the options make, and serve it."""
    from tailrace.extras.tinker.app import KEY_PREFIX
    from tailrace.extras.tinker.service import INITIAL, STATE

    tree = {  # its clients say what the config of a run would
        "run": {"rounds": 1, "group_size": 2},
        "schedule": {"name": "serial"},
        "weights": {"transport": "filesystem"},
        "model": {"path": str(model.absolute())},
        "engine": engine.model_dump(mode="json", exclude_unset=True),
        "sampling": {"max_completion_tokens": context_length(model) - 1},
    }
    config = PolicyConfig.of(config_of(tree, overrides))
    if config.engine.kind != "native":
        raise ConfigError("engine.kind", config.engine.kind, "each request has its sampling", 'use "native"')
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
    from tailrace.extras.serve.generation import ServedModel
    from tailrace.extras.serve.listening import HttpServer, bind
    from tailrace.extras.tinker.app import make_app
    from tailrace.extras.tinker.service import TinkerService

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


async def _serve(
    path: Path, engine: NativeEngineSettings, settings: ServeSettings, tokenizer: Tokenizer, token: str
) -> None:
    """Serve one engine process until a signal comes or the process ends."""
    from tailrace.extras.serve.app import make_app
    from tailrace.extras.serve.generation import ServedEngine, ServedModel, body_limit
    from tailrace.extras.serve.listening import HttpServer, bind

    context = min(context_length(path), engine.kv_cache_tokens)
    model = ServedModel(settings.served_model_name, path, read_config(path)["vocab_size"], context)
    job = EngineJob(
        threads=engine.threads,
        health_timeout_s=engine.health_timeout_s,
        model=path,
        engine=engine,
        sampling=SamplingSettings(max_completion_tokens=context),
        report_every_s=REPORT_EVERY_S,
    )
    with (
        bind(settings.host, settings.port, "--host, --port") as bound,
        TemporaryDirectory(prefix="tailrace-serve-") as logs,
    ):
        spawner = LocalSpawner(Path(logs))
        process = ServedEngine(await spawner.start("engine", EngineWorker, job), job)
        if tokenizer.chat_template is not None:
            writing = TemplateJob(model=path, max_chars=body_limit(context))
            model = model._replace(template=await spawner.start("template", TemplateWorker, writing))
        try:
            await process.ready()
            app = make_app(process, tokenizer, model, settings, token)
            server = HttpServer(app, bound, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
            died = asyncio.ensure_future(process.died())
            died.add_done_callback(lambda _: server.stop())
            with signals_received(server.stop):
                print(f"serving   {server.url}", flush=True)
                await server.serve()
        finally:
            await process.close()
            if model.template:
                await model.template.close()
        if server.signal is not None:
            died.cancel()
            raise Interrupted("the server was stopped", server.signal)
        raise WorkerDied(await died)


def bearer_token(file: Path | None, prefix: str = "") -> str:
    """The bearer token of the server. Raises a ConfigError if the file cannot be read or written, or the
    token is too weak.

    Args:
        file: has the token, or receives a new one. None: it is $TAILRACE_TOKEN, or a new one that is printed.
        prefix: of a new one.
    """
    source, token = f"${TOKEN_VARIABLE}", os.environ.get(TOKEN_VARIABLE, "")
    try:
        if file is not None:
            source = str(file)
            if not file.exists():
                with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                    opened.write(f"{prefix}{secrets.token_urlsafe(32)}\n".encode())
            token = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as why:
        raise ConfigError("--token-file", str(file), str(why), "name another file") from why
    if not token and file is None:
        token = prefix + secrets.token_urlsafe(32)
        print(f"token     {token}", file=sys.stderr, flush=True)
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        problem = "a token has at least 16 printable ASCII characters without spaces"
        raise ConfigError("the token of " + source, "...", problem, "choose another")
    return token
