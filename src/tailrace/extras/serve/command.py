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
from typing import Annotated, Protocol

from cyclopts import Parameter

from tailrace import clock
from tailrace.contracts.sampling import SamplingSettings
from tailrace.devices import check_device
from tailrace.drivers.assembly.signals import signals_received
from tailrace.drivers.data.encoding import Tokenizer, load_tokenizer
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.kinds.native import check_served
from tailrace.drivers.workers.engine import EngineJob, EngineWorker
from tailrace.drivers.workers.process import LocalSpawner, preload
from tailrace.drivers.workers.template import TemplateJob, TemplateWorker
from tailrace.errors import ConfigError, Interrupted, WorkerDied
from tailrace.extras.http.engine import TOKEN_VARIABLE
from tailrace.extras.serve.settings import ServeSettings
from tailrace.importing import install
from tailrace.kinds import kind_of
from tailrace.model_folder import context_length, find_folder, read_config

OF_ENGINE = Parameter("*", parse=re.compile("^(?!(kind|replicas|recovery_timeout_s)$)"))
"""Settings of an engine are options, but for those that only a run has a use for."""
REPORT_EVERY_S = 0.02
"""Seconds between two outputs of a request: what a stream is late, at most."""
SHUTDOWN_TIMEOUT_S = 2
"""Seconds that replies under way have to end after a signal."""


class ServedApi(Protocol):
    """Another API in place of the routes of this product."""

    def serve(
        self,
        model: Path,
        settings: ServeSettings,
        engine: NativeEngineSettings,
        token_file: Path | None,
        folder: Path,
        overrides: Mapping[str, str],
    ) -> None:
        """Check the config that the options of `serve` make, and serve it. `folder`: of its state."""


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
        service: ServedApi = kind_of("serve", "tinker", "--tinker")
        service.serve(model, settings, engine, token_file, state_folder, overrides)
        return
    if overrides:
        (key, value), *_ = overrides.items()
        raise ConfigError(f"--{key}", value, "serve has no config to override without --tinker", "remove it")
    if settings.own_stable_reinforce:
        raise ConfigError("--own-stable-reinforce", True, "it is a loss of --tinker", "remove it")
    check_served(model, engine, "--drafts")
    check_device("--device", engine.device)
    tokenizer = load_tokenizer(model)
    folder = settings.weights_folder
    if folder is not None and not folder.is_dir():
        raise ConfigError("--weights-folder", str(folder), "there is no such folder", "make it")
    token = bearer_token(token_file)
    clock.run(_serve(model, engine, settings, tokenizer, token), virtual=False)


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
