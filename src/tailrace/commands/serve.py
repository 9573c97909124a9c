"""`tailrace serve`: the embedded engine behind HTTP."""

import asyncio
import os
import re
import secrets
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from tailrace import clock
from tailrace.commands.signals import signals_received
from tailrace.data.encoding import Tokenizer, load_tokenizer
from tailrace.devices import check_device
from tailrace.engine.http import TOKEN_VARIABLE
from tailrace.engine.native.support import check_model
from tailrace.engine.settings import HostedModel, NativeEngineSettings, SamplingSettings, ServeSettings
from tailrace.errors import ConfigError, Interrupted, WorkerDied
from tailrace.model_folder import context_length, read_config
from tailrace.workers.engine import EngineJob, EngineWorker, ServedEngine
from tailrace.workers.process import LocalSpawner

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
    settings: Annotated[ServeSettings, Parameter("*")] = ServeSettings(),  # noqa: B008 (frozen)
    engine: Annotated[NativeEngineSettings, OF_ENGINE] = NativeEngineSettings(),  # noqa: B008
) -> None:
    """Serve a model until a signal comes.

    Args:
        model: a Hugging Face folder with a tokenizer.
        token_file: has the bearer token, or receives a new one. Without it: $TAILRACE_TOKEN, or a new one is
            printed.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as why:
        remedy = "pip install 'tailrace[serve]'"
        raise ConfigError("serve", why.name, "this package is not installed", remedy) from why
    settings = settings.model_copy(update={"served_model_name": settings.served_model_name or str(model)})
    check_model(model)
    check_device("--device", engine.device)
    tokenizer = load_tokenizer(model)
    folder = settings.weights_folder
    if folder is not None and not folder.is_dir():
        raise ConfigError("--weights-folder", str(folder), "there is no such folder", "make it")
    served = HostedModel(
        path=model,
        dtype=engine.dtype,
        max_model_len=min(context_length(model), engine.kv_cache_tokens),
        vocab_size=read_config(model)["vocab_size"],
        kv_cache_tokens=engine.kv_cache_tokens,
    )
    token = bearer_token(token_file)
    clock.run(_serve(served, engine, settings, tokenizer, token), virtual=False)


async def _serve(
    model: HostedModel,
    engine: NativeEngineSettings,
    settings: ServeSettings,
    tokenizer: Tokenizer,
    token: str,
) -> None:
    """Serve one engine process until a signal comes or the process ends."""
    from tailrace.engine.serve.app import make_app
    from tailrace.engine.serve.listening import HttpServer, bind

    job = EngineJob(
        threads=engine.threads,
        model=model.path,
        engine=engine,
        sampling=SamplingSettings(max_completion_tokens=model.max_model_len),
        report_every_s=REPORT_EVERY_S,
    )
    with (
        bind(settings.host, settings.port, "--host, --port") as bound,
        TemporaryDirectory(prefix="tailrace-serve-") as logs,
    ):
        worker = await LocalSpawner(Path(logs)).start("engine", EngineWorker, job)
        process = ServedEngine(worker, job)
        try:
            await process.ready()
            server = HttpServer(
                make_app(process, tokenizer, model, settings, token),
                bound,
                shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
            )
            died = asyncio.ensure_future(process.died())
            died.add_done_callback(lambda _: server.stop())
            with signals_received(server.stop):
                print(f"serving   {server.url}", flush=True)
                await server.serve()
        finally:
            await process.close()
        if server.signal is not None:
            died.cancel()
            raise Interrupted("the server was stopped", server.signal)
        raise WorkerDied(await died)


def bearer_token(file: Path | None) -> str:
    """The bearer token of the server.

    Args:
        file: has the token, or receives a new one. None: it is $TAILRACE_TOKEN, or a new one that is printed.

    Raises:
        ConfigError: the file cannot be read or written, or the token is too weak.
    """
    source, token = f"${TOKEN_VARIABLE}", os.environ.get(TOKEN_VARIABLE, "")
    try:
        if file is not None:
            source = str(file)
            if not file.exists():
                with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                    opened.write(secrets.token_urlsafe(32) + "\n")
            token = file.read_text().strip()
    except (OSError, ValueError) as why:
        raise ConfigError("--token-file", str(file), str(why), "name another file") from why
    if not token and file is None:
        token = secrets.token_urlsafe(32)
        print(f"token     {token}", file=sys.stderr, flush=True)
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        problem = "a token has at least 16 printable ASCII characters without spaces"
        raise ConfigError("the token of " + source, "...", problem, "choose another")
    return token
