"""`tailrace serve`: the embedded engine behind HTTP."""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from pydantic import ValidationError

from tailrace import clock
from tailrace.commands.signals import signals_received
from tailrace.data.encoding import Tokenizer, load_tokenizer
from tailrace.devices import check_device
from tailrace.engine.http import TOKEN_VARIABLE
from tailrace.engine.native.support import check_model
from tailrace.engine.serve.settings import ServedModel, ServeSettings
from tailrace.engine.settings import NativeEngineSettings, SamplingSettings
from tailrace.errors import ConfigError, Interrupted, WorkerDied
from tailrace.model_folder import context_length, read_config
from tailrace.settings import Settings
from tailrace.workers.messages import EngineJob
from tailrace.workers.served_engine import ServedEngine
from tailrace.workers.spawner import LocalSpawner

S = TypeVar("S", bound=Settings)

REPORT_EVERY_S = 0.02
"""Seconds between two outputs of a request: what a stream is late, at most."""
GRACE_S = 2.0
"""Seconds that replies under way have to end after a signal."""


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
    served = ServedModel(
        path=model,
        dtype=engine.dtype,
        max_model_len=min(context_length(model), engine.kv_cache_tokens),
        vocab_size=read_config(model)["vocab_size"],
        kv_cache_tokens=engine.kv_cache_tokens,
    )
    server = _Server(served, engine, settings, tokenizer, bearer_token(token_file))
    clock.run(server.run(), virtual=False)


@dataclass
class _Server:
    """One engine process and the HTTP server before it."""

    model: ServedModel
    engine: NativeEngineSettings
    settings: ServeSettings
    tokenizer: Tokenizer
    token: str

    async def run(self) -> None:
        """Serve until a signal comes or the engine ends."""
        sampling = SamplingSettings(max_completion_tokens=self.model.max_model_len)
        job = EngineJob(
            threads=self.engine.threads,
            model=self.model.path,
            engine=self.engine,
            sampling=sampling,
            report_every_s=REPORT_EVERY_S,
        )
        with self._bound() as bound, TemporaryDirectory(prefix="tailrace-serve-") as logs:
            process = await ServedEngine.spawn("engine", job, LocalSpawner(Path(logs)))
            try:
                await process.ready()
                await self._serve(process, bound)
            finally:
                await process.close()

    async def _serve(self, process: ServedEngine, bound: socket.socket) -> None:
        import uvicorn

        from tailrace.engine.serve.app import make_app
        from tailrace.engine.serve.listening import Server, TimedProtocol
        from tailrace.engine.serve.requests import Requests

        requests = Requests(process)
        app = make_app(requests, process, self.tokenizer, self.model, self.settings, self.token)
        config = uvicorn.Config(
            app,
            http=TimedProtocol,
            log_level="warning",
            timeout_graceful_shutdown=round(GRACE_S),
            lifespan="off",
        )
        server = Server(config)
        received: list[int] = []

        def stop(signal: int) -> None:
            received.append(signal)
            server.should_exit = True  # it looks at this several times a second

        serving = asyncio.ensure_future(server.serve([bound]))
        died = asyncio.ensure_future(process.died())
        died.add_done_callback(lambda _: setattr(server, "should_exit", True))
        with signals_received(stop):
            host, port = bound.getsockname()[:2]
            print(f"serving   http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
            await asyncio.wait([serving, died], return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                requests.fail(WorkerDied(died.result()))
            await serving
        if died.done():
            raise WorkerDied(died.result())
        died.cancel()
        if received:
            raise Interrupted("the server was stopped", received[0])

    def _bound(self) -> socket.socket:
        """A socket with the address, so that one in use is known before the model is loaded."""
        host, port = self.settings.host, self.settings.port
        try:
            (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            bound = socket.socket(family, socket.SOCK_STREAM)
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(address)
            except OSError:
                bound.close()
                raise
            return bound
        except OSError as why:
            problem = f"the server cannot listen there: {why}"
            raise ConfigError("--host, --port", f"{host}:{port}", problem, "choose another") from why


def given(kind: type[S], values: Mapping[str, object]) -> S:
    """Make settings of command-line options.

    Args:
        values: by field; None: not given.

    Raises:
        ConfigError: a value is out of its range.
    """
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
