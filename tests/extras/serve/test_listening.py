"""The one set-up of HTTP servers."""

import asyncio

from tailrace.extras.serve.listening import HttpServer, bind


def test_a_client_that_connects_before_the_server_serves_is_answered():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run():
        server = HttpServer(app, bound)
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        serving = asyncio.ensure_future(server.serve())
        assert (await reader.readline()).startswith(b"HTTP/1.1 204")
        writer.close()
        server.stop()
        await serving

    with bind("127.0.0.1", 0, "--port") as bound:
        asyncio.run(asyncio.wait_for(run(), 60))
