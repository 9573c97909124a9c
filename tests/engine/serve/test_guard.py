"""Requests that the guard refuses."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from tailrace.engine.serve.guard import Guard


@pytest.mark.parametrize(
    ("chunks", "num_read"), [([b""], 1), ([b"abc", b"def"], 2), ([b"abcdefgh", b"abcdefgh", b"a"], 2)]
)
def test_the_body_of_a_request_without_the_token_is_read_up_to_the_limit_before_the_reply(
    chunks: list[bytes], num_read: int
) -> None:
    """A connection that is closed while the client sends breaks before the client has read the reply."""
    happened: list[str] = []
    coming = iter(chunks)

    async def receive() -> Message:
        happened.append("read")
        body = next(coming)
        return {"type": "http.request", "body": body, "more_body": body != chunks[-1]}

    async def send(message: Message) -> None:
        happened.append(str(message.get("status", "body")))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the request has passed")

    guard = Guard(app, token="secret", max_body_bytes=10, all_guarded=True)
    asyncio.run(guard({"type": "http", "path": "/sleep", "headers": []}, receive, send))
    assert happened == ["read"] * num_read + ["401", "body"]
