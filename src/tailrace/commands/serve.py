"""`tailrace serve`: the embedded engine behind HTTP."""

import asyncio
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tailrace import clock
from tailrace.commands.signals import signals_received
from tailrace.data.encoding import Tokenizer, load_tokenizer
from tailrace.devices import check_device
from tailrace.engine.http import TOKEN_VARIABLE
from tailrace.engine.native.support import check_model
from tailrace.engine.settings import HostedModel, NativeEngineSettings, SamplingSettings, ServeSettings
from tailrace.errors import ConfigError, Interrupted, WorkerDied
from tailrace.model_folder import context_length, read_config
from tailrace.settings import Settings
from tailrace.workers.messages import EngineJob
from tailrace.workers.served_engine import ServedEngine
from tailrace.workers.spawner import LocalSpawner

S = TypeVar("S", bound=Settings)

OF_A_RUN = {"kind", "replicas", "give_up_s"}
"""Settings of an engine that a server has no use for."""
REPORT_EVERY_S = 0.02
"""Seconds between two outputs of a request: what a stream is late, at most."""
GRACE_S = 2
"""Seconds that replies under way have to end after a signal."""


def settings_of_options() -> dict[str, FieldInfo]:
    """The settings that `tailrace serve` takes as options."""
    engine = {
        name: field for name, field in NativeEngineSettings.model_fields.items() if name not in OF_A_RUN
    }
    return {**ServeSettings.model_fields, **engine}


def run(model: Path, *, token_file: Path | None, **options: object) -> None:
    """Serve a model with the options of the command line. Raises as `serve`."""
    options["served_model_name"] = options["served_model_name"] or str(model)
    serve(model, _given(NativeEngineSettings, options), _given(ServeSettings, options), token_file=token_file)


def serve(
    model: Path, engine: NativeEngineSettings, settings: ServeSettings, *, token_file: Path | None = None
) -> None:
    """Serve a model until a signal comes.

    Args:
        model: a Hugging Face folder with a tokenizer.
        token_file: has the token, or receives a new one.

    Raises:
        ConfigError: the model or a setting cannot work.
        WorkerDied: the engine's process has ended.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as why:
        remedy = "pip install 'tailrace[serve]'"
        raise ConfigError("serve", why.name, "this package is not installed", remedy) from why
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
        process = await ServedEngine.spawn("engine", job, LocalSpawner(Path(logs)))
        try:
            await process.ready()
            server = HttpServer(make_app(process, tokenizer, model, settings, token), bound, grace_s=GRACE_S)
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


def _given(kind: type[S], options: Mapping[str, object]) -> S:
    """Make settings of those options that are given.

    Raises:
        ConfigError: a value is out of its range.
    """
    values = {name: value for name, value in options.items() if name in kind.model_fields}
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as why:
        defect = why.errors()[0]
        option = "--" + str(defect["loc"][0]).replace("_", "-")
        raise ConfigError(option, defect["input"], defect["msg"], "see tailrace serve --help") from why


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
