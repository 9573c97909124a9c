"""An endpoint that answers as it is told."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

SILENCE = "silence"
"""An answer that does not come."""


@dataclass
class Endpoint:
    """What a server answers, one after another; the last answer repeats. A number is an HTTP status."""

    answers: list[str | int]
    models: list[str] | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    is_silent: asyncio.Event = field(default_factory=asyncio.Event)
    num_open: int = 0
    most_open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        if head.startswith("GET"):
            models = [{"id": name} for name in self.models or ()]
            await self._reply(writer, 404 if self.models is None else 200, {"data": models})
            return
        lengths = [
            line.split()[1] for line in head.lower().split("\r\n") if line.startswith("content-length")
        ]
        self.bodies.append(json.loads(await reader.readexactly(int(lengths[0]))))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0.01)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == SILENCE:
            self.is_silent.set()
            await reader.read()
            writer.close()
        elif isinstance(answer, int):
            await self._reply(writer, answer, {"error": f"{answer} for key-123"})
        else:
            await self._reply(writer, 200, {"choices": [{"message": {"content": answer}}]})
        self.num_open -= 1

    async def _reply(self, writer: asyncio.StreamWriter, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nconnection: close\r\n"
        writer.write(f"{line}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(*answers: str | int, models: list[str] | None = None) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(list(answers), models)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        yield endpoint


@contextmanager
def serving_on_a_thread(*answers: str | int) -> Iterator[Endpoint]:
    """As `serving`, beside a main thread that runs a loop of its own."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    found: list[Endpoint] = []
    done = asyncio.Event()

    async def main() -> None:
        async with serving(*answers) as endpoint:
            found.append(endpoint)
            started.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert started.wait(30)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()
