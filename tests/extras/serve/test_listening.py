"""The one set-up of HTTP servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from helpers.flood import file_limit, flood, num_connections
from tailrace.drivers.workers.strangers import MAX_STRANGERS
from tailrace.extras.serve import listening
from tailrace.extras.serve.listening import HttpServer, bind

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF = GET[:-4]


async def app(scope, receive, send):
    """Answer 204 to everything."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def serving(**settings: float) -> AsyncIterator[tuple[str, int]]:
    """Yields the address of a server."""
    with bind("127.0.0.1", 0, "--port") as bound:
        server = HttpServer(app, bound, **settings)
        served = asyncio.ensure_future(server.serve())
        yield bound.getsockname()
        server.stop()
        await served


async def status(reader, writer, request=GET):
    """Send a request on a connection, and return the status; None: the connection was closed."""
    with suppress(ConnectionError, EOFError):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1])
    return None


async def test_a_client_that_connects_before_the_server_serves_is_answered():
    with bind("127.0.0.1", 0, "--port") as bound:
        server = HttpServer(app, bound)
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(GET)
        served = asyncio.ensure_future(server.serve())
        assert (await reader.readline()).startswith(b"HTTP/1.1 204")
        writer.close()
        server.stop()
        await served


@pytest.mark.parametrize("before", [b"", GET], ids=["the first request", "a later request"])
@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half a header"])
async def test_a_header_that_does_not_come_in_time_ends_the_connection(monkeypatch, before, sent):
    """After a request nothing need follow: that connection is idle, for longer here."""
    monkeypatch.setattr(listening, "HEADER_TIMEOUT_S", 0.3)
    async with serving(idle_timeout_s=30.0) as address:
        reader, writer = await asyncio.open_connection(*address)
        if before:
            assert await status(reader, writer, before) == 204
        writer.write(sent)
        if before and not sent:
            await asyncio.sleep(0.6)
            assert await status(reader, writer) == 204
        else:
            async with asyncio.timeout(20):
                assert await reader.read() == b""
        writer.close()


async def test_a_header_that_comes_in_pieces_is_waited_for():
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address)
        for piece in (HALF[:5], HALF[5:]):
            writer.write(piece)
            await asyncio.sleep(0.05)
        assert await status(reader, writer, GET[-4:]) == 204
        writer.close()


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half headers"])
async def test_a_flood_of_strangers_takes_few_descriptors_and_closes_no_connection_that_is_known(
    sent, caplog, monkeypatch
):
    monkeypatch.setattr("tailrace.extras.serve.listening.HEADER_GRACE_S", 0.05)
    async with serving() as address:
        pages = [await asyncio.open_connection(*address) for _ in range(MAX_STRANGERS // 2)]
        assert [await status(*page) for page in pages] == [204] * len(pages)
        with file_limit(200):
            async with flood(address[1], 300, sent):
                for _ in range(200):  # also in the moment in which one gives way to another
                    assert num_connections(address[1]) <= MAX_STRANGERS + len(pages)
                    await asyncio.sleep(0)
                other = await asyncio.open_connection(*address)
                assert [await status(*page) for page in [*pages, other]] == [204] * (len(pages) + 1)
        for _, writer in [*pages, other]:
            writer.close()
    assert caplog.records == []


async def test_of_too_many_connections_the_one_that_is_idle_for_the_longest_time_goes(monkeypatch):
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 3)
    async with serving() as address:
        pages = [await asyncio.open_connection(*address) for _ in range(3)]
        for page in [*pages, pages[0]]:
            assert await status(*page) == 204
        newest = await asyncio.open_connection(*address)
        assert [await status(*page) for page in [*pages, newest]] == [204, None, 204, 204]
        for _, writer in [*pages, newest]:
            writer.close()


HOST = "127.0.0.1:8000"


@pytest.mark.parametrize(
    ("method", "origin", "fetch", "expected"),
    [
        ("POST", None, "", 204),
        ("POST", f"http://{HOST}", "", 204),
        ("POST", "http://evil.example", "", 403),
        ("POST", "http://127.0.0.1:8001", "", 403),
        ("POST", f"https://{HOST}", "", 403),
        ("POST", "null", "", 403),
        ("GET", "http://evil.example", "", 403),
        ("POST", None, "cross-site", 403),
        ("POST", "http://127.0.0.1:8001", "same-site", 403),
        ("POST", "https://the.proxy.example", "same-origin", 204),
        ("GET", None, "none navigate document", 204),
        ("GET", None, "cross-site no-cors image", 403),
        ("GET", None, "cross-site navigate document", 204),
        ("GET", None, "cross-site navigate iframe", 403),
        ("POST", None, "cross-site navigate document", 403),
    ],
)
async def test_a_page_of_another_site_is_refused_unless_it_opens_one_of_ours(method, origin, fetch, expected):
    """As its browser says in the headers Origin and Sec-Fetch-Site, -Mode, -Dest."""
    given = zip(("site", "mode", "dest"), fetch.split(), strict=False)
    lines = [f"{method} / HTTP/1.1", f"host: {HOST}", *(f"sec-fetch-{key}: {value}" for key, value in given)]
    lines += [f"origin: {origin}"] * (origin is not None)
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address)
        assert await status(reader, writer, "\r\n".join([*lines, "", ""]).encode()) == expected
        writer.close()
